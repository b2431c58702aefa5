"""Shows the progress of a comparison, with the time left: bars for all and for runs under way, or log lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from fedrpc import log
from fedrpc.launch.pace import Pace
from fedrpc.launch.plan import Planned
from fedrpc.launch.progress import LINE_EVERY_S, LogWatcher, describe_step
from fedrpc.registry import METHODS
from fedrpc.report.comparison_words import RAW
from fedrpc.report.table import format_size
from fedrpc.report.words import format_duration

_WARNINGS = ("failed", "refused")
_OVER = (*_WARNINGS, "finished_already")


def _list_places(runs: Sequence[Planned]) -> dict[str, str]:
    """Which of the runs each is, such as 2/5, by label."""
    return {planned.label: f"{number}/{len(runs)}" for number, planned in enumerate(runs, start=1)}


class _RunLog(LogWatcher):
    """Logs what happens in one run of several: a line to read begins with the run's name."""

    def __init__(self, run: Planned, now: Callable[[], float]) -> None:
        super().__init__(run.config.rounds, now)
        self._label = run.label

    def _say(self, name: str, describe: Callable[[dict[str, Any]], str], values: dict[str, Any]) -> None:
        super()._say(name, lambda found: f"{self._label}: {describe(found)}", values)


class LogDisplay:
    """Logs what happens, a line each, and once a minute how far all runs are.

    Args:
        jobs: How many runs are under way at a time.
    """

    def __init__(self, runs: Sequence[Planned], jobs: int = 1, now: Callable[[], float] = time.monotonic) -> None:
        self._places, self._pace = _list_places(runs), Pace(runs, jobs, now)
        self._watchers = {run.label: _RunLog(run, now) for run in runs}
        self._now, self._told_at = now, now()

    def announce(self, run: Planned, event: str, **values: Any) -> None:
        """Logs one line about a run."""
        self._bind(run)
        if event in _OVER:
            self._pace.end(run)
        logger, place = log.get("compare"), self._places[run.label]
        say = logger.warning if event in _WARNINGS else logger.info
        if log.is_json():
            say(event, place=place, **values)
        else:
            say(": ".join([f"{place} {run.label} {event.replace('_', ' ')}", *values.values()]))

    def event(self, run: Planned, name: str, values: dict[str, Any]) -> None:
        """Logs a round."""
        self._bind(run)
        self._pace.event(run, name, values)
        self._watchers[run.label].event(name, values)

    def _bind(self, run: Planned) -> None:
        """Has lines for programs name the run."""
        if log.is_json():
            log.set_up("info", role="compare", method=run.cell.method, run=run.label)

    def end(self, run: Planned) -> None:
        """Counts it: its last line was logged."""
        self._pace.end(run)

    def refresh(self) -> None:
        """Logs how far all runs are, when it is time."""
        if self._now() - self._told_at < LINE_EVERY_S:
            return
        self._told_at = self._now()
        if log.is_json():
            log.set_up("info", role="compare", method=None, run=None)
            left = self._pace.estimate_seconds()
            log.get("compare").info("pace", done=self._pace.num_done, of=self._pace.num_rounds, seconds_left=left)
        else:
            log.get("compare").info(self._pace.describe())

    def close(self) -> None:
        """Nothing is left to do."""


class LiveDisplay:
    """Prints a line when a run starts or fails, and draws a bar for each run that is under way, and one for all.

    It is drawn from the loop that watches the runs, since a process with a thread that draws must not fork.

    Args:
        jobs: How many runs are under way at a time.
    """

    def __init__(self, console: Console, runs: Sequence[Planned], jobs: int = 1) -> None:
        self._console, self._places, self._pace = console, _list_places(runs), Pace(runs, jobs)
        self._bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[accuracy]}"),
            TextColumn("{task.fields[traffic]}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._whole = self._bars.add_task(
            self._pace.describe_runs(), total=self._pace.num_rounds, accuracy="", traffic=""
        )
        self._bars.start()

    def announce(self, run: Planned, event: str, **values: Any) -> None:
        """Prints one line about a run."""
        if event in _OVER:
            self._pace.end(run)
            self._draw_whole()
        details = "".join(f": {value}" for value in values.values())
        mark = f" ({RAW})" if METHODS[run.cell.method].shares_raw_data else ""
        name = f"{self._places[run.label]} {run.label}{mark} "
        self._console.print(Text.assemble((name, "bold"), event.replace("_", " "), details), soft_wrap=True)

    def event(self, run: Planned, name: str, values: dict[str, Any]) -> None:
        """Updates the run's bar, and that of all."""
        self._pace.event(run, name, values)
        self._draw_whole()
        if run.label not in self._tasks:
            self._tasks[run.label] = self._bars.add_task(run.label, total=run.config.rounds, accuracy="", traffic="")
        task = self._tasks[run.label]
        if name == "resumed":  # not an update, which would take these rounds for done by now
            self._bars.reset(task, completed=values["round"] + 1)
        elif name == "round_finished":
            accuracy = values.get("accuracy")
            self._bars.update(
                task,
                description=run.label,
                completed=values["round"] + 1,
                accuracy=f"{accuracy:.2f} %" if accuracy is not None else "",
                traffic=f"↓{format_size(values['bytes_down'])} ↑{format_size(values['bytes_up'])}",
            )
        elif name == "phase" and values["steps"]:
            self._bars.update(task, description=f"{run.label}, {describe_step(values)}")
        elif name == "client_restarted":
            self._console.print(f"{values['process']} ended with code {values['code']}; it is started again")
        elif name == "client_given_up":
            self._console.print(f"{values['process']} ended too often and is given up; see {values['log']}")

    def end(self, run: Planned) -> None:
        """Removes the run's bar; its last values stay as a line."""
        self._pace.end(run)
        self._draw_whole()
        task = self._tasks.pop(run.label, None)
        if task is None:
            return
        state = self._bars.tasks[self._bars.task_ids.index(task)]
        words = " ".join(filter(None, [state.fields["accuracy"], state.fields["traffic"]]))
        self._bars.remove_task(task)
        self._console.print(f"  {run.label}: {state.completed:.0f} rounds {words}", highlight=False)

    def _draw_whole(self) -> None:
        left = self._pace.estimate_seconds()
        told = "" if left is None else f"about {format_duration(left)} left"
        runs = self._pace.describe_runs()
        self._bars.update(self._whole, description=runs, completed=self._pace.num_done, traffic=told)

    def refresh(self) -> None:
        """Draws the bars."""
        self._bars.refresh()

    def close(self) -> None:
        """Stops drawing."""
        self._bars.stop()
