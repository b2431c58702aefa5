"""What became of the last question that was asked: which client waits, transfers, computes, or is done."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedrpc.metrics.progress import MAX_SHOWN, UNDER_WAY, Asked, State
from fedrpc.server.task_times import TaskTimes

if TYPE_CHECKING:
    from fedrpc.server.mailbox import Missing, Task


@dataclass(eq=False, slots=True)
class _Line:
    """A task without its question and answer, which may be large."""

    client: int
    times: TaskTimes
    is_done: bool = False
    missing: Missing | None = None


class Board:
    """Follows the tasks of one question at a time; each event costs the same however many there are."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}

    def show(self, tasks: Sequence[Task]) -> None:
        """Begins with the tasks of a new question."""
        self._lines = {task.task_id: _Line(task.client, task.times) for task in tasks}

    def note_end(self, task_id: str, missing: Missing | None) -> None:
        """Notes that a task was answered, or why it was not."""
        if line := self._lines.get(task_id):
            line.is_done, line.missing = True, missing

    def list_asked(self, is_out: Callable[[str], bool], is_here: Callable[[int], bool]) -> list[Asked]:
        """Lists every client that was asked.

        Args:
            is_out: Whether a task is leased to its client at the moment.
            is_here: Whether a client has a stream.
        """
        now = time.monotonic()
        return [
            Asked(line.client, *_describe(line, is_out(task_id), is_here(line.client), now))
            for task_id, line in self._lines.items()
        ]


def _describe(line: _Line, is_out: bool, is_here: bool, now: float) -> tuple[State, float, str]:
    times = line.times
    began = times.begun_at if times.begun_at is not None else times.posted_at
    seconds = 0.0 if began is None else (times.ended_at or now) - began
    if line.is_done:
        why = line.missing
        return ("done", seconds, "") if why is None else (_name_absence(why), seconds, why.reason)
    if not is_here:
        return "gone", seconds, "not connected"
    if not is_out or times.begun_at is None:
        return "waiting", seconds, ""
    if times.answered_at is not None:
        return "uploading", seconds, ""
    return ("downloading" if times.sent_at is None else "computing"), seconds, ""


def _name_absence(why: Missing) -> State:
    if why.abstained:
        return "abstained"
    return "late" if why.hung else "failed" if why.failed else "gone"


def select_shown(asked: Sequence[Asked]) -> list[Asked]:
    """Those that are shown of many: who is waited for, the slowest first, then the others by their ids."""
    if len(asked) > MAX_SHOWN:
        asked = sorted(asked, key=lambda each: (each.state not in UNDER_WAY, -each.seconds))[:MAX_SHOWN]
    return sorted(asked, key=lambda each: each.client)


def count_states(asked: Sequence[Asked]) -> dict[str, int]:
    """How many are in which state."""
    return dict(Counter(each.state for each in asked))
