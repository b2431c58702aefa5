"""Reads and writes timing.jsonl: where the time of a run went, a line for each task and for each phase of a round.

The README of this room says what the parts are, which of them lie on a phase's path, and what overlaps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from fedrpc.files import Appended, explain_damage, measure_whole_lines, read_lines, write_atomically

TIMING_FILE = "timing.jsonl"
Part = Literal["queue", "download", "compute", "upload", "encode", "read", "aggregate", "evaluate", "checkpoint"]
PARTS: tuple[Part, ...] = get_args(Part)  # a client's four, then the server's own
CLIENT_PARTS = PARTS[:4]
Outcome = Literal["answered", "abstained", "failed", "missing", "withdrawn"]
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True)
class TaskRow:
    """One task, from when it was asked to its end, by the server's clock.

    The client says how much of that it waited and computed; more than the server measured does not count.

    Attributes:
        attempt: The delivery that was answered, as in the ledger.
        queue_s: Waiting: for its turn, a permit or the client, for deliveries that broke, and in the client's process.
        compute_s: From when the client began to answer until the answer was ready and stored.
        cpu_s: CPU time of the client's process meanwhile, as it says.
        peak_bytes: The most memory that the client's process had held by then, as it says.
        rtt_s: The connection's round trip, by the server's kernel at its last reading.
        resent_down: TCP segments sent again on the connection since the row before, by the server's kernel.
        resent_up: The same by the client's, as it says.
    """

    round: int
    phase: str
    step: int
    client: int
    attempt: int
    outcome: str
    queue_s: float
    download_s: float
    compute_s: float
    upload_s: float
    cpu_s: float | None = None
    peak_bytes: int | None = None
    rtt_s: float | None = None
    resent_down: int | None = None
    resent_up: int | None = None

    @property
    def seconds(self) -> float:
        """From when it was asked to its end."""
        return self.queue_s + self.download_s + self.compute_s + self.upload_s


@dataclass(frozen=True)
class PhaseRow:
    """What the server did or waited for in a phase, between two durable points; every moment is in one part.

    Attributes:
        epoch: The durable points that the run had reached before.
        resumed: How often the time since then was begun anew, by a server that was started again.
        seconds: How long it took, measured by itself: the parts add up to it.
        beside_s: Evaluation that ran beside this one: its time is not in the parts.
    """

    round: int
    phase: str
    epoch: int
    resumed: int
    seconds: float
    queue_s: float = 0.0
    download_s: float = 0.0
    compute_s: float = 0.0
    upload_s: float = 0.0
    encode_s: float = 0.0
    read_s: float = 0.0
    aggregate_s: float = 0.0
    evaluate_s: float = 0.0
    checkpoint_s: float = 0.0
    beside_s: float = 0.0

    @property
    def parts(self) -> dict[Part, float]:
        """Seconds by part."""
        return {part: getattr(self, f"{part}_s") for part in PARTS}


Row = TaskRow | PhaseRow
_ROWS: dict[str, type[TaskRow] | type[PhaseRow]] = {"task": TaskRow, "phase": PhaseRow}
_NAMES = {cls: name for name, cls in _ROWS.items()}
_TYPES = {
    cls: {name: get_args(hint) or (hint,) for name, hint in get_type_hints(cls).items()} for cls in _ROWS.values()
}


def to_json(row: Row) -> str:
    """Writes a row as one line, to the microsecond."""
    values = {name: round(value, 6) if isinstance(value, float) else value for name, value in vars(row).items()}
    return _to_json({"row": _NAMES[type(row)]} | values)


def read_timing(path: Path) -> Iterator[Row]:
    """Reads the rows of a timing file; a last line that a crash tore is left out. Raises Damaged."""
    for values in read_lines(path):
        with explain_damage(path):
            row = _from_row(values)
        yield row


def _from_row(values: dict[str, Any]) -> Row:
    cls = _ROWS[values.pop("row")]
    types = _TYPES[cls]
    for name, value in values.items():
        if type(value) not in types[name] and not (float in types[name] and type(value) is int):
            raise ValueError(f"'{name}' is {value!r:.40}")
        if float in types[name] and value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"'{name}' is {value!r:.40}")
    return cls(**values)


class TimingFile:
    """The server's timing.jsonl: a row is in the file when `add` returns, so a kill loses none.

    Rows are never changed. The rows of tasks that a killed server accepted stay, since a restart reuses their answers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._resumed: dict[tuple[int, int], int] = {}  # the last of each round and epoch
        for row in read_timing(path):
            if isinstance(row, PhaseRow):
                self._resumed[row.round, row.epoch] = row.resumed
        self._file = Appended(path, measure_whole_lines(path))

    def drop_from(self, first: int) -> None:
        """Drops the rows of rounds that are run anew, and of which no answer is left."""
        rows = list(self.read())
        if any(row.round >= first for row in rows):
            self._file.close()
            write_atomically(self.path, "".join(to_json(row) + "\n" for row in rows if row.round < first), sync=True)
            self._file = Appended(self.path)

    def add(self, row: TaskRow) -> None:
        """Appends a task's row."""
        self._file.add(to_json(row) + "\n")

    def add_phases(self, rows: Iterable[PhaseRow]) -> None:
        """Appends the rows since a durable point, durably; counts how often that point was resumed from."""
        rows = [dataclasses.replace(row, resumed=self._resumed.get((row.round, row.epoch), -1) + 1) for row in rows]
        self._resumed |= {(row.round, row.epoch): row.resumed for row in rows}
        self._file.add("".join(to_json(row) + "\n" for row in rows), sync=True)

    def read(self) -> Iterator[Row]:
        """Every row so far."""
        return read_timing(self.path)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@dataclass
class _Phase:
    """A phase's time in the rounds of a run."""

    seconds: dict[int, float] = field(default_factory=dict)  # by round
    parts: dict[Part, dict[int, float]] = field(default_factory=lambda: {part: {} for part in PARTS})
    beside_s: float = 0.0

    def add(self, row: PhaseRow) -> None:
        self.beside_s += row.beside_s
        for sums, value in [(self.seconds, row.seconds), *((self.parts[p], s) for p, s in row.parts.items())]:
            sums[row.round] = sums.get(row.round, 0.0) + value


def summarise_time(rows: Iterable[Row]) -> dict[str, Any]:
    """Builds the part `time` of summary.json: totals by part, each phase's median round, all tasks together."""
    phases: dict[str, _Phase] = {}
    tasks = dict.fromkeys((*CLIENT_PARTS, "cpu"), 0.0)
    num_tasks, resent, peaks = 0, {"down": 0, "up": 0}, [0]
    for row in rows:
        if isinstance(row, PhaseRow):
            phases.setdefault(row.phase, _Phase()).add(row)
            continue
        num_tasks += 1
        for part in CLIENT_PARTS:
            tasks[part] += getattr(row, f"{part}_s")
        tasks["cpu"] += row.cpu_s or 0.0
        resent = {"down": resent["down"] + (row.resent_down or 0), "up": resent["up"] + (row.resent_up or 0)}
        peaks.append(row.peak_bytes or 0)
    return {
        "seconds": math.fsum(value for found in phases.values() for value in found.seconds.values()),
        "parts": {part: math.fsum(sum(found.parts[part].values()) for found in phases.values()) for part in PARTS},
        "beside": math.fsum(found.beside_s for found in phases.values()),
        "by_phase": {phase: _summarise_phase(found) for phase, found in phases.items()},
        "tasks": {"number": num_tasks} | tasks | {"peak_bytes": max(peaks) or None, "resent": resent},
    }


def _summarise_phase(found: _Phase) -> Mapping[str, Any]:
    return {
        "rounds": len(found.seconds),
        "seconds": math.fsum(found.seconds.values()),
        "median": {"seconds": statistics.median(found.seconds.values())}
        | {part: statistics.median(values.values()) for part, values in found.parts.items()},
    }
