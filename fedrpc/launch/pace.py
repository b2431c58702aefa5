"""Estimates how long several runs still take, from the rounds and the steps of long stages that were played so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from fedrpc.launch.plan import Planned
from fedrpc.report.words import format_duration, pluralize


class Pace:
    """Knows how far all runs are, and what a round of each row takes.

    A row's rounds are taken to go on as those that were seen of it, with any seed; those of a row that has not begun as
    the mean of the others. Steps of a stage before the first round are known once a run of the row is in it.

    Args:
        jobs: How many runs are under way at a time.
    """

    def __init__(self, runs: Sequence[Planned], jobs: int = 1, now: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._jobs, self._now = list(runs), jobs, now
        self._done = {run.label: 0 for run in runs}
        self._over: set[str] = set()
        self._seconds: dict[str, list[float]] = {}
        self._begun: dict[str, tuple[int, float]] = {}  # by run, the first step that was seen, and when
        self._steps_left: dict[str, int] = {}  # by run
        self._steps: dict[str, tuple[int, float]] = {}  # by row, how many, and the seconds of one

    def event(self, run: Planned, name: str, values: dict[str, Any]) -> None:
        """Counts rounds that are done, and how long they took here."""
        if name in ("round_finished", "resumed"):
            self._done[run.label] = values["round"] + 1
        if name == "round_finished":
            self._seconds.setdefault(run.cell.row, []).append(values["seconds"])
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
        paces = {row: fmean(seconds) for row, seconds in self._seconds.items()}
        usual = fmean(paces.values() or [0.0])
        left = [
            (run.config.rounds - self._done[run.label]) * paces.get(run.cell.row, usual) + self._estimate_steps(run)
            for run in self._runs
            if run.label not in self._over
        ]
        return max(sum(left) / self._jobs, max(left, default=0.0))  # one run is not shared among jobs

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
