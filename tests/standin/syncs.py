"""Records where the host waits for the stand-in device, as `torch.cuda.set_sync_debug_mode` does on a real one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

# A read waits for all work queued on the device, and an upload from memory that is not pinned for its own copy.
# No waits, but recorded too: a network on the host, which is the device's work, and a seed for the device's generator.
Kind = Literal["read", "upload", "host", "seed"]


@dataclass(frozen=True)
class Sync:
    """One wait."""

    kind: Kind
    op: str
    place: str  # file:line of the innermost frame in fedrpc, "" outside


_open: list[list[Sync]] = []


def record(kind: Kind, op: str) -> None:
    """Adds a wait to every recording under way."""
    if _open:
        sync = Sync(kind, op, _find_place())
        for recording in _open:
            recording.append(sync)


@contextmanager
def recorded() -> Iterator[list[Sync]]:
    """Collects the waits of all threads inside the block."""
    recording: list[Sync] = []
    _open.append(recording)
    try:
        yield recording
    finally:
        _open[:] = [other for other in _open if other is not recording]


def count(syncs: list[Sync], kind: Kind) -> Counter[str]:
    """How often there was a wait of a kind, by place and operation."""
    return Counter(f"{sync.place} {sync.op}" for sync in syncs if sync.kind == kind)


def count_reads(syncs: list[Sync]) -> Counter[str]:
    """How often the host read from the device."""
    return count(syncs, "read")


def count_host_work(syncs: list[Sync]) -> Counter[str]:
    """How often a network ran on the host."""
    return count(syncs, "host")


def _find_place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        folder, found, rest = frame.f_code.co_filename.rpartition("/fedrpc/")
        if found and "site-packages" not in folder + rest and rest != "seeds.py":
            return f"fedrpc/{rest}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
