"""Where the server's time goes: a clock of phases and parts, and the rows of timing.jsonl."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from fedrpc.metrics.timing import PARTS, Outcome, Part, PhaseRow, Row, TaskRow, TimingFile
from fedrpc.server.mailbox import Missing, Task
from fedrpc.server.task_times import TaskTimes
from fedrpc.wire.ledger import SESSION
from fedrpc.wire.tcpinfo import Connection

_MOST_CORES = 1024  # that a client can claim to have used
_MOST_BYTES = 1 << 53  # of memory; beyond that JSON's numbers are not exact everywhere


@dataclass
class _Phase:
    seconds: float = 0.0
    parts: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    beside_s: float = 0.0


class StageClock:
    """Assigns every moment of the server to one part of one phase: each part begins where the one before it ended.

    What the server does outside any question belongs to the phase `session`. A time in which it waits for a task is
    split into that task's parts, once the task has ended.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Starts anew."""
        self.phase = SESSION  # that is under way
        self._part: Part = "aggregate"
        self._awaited: TaskTimes | None = None
        self._found: dict[str, _Phase] = {}
        self._open: list[tuple[str, TaskTimes, float, float]] = []  # waits for tasks that have not ended
        self._since, self._entered_at = time.monotonic(), time.perf_counter()

    @property
    def part(self) -> Part:
        """What is under way in the phase."""
        return self._part

    def enter(self, phase: str, part: Part) -> None:
        """Begins a part of a phase."""
        self._switch(phase, part, None)

    def wait(self, phase: str, awaited: TaskTimes) -> None:
        """Begins to wait for a task."""
        self._switch(phase, "queue", awaited)

    def note_beside(self, phase: str, seconds: float) -> None:
        """Notes work that ran beside the rest, in a thread of its own."""
        self._get(phase).beside_s += seconds

    def take(self, round_index: int, epoch: int) -> list[PhaseRow]:
        """The rows since the last time; the part that is under way goes on in the next ones."""
        self._measure(self._switch(self.phase, self._part, self._awaited))
        for phase, times, start, end in self._open:
            self._add_wait(phase, times, start, end)
        rows = [
            PhaseRow(
                round=round_index,
                phase=phase,
                epoch=epoch,
                resumed=0,
                seconds=found.seconds,
                beside_s=found.beside_s,
                **{f"{part}_s": seconds for part, seconds in found.parts.items()},
            )
            for phase, found in self._found.items()
        ]
        self._found, self._open = {}, []
        return rows

    def _switch(self, phase: str, part: Part, awaited: TaskTimes | None) -> float:
        # Read side by side: a busy system may take the core away in between.
        now, by_other_clock = time.monotonic(), time.perf_counter()
        if self._awaited is None:
            self._get(self.phase).parts[self._part] += now - self._since
        elif self._awaited.ended_at is None:
            self._open.append((self.phase, self._awaited, self._since, now))
        else:
            self._add_wait(self.phase, self._awaited, self._since, now)
        self._since, self._part, self._awaited = now, part, awaited
        if phase != self.phase:
            self._measure(by_other_clock)
            self.phase = phase
        return by_other_clock

    def _measure(self, now: float) -> None:
        """Measures how long the phase took since it was entered, by a clock of its own."""
        self._get(self.phase).seconds += now - self._entered_at
        self._entered_at = now

    def _add_wait(self, phase: str, times: TaskTimes, start: float, end: float) -> None:
        for part, seconds in times.split(start, end).items():
            self._get(phase).parts[part] += seconds

    def _get(self, phase: str) -> _Phase:
        return self._found.setdefault(phase, _Phase())


@dataclass(frozen=True)
class LinkReading:
    """What the kernels tell of a connection, with the segments sent again since the reading before."""

    rtt_s: float
    resent_down: int
    resent_up: int


class LinkReader:
    """Reads one connection's counters for the rows of its tasks."""

    def __init__(self) -> None:
        self._down = self._up = 0

    def read(self, found: Connection | None, up: int) -> LinkReading | None:
        """A reading; None when the server's kernel has not told.

        Args:
            found: The server's counters.
            up: How many segments the client's kernel has sent again so far, as the client says.
        """
        if found is None:
            return None
        down_before, up_before = self._down, self._up
        self._down, self._up = max(down_before, found.resent), max(up_before, up)
        return LinkReading(found.rtt_s, self._down - down_before, self._up - up_before)


class Timekeeper:
    """Writes the rows of timing.jsonl.

    Args:
        file: None to write nothing.
    """

    def __init__(self, file: TimingFile | None = None) -> None:
        self._file = file

    def write_answer(self, task: Task, link: LinkReading | None) -> None:
        """Writes the row of a task whose answer is whole; to be called before the answer is kept.

        After a kill between the two the client sends its answer again, which then is another attempt.

        Args:
            link: What the kernels tell of the client's connection.
        """
        self._write(task, "answered", link)

    def write_missing(self, task: Task, why: Missing) -> None:
        """Writes the row of a task that ended without an answer."""
        self._write(task, "abstained" if why.abstained else "failed" if why.failed else "missing", None)

    def write_withdrawn(self, task: Task) -> None:
        """Writes the row of a task, unless it has one: nobody waited for its end."""
        self._write(task, "withdrawn", None)

    def _write(self, task: Task, outcome: Outcome, link: LinkReading | None) -> None:
        times, said = task.times, task.times.said
        times.note_ended()
        if self._file is None or times.is_written or times.posted_at is None or task.phase == SESSION:
            return
        times.is_written = True
        parts = times.sum_parts()
        self._file.add(
            TaskRow(
                task.round,
                task.phase,
                task.step,
                task.client,
                task.attempt,
                outcome,
                queue_s=parts["queue"],
                download_s=parts["download"],
                compute_s=parts["compute"],
                upload_s=parts["upload"],
                cpu_s=min(said.cpu_s, parts["compute"] * _MOST_CORES) if said else None,
                peak_bytes=min(said.peak_bytes, _MOST_BYTES) or None if said else None,
                rtt_s=link.rtt_s if link else None,
                resent_down=link.resent_down if link else None,
                resent_up=link.resent_up if link else None,
            )
        )

    def write_phases(self, rows: list[PhaseRow]) -> None:
        """Writes the rows of phases, durably."""
        if self._file is not None:
            self._file.add_phases(rows)

    def drop_from(self, first: int) -> None:
        """Drops the rows of rounds that are run anew."""
        if self._file is not None:
            self._file.drop_from(first)

    def read(self) -> Iterator[Row]:
        """Every row so far."""
        return self._file.read() if self._file is not None else iter(())
