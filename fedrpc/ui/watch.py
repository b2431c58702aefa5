"""Finds the runs and comparisons of a folder, and keeps what is known of them up to date for whoever looks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from fedrpc.ui.run import LiveRun
from fedrpc.ui.status import list_locks

_DEPTH = 3  # of folders within folders: runs/compare-x/flea
_MOST = 2000  # runs
_FIND_EVERY_S = 2.0
_READ_EVERY_S = 0.8
_REST_EVERY_S = 3.0  # for runs that are not under way
_SERVED = frozenset({".html", ".png", ".svg", ".json", ".csv", ".tex", ".pdf"})
_PRIVATE = frozenset({"clients", "checkpoints", "spool"})


class Folder:
    """The runs of a folder.

    Args:
        base: Below which names are.
        only: The one run to watch, if it is not all; it need not exist yet.
    """

    def __init__(self, base: Path, only: str = "") -> None:
        self.base, self.only = base, only
        self.runs: dict[str, LiveRun] = {}
        self.comparisons: list[str] = []  # folders that have a compare.html, by name
        self._lock = threading.Lock()
        self._found_at = self._read_at = 0.0
        self._close_at: dict[str, float] = {}
        self._rest_at: dict[str, float] = {}

    def refresh(self, closely: Collection[str] = (), *, at_once: bool = False) -> None:
        """Looks for new runs, and reads what is new of all; does nothing when it was done a moment ago.

        Args:
            closely: Names of the runs whose large files are to be followed, too.
            at_once: Whether to look even so: nobody will look again.
        """
        with self._lock:
            now = time.monotonic()
            if at_once:
                self._found_at = self._read_at = 0.0
                self._close_at.clear()
                self._rest_at.clear()
            if now - self._found_at > _FIND_EVERY_S:
                self._find()
                self._found_at = now
            wanted = {
                name for name in closely if name in self.runs and now - self._close_at.get(name, 0.0) > _READ_EVERY_S
            }
            everybody = now - self._read_at > _READ_EVERY_S
            locks = list_locks() if everybody or wanted else set()
            for name, run in self.runs.items():
                if name in wanted:
                    self._close_at[name] = now
                    run.refresh(locks, closely=True)
                elif everybody and (run.status == "running" or now - self._rest_at.get(name, 0.0) > _REST_EVERY_S):
                    self._rest_at[name] = now
                    run.refresh(locks)
            self._read_at = now if everybody else self._read_at

    def _find(self) -> None:
        found = dict(self._iter_runs(self.base / self.only, _DEPTH))
        if self.only:  # its page may be open before it has begun
            found[self.only] = self.base / self.only
        self.runs = {name: self.runs.get(name) or LiveRun(folder, name) for name, folder in sorted(found.items())}
        folders = {name.rpartition("/")[0] for name in self.runs} | {""}
        if self.only:
            folders = {folder for folder in folders if folder.startswith(self.only)}
        self.comparisons = sorted(name for name in folders if (self.base / name / "compare.html").is_file())

    def _iter_runs(self, folder: Path, depth: int) -> Iterator[tuple[str, Path]]:
        if (folder / "config.toml").is_file():
            yield folder.relative_to(self.base).as_posix(), folder
            return
        if not depth:
            return
        try:
            with os.scandir(folder) as entries:
                below = sorted(
                    each.name
                    for each in entries
                    if each.is_dir(follow_symlinks=False) and not each.name.startswith((".", "__"))
                )
        except OSError:  # it vanished, or is not ours to read
            return
        for name in below[:_MOST]:
            yield from self._iter_runs(folder / name, depth - 1)

    def find_file(self, name: str) -> Path | None:
        """A page or picture of a run or comparison that may be shown; None for everything else."""
        parts = name.split("/")
        if any(part in ("", ".", "..") or part.startswith(".") or part in _PRIVATE for part in parts):
            return None
        path = self.base.joinpath(*parts)
        owners = [path.parent, *(parent for parent in path.parents if parent.is_relative_to(self.base))]
        known = {run.folder for run in self.runs.values()} | {self.base / folder for folder in self.comparisons}
        if path.suffix not in _SERVED or not any(owner in known for owner in owners):
            return None
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            return None
        return real if real.is_file() and real.is_relative_to(self.base.resolve()) else None
