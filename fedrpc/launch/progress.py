"""Shows the progress of a run: a live line on a terminal, one line for each round elsewhere.

People count rounds from 1; files and JSON count from 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedrpc import log
from fedrpc.launch.launcher import Watcher
from fedrpc.report.table import format_size
from fedrpc.report.words import pluralize

LINE_EVERY_S = 60.0  # between two lines of a log that say how far something long is


class RoundCounter(Watcher):
    """Knows how far a run is."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._num_done = rounds, 0

    def event(self, name: str, values: dict[str, Any]) -> None:
        """Counts rounds that are done."""
        if name in ("round_finished", "resumed"):
            self._num_done = values["round"] + 1

    def describe_place(self) -> str:
        """Says which round was the last."""
        return describe_place(self._num_done, self._rounds)


def describe_place(num_done: int, rounds: int) -> str:
    """Says after which round of a run something happens."""
    return f"after round {num_done} of {rounds}" if num_done else "before the end of round 1"


def describe_step(values: dict[str, Any]) -> str:
    """Says which step of how many a phase is at."""
    return f"{values['phase']} {values['step']:,} of {values['steps']:,}"


class LogWatcher(RoundCounter):
    """Logs how clients join, rounds, clients that failed, and once a minute how far a long stage is."""

    def __init__(self, rounds: int, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(rounds)
        self._log = log.get("run")
        self._now, self._told_at = now, now()

    def event(self, name: str, values: dict[str, Any]) -> None:
        """Logs an event, if it is one of those."""
        super().event(name, values)
        if name == "round_finished":
            shown = ("round", "accuracy", "loss", "num_clients", "seconds", "bytes_down", "bytes_up")
            self._say(name, self._describe_round, {key: values[key] for key in shown if key in values})
        elif name == "joined" and values["joined"] == values["of"]:
            self._say(name, lambda found: f"all {found['of']:,} clients have joined", values)
        elif name == "resumed":
            self._say(name, lambda _: f"goes on {self.describe_place()}", values)
        elif name == "phase" and values["steps"] and self._now() - self._told_at >= LINE_EVERY_S:
            self._told_at = self._now()
            self._say("step", describe_step, values)
        elif name in ("client_restarted", "client_given_up"):
            self._log.warning(name, **values)

    def _say(self, name: str, describe: Callable[[dict[str, Any]], str], values: dict[str, Any]) -> None:
        if log.is_json():
            self._log.info(name, **values)
        else:
            self._log.info(describe(values))

    def _describe_round(self, values: dict[str, Any]) -> str:
        pieces = [f"{values['accuracy']:.2f} %"] if values.get("accuracy") is not None else []
        pieces += [f"loss {values['loss']:.3f}"] if values.get("loss") is not None else []
        pieces += [pluralize(values["num_clients"], "client"), f"{values['seconds']:.1f} s"]
        traffic = f"↓ {format_size(values['bytes_down'])} ↑ {format_size(values['bytes_up'])} so far"
        return f"round {values['round'] + 1} of {self._rounds}: {', '.join([*pieces, traffic])}"


class LiveWatcher(RoundCounter):
    """Draws a progress bar with rounds, accuracy, bytes and the time left."""

    def __init__(self, console: Console, rounds: int) -> None:
        super().__init__(rounds)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[accuracy]}"),
            TextColumn("{task.fields[traffic]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("starting", total=rounds, accuracy="", traffic="")

    def open(self) -> None:
        """Starts drawing."""
        self._bar.start()

    def event(self, name: str, values: dict[str, Any]) -> None:
        """Updates the bar."""
        super().event(name, values)
        if name == "joined":
            self._bar.update(self._task, description=f"joining {values['joined']}/{values['of']}")
        elif name == "resumed":  # not an update, which would take these rounds for done by now
            self._bar.reset(self._task, completed=self._num_done)
        elif name == "phase":
            answers = f"{values['phase']} {values['answered']}/{values['of']}"
            self._bar.update(self._task, description=describe_step(values) if values["steps"] else answers)
        elif name == "round_finished":
            accuracy = values.get("accuracy")
            self._bar.update(
                self._task,
                completed=self._num_done,
                accuracy=f"{accuracy:.2f} %" if accuracy is not None else "",
                traffic=f"↓{format_size(values['bytes_down'])} ↑{format_size(values['bytes_up'])}",
            )
        elif name == "client_restarted":
            self._bar.console.print(f"{values['process']} ended with code {values['code']}; it is started again")
        elif name == "client_given_up":
            self._bar.console.print(f"{values['process']} ended too often and is given up; see {values['log']}")

    def close(self) -> None:
        """Stops drawing."""
        self._bar.stop()
