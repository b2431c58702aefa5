"""Run directories as they are while a run is under way, and a browser without a browser."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from fedrpc.metrics.progress import Asked, Snapshot, identify_host, write_snapshot
from fedrpc.ui.watch import Folder
from tests.unit.report.conftest import write_run


@dataclass
class UnderWay:
    """A run directory whose server is alive as long as its lock is held."""

    folder: Path
    lock: IO[str]

    def note(self, **changes: Any) -> None:
        """Writes progress.json."""
        asked = [Asked(0, "done", 1.0), Asked(1, "computing", 3.5), Asked(2, "failed", 2.0, "NaN in <b>layer</b>")]
        values: dict[str, Any] = {
            "run_id": "r",
            "host": identify_host(),
            "pid": 1,
            "written_at": time.time(),
            "round": 2,
            "phase": "fit",
            "part": "queue",
            "num_clients": 3,
            "num_connected": 2,
            "message_bytes": {"down": {"weights": 3_000_000}, "up": {"weights": 2_000_000, "scalars": 48}},
            "kernel": [3_100_000, 2_100_000],
            "counts": {"done": 1, "computing": 1, "failed": 1},
            "asked": asked,
        }
        write_snapshot(self.folder, Snapshot(**values | changes))

    def kill(self) -> None:
        """What the kernel does for a process that is killed."""
        self.lock.close()


@pytest.fixture
def under_way(tmp_path: Path) -> Iterator[UnderWay]:
    """runs/live: two of three rounds are over."""
    folder = write_run(tmp_path / "runs" / "live", clients=3, rounds=3)
    (folder / "summary.json").unlink()
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(lines[:4]))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = UnderWay(folder, lock)
        found.note()
        yield found


@pytest.fixture
def runs(tmp_path: Path) -> Folder:
    """The folder that these runs are in."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    return Folder(tmp_path / "runs")
