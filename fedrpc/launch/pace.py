"""Estimates how long several runs still take, from the rounds and the steps of long stages that were played so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedrpc.launch.plan import Planned
from fedrpc.report.words import format_duration, pluralize

RECENT = 3  # rounds from which a run is taken to go on: a method's last rounds may be of another kind


class Pace:
    """Knows how far all runs are, and what a round of each row takes.

    A round takes as long as the same round with another seed did, if one was seen; else as long as the last few of its
    run; before the run's first round, as the mean round of its row, or of all rows where the row has not begun. Steps
    of a stage before the first round are known once a run of the row is in it.

    Args:
        jobs: How many runs are under way at a time.
    """

    def __init__(self, runs: Sequence[Planned], jobs: int = 1, now: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._jobs, self._now = list(runs), jobs, now
        self._done = {run.label: 0 for run in runs}
        self._over: set[str] = set()
        self._seconds: dict[str, dict[int, float]] = {}  # by row and round
        self._recent: dict[str, deque[float]] = {}  # by run, of its last rounds
        self._begun: dict[str, tuple[int, float]] = {}  # by run, the first step that was seen, and when
        self._steps_left: dict[str, int] = {}  # by run
        self._steps: dict[str, tuple[int, float]] = {}  # by row, how many, and the seconds of one

    def event(self, run: Planned, name: str, values: dict[str, Any]) -> None:
        """Counts rounds that are done, and how long they took here."""
        if name in ("round_finished", "resumed"):
            self._done[run.label] = values["round"] + 1
        if name == "round_finished":
            self._seconds.setdefault(run.cell.row, {})[values["round"]] = values["seconds"]
            self._recent.setdefault(run.label, deque(maxlen=RECENT)).append(values["seconds"])
        if name == "phase" and values["steps"]:
            self._note_step(run, values["step"], values["steps"])

    def _note_step(self, run: Planned, step: int, steps: int) -> None:
        now = self._now()
        first, begun = self._begun.setdefault(run.label, (step, now))
        self._steps_left[run.label] = steps - step
        if step > first:
            self._steps[run.cell.row] = (steps, (now - begun) / (step - first))

    def end(self, run: Planned) -> None:
        """Counts a run that is over: finished, now or before, or given up."""
        self._over.add(run.label)
        self._done[run.label] = run.config.rounds

    @property
    def num_rounds(self) -> int:
        """How many rounds all runs have."""
        return sum(run.config.rounds for run in self._runs)

    @property
    def num_done(self) -> int:
        """How many of them are done."""
        return sum(self._done.values())

    def estimate_seconds(self) -> float | None:
        """What is left, in seconds; None before the first round or step."""
        if not self._seconds and not self._steps:
            return None
        paces = {row: fmean(seconds.values()) for row, seconds in self._seconds.items()}
        left = {
            run.cell.run: self._estimate_rounds(run, paces) + self._estimate_steps(run)
            for run in self._runs
            if run.label not in self._over
        }
        one_by_one = [
            left.get(run.cell.run, 0.0) + (left.get(run.after, 0.0) if run.after else 0.0) for run in self._runs
        ]
        return max(sum(left.values()) / self._jobs, *one_by_one)  # one run is not shared among jobs

    def _estimate_rounds(self, run: Planned, paces: Mapping[str, float]) -> float:
        """The seconds of the rounds that a run still has, given the mean round of each row."""
        usual = paces.get(run.cell.row, fmean(paces.values() or [0.0]))
        seen, recent = self._seconds.get(run.cell.row, {}), self._recent.get(run.label)
        pace = fmean(recent) if recent else usual
        return sum(seen.get(index, pace) for index in range(self._done[run.label], run.config.rounds))

    def _estimate_steps(self, run: Planned) -> float:
        """The seconds of the steps that a run still has before its first round."""
        steps, seconds = self._steps.get(run.cell.row, (0, 0.0))
        return 0.0 if self._done[run.label] else self._steps_left.get(run.label, steps) * seconds

    def describe_runs(self) -> str:
        """How many runs are over."""
        return f"{len(self._over)} of {pluralize(len(self._runs), 'run')}"

    def describe(self) -> str:
        """How far it is, in a line."""
        left = self.estimate_seconds()
        told = "" if left is None else f", about {format_duration(left)} left"
        return f"{self.describe_runs()} and {self.num_done:,} of {pluralize(self.num_rounds, 'round')} done{told}"
