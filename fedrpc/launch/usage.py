"""Notes what the processes of each run of a comparison have used, by the kernel's count, in a file beside the runs."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedrpc.files import read_lines

USAGE_FILE = "usage.jsonl"  # a line for each time that a run was started
_KIB = 1024  # in which the kernel counts memory


@dataclass(frozen=True)
class Usage:
    """CPU of all processes of some runs, server and clients, and the memory of the largest process."""

    cpu_s: float
    peak_bytes: int


def note_usage(run: Path) -> None:
    """Appends what this process, which played a run, and all that it waited for have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    row = {
        "run": run.name,
        "cpu_s": round(sum(each.ru_utime + each.ru_stime for each in used), 3),
        "peak_bytes": max(each.ru_maxrss for each in used) * _KIB,
    }
    with contextlib.suppress(OSError), (run.parent / USAGE_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")  # in one piece, since other runs write there, too


def sum_usage(folder: Path, runs: Iterable[Path]) -> Usage | None:
    """Sums what these runs have used, every time that they were started.

    Returns:
        None if a run is not in the file; a run whose processes were killed outright is there only with its other times.
    """
    wanted = {run.name for run in runs}
    rows = [row for row in read_lines(folder / USAGE_FILE) if row["run"] in wanted]
    if not wanted or {row["run"] for row in rows} != wanted:
        return None
    return Usage(sum(row["cpu_s"] for row in rows), max(row["peak_bytes"] for row in rows))
