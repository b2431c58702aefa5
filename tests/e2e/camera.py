"""Copies a run directory around each write of its server, as a kill at that moment would leave it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedrpc.config import RunConfig
from fedrpc.errors import FedrpcError
from tests.e2e.in_process import play
from tests.e2e.rundir import (
    RunDir,
    find_broken_links,
    find_phases_that_do_not_add_up,
    find_repeated_ledger_keys,
    find_repeated_releases,
    find_repeated_timing_keys,
    list_answered,
)

_CLOCK_STEP_NS = 50_000_000  # of files' times; the kernel's is 10 ms at most


class Camera:
    """Copies a run directory as a kill of its server leaves it, around each write of the server.

    Args:
        out: The run directory.
        copies: Where the copies go.
    """

    def __init__(self, out: Path, copies: Path) -> None:
        self._out, self._copies = out, copies
        self._lock = threading.Lock()
        self._last: dict[Path, tuple[os.stat_result, Path, int]] = {}  # their last copies, and when
        self.places: list[str] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Watches what reaches the disk."""
        write = os.write
        patch.setattr(os, "write", lambda fd, data: self._tear(write, fd, data))
        for name in ("fsync", "ftruncate"):
            patch.setattr(os, name, self._around(getattr(os, name), name))
        patch.setattr(os, "truncate", self._around(os.truncate, "truncate"))
        for name in ("replace", "unlink"):
            patch.setattr(Path, name, self._around(getattr(Path, name), name))

    def _around(self, function: Any, name: str) -> Any:
        def call(what: Any, *args: Any, **options: Any) -> Any:
            path = what if isinstance(what, Path) else _find_path(what)
            self._take(f"before {name}", path)
            if name == "replace":  # a file that was written in pieces may end anywhere
                self._take("within the write before replace", path, torn=True)
            result = function(what, *args, **options)
            self._take(f"after {name}", path)
            return result

        return call

    def _tear(self, write: Any, fd: int, data: Any) -> int:
        """Writes in two pieces: a kill may come between them."""
        path = _find_path(fd)
        if not self._is_servers(path):
            return write(fd, data)
        self._take("before write", path)
        written = write(fd, data[: len(data) // 2])
        self._take("within write", path)
        if written == len(data) // 2:
            written += write(fd, data[written:])
        self._take("after write", path)
        return written

    def _copy_or_link(self, source: str, target: str) -> str:
        """Links a file that has not changed to its copy of before: a client's state is large, and most of it is old."""
        path, found, now = Path(source), os.stat(source), time.time_ns()
        before, copied, then = self._last.get(path, (None, path, 0))
        same = before and (before.st_ino, before.st_size, before.st_mtime_ns) == (
            found.st_ino,
            found.st_size,
            found.st_mtime_ns,
        )
        # A change within the clock's step after the last copy would have the same time.
        if same and then - found.st_mtime_ns > _CLOCK_STEP_NS and copied.exists():
            os.link(copied, target)
        else:
            shutil.copy2(source, target)
            then = now
        self._last[path] = found, Path(target), then
        return target

    def take_out(self, number: int) -> Path:
        """Removes a copy from the others, and gives one that may be changed."""
        own, copy = self._copies / "own", self._copies / str(number)
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(copy, own)
        shutil.rmtree(copy)
        return own

    def _is_servers(self, path: Path) -> bool:
        return path.is_relative_to(self._out) and "clients" not in path.relative_to(self._out).parts

    def _take(self, what: str, path: Path, *, torn: bool = False) -> None:
        if not self._is_servers(path):
            return
        with self._lock:
            copy = self._copies / str(len(self.places))
            try:  # clients last: they live on when their server is killed
                shutil.copytree(
                    self._out, copy, ignore=shutil.ignore_patterns("clients"), copy_function=self._copy_or_link
                )
                if (self._out / "clients").exists():
                    shutil.copytree(self._out / "clients", copy / "clients", copy_function=self._copy_or_link)
                if torn:
                    written = copy / path.relative_to(self._out)
                    data = written.read_bytes()
                    written.unlink()  # it may be a link
                    written.write_bytes(data[: len(data) // 2])
                self.places.append(f"{what} {path.relative_to(self._out)}")
            except (OSError, shutil.Error):  # another thread has just removed a file
                shutil.rmtree(copy, ignore_errors=True)


def resume(copy: Path, config: RunConfig, out: Path) -> Iterator[str]:
    """Resumes a copy, and yields in words what has become different from the run in `out` that was not killed."""
    whole = RunDir(out)
    undisturbed = whole.summary
    try:
        result = play(copy, config)
    except FedrpcError as error:
        yield str(error)
        return
    for what, pick in PICKS.items():
        if pick(result) != pick(undisturbed):
            yield f"{what}: {pick(result)}, expected {pick(undisturbed)}"
    found = RunDir(copy)
    yield from (f"twice: {key}" for key in (*find_repeated_ledger_keys(found), *find_repeated_releases(found)))
    yield from find_broken_links(found)
    if result["ledger_check"]["differing"]:
        yield f"{result['ledger_check']}"
    yield from (f"has no time: {task}" for task in list_answered(whole) - list_answered(found))
    yield from (f"twice in timing.jsonl: {key}" for key in find_repeated_timing_keys(found))
    yield from (f"does not add up in timing.jsonl: {row}" for row in find_phases_that_do_not_add_up(found))
    total = result["bytes"]["total"]
    if any(total[side]["kernel"] < total[side]["message"] for side in ("down", "up")):
        yield f"fewer bytes in the kernel than in messages: {total}"


PICKS = {
    "model": lambda summary: summary["model_sha256"],
    "privacy": lambda summary: summary["privacy"],
    "bytes of the method": lambda summary: summary["bytes"]["method"],
}


def _find_path(fd: int) -> Path:
    try:
        return Path(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        return Path("/nowhere")
