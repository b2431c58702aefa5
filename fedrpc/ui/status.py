"""Tells whether a run is under way, without touching its lock: a server that starts must not find it taken."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

from fedrpc.metrics.progress import Snapshot, identify_host

Status = Literal["starting", "running", "finished", "stopped", "failed"]
STALE_S = 15.0  # a server that we cannot see is taken for gone when it has written nothing for so long


def list_locks() -> set[tuple[str, int, int]]:
    """The locks that processes here hold: (device, inode, process)."""
    found = set()
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[3] == "WRITE":
                major, minor, inode = words[5].split(":")
                found.add((f"{int(major, 16)}:{int(minor, 16)}", int(inode), int(words[4])))
    except (OSError, ValueError):
        pass
    return found


def is_held(folder: Path, snapshot: Snapshot | None, locks: set[tuple[str, int, int]]) -> bool:
    """Whether a server holds a run directory.

    The kernel says so, unless the server is on another machine or in a container of its own; then its last sign of
    life must do.
    """
    try:
        found = os.stat(folder / "lock")
    except OSError:
        return False
    device = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
    pid = snapshot.pid if snapshot else -1
    # Some file systems show another device number; then it must be the process that wrote progress.json.
    if any(inode == found.st_ino and (where == device or holder == pid) for where, inode, holder in locks):
        return True
    is_elsewhere = snapshot is not None and snapshot.host != identify_host()
    return is_elsewhere and snapshot is not None and not snapshot.ended and time.time() - snapshot.written_at < STALE_S
