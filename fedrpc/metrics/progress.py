"""Reads and writes progress.json: what a run that is under way does at the moment, replaced about once a second.

It is for people who watch. Nothing is computed from it, a kill leaves the last one, and a finished run has none.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from fedrpc.files import explain_damage, write_atomically

PROGRESS_FILE = "progress.json"
MAX_SHOWN = 1000  # clients in the file; of a larger cohort those that are waited for come first
MAX_REASON = 200  # characters
State = Literal["waiting", "downloading", "computing", "uploading", "done", "abstained", "late", "failed", "gone"]
STATES: tuple[State, ...] = get_args(State)
UNDER_WAY: tuple[State, ...] = STATES[:4]


@dataclass(frozen=True)
class Asked:
    """A client that was asked the last question.

    Attributes:
        seconds: Since its question was sent, or since it was asked while it waits; when done, how long it took.
        reason: Why there is no answer.
    """

    client: int
    state: State
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class Snapshot:
    """A moment of a run.

    Attributes:
        host: Tells whether a reader can see the server's process: see `identify_host`.
        written_at: By the clock of the server's machine, in seconds since 1970.
        round: From 0; -1 is the set-up.
        phase: The question under way, or what the server does between questions.
        part: What the server does or waits for, as in timing.jsonl.
        num_connected: How many clients have a stream.
        message_bytes: Of the whole run so far, by direction and kind.
        kernel: The kernel's bytes of the whole run so far: sent, and received.
        counts: How many of those that were asked are in which state.
        asked: Those clients, `MAX_SHOWN` at most.
        seconds: Since the server started.
        ended: Why the server ended before the run did; empty while it runs.
    """

    run_id: str
    host: str
    pid: int
    written_at: float
    round: int
    phase: str
    part: str
    num_clients: int
    num_connected: int
    message_bytes: Mapping[str, Mapping[str, int]]
    kernel: Sequence[int]
    counts: Mapping[str, int]
    asked: Sequence[Asked] = field(default=())
    seconds: float = 0.0
    ended: str = ""


@functools.cache
def identify_host() -> str:
    """Names the machine and its table of processes: two who get the same name see each other's processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return "unknown"


def write_snapshot(folder: Path, found: Snapshot) -> None:
    """Replaces progress.json, not durably."""
    rows = [[each.client, each.state, round(each.seconds, 1), each.reason[:MAX_REASON]] for each in found.asked]
    values = {name: value for name, value in vars(found).items() if name != "asked"} | {"asked": rows}
    write_atomically(folder / PROGRESS_FILE, json.dumps(values, separators=(",", ":")) + "\n")


def read_snapshot(folder: Path) -> Snapshot | None:
    """Reads progress.json; None when there is none. Raises Damaged."""
    path = folder / PROGRESS_FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    with explain_damage(path, remedy="the run writes it anew"):
        values = json.loads(data)
        asked = [_read_asked(row) for row in values.pop("asked")]
        found = Snapshot(**values, asked=asked)
        _check(found)
    return found


def _read_asked(row: list[object]) -> Asked:
    client, state, seconds, reason = row
    if state not in STATES:
        raise ValueError(f"expected a state of a client, got {str(state)[:40]!r}")
    return Asked(int(str(client)), state, float(str(seconds)), str(reason))


def _check(found: Snapshot) -> None:
    """Raises unless the values that a reader calculates with have their types."""
    numbers = [found.written_at, found.round, found.num_clients, found.num_connected, found.seconds, *found.kernel]
    numbers += [size for kinds in found.message_bytes.values() for size in kinds.values()]
    numbers += found.counts.values()
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"expected a number, got {str(number)[:40]!r}")
    if len(found.kernel) != 2:
        raise ValueError(f"expected two of the kernel's sizes, got {len(found.kernel)}")
