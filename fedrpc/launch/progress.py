"""Shows the progress of a run: a live line on a terminal, one log line for each round elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedrpc import log
from fedrpc.launch.launcher import Watcher
from fedrpc.report.table import format_size


class LogWatcher(Watcher):
    """Logs rounds, and clients that failed."""

    def __init__(self) -> None:
        self._log = log.get("run")

    def event(self, name: str, values: dict[str, Any]) -> None:
        """Logs an event, if it is one of those."""
        if name == "round_finished":
            shown = ("round", "accuracy", "loss", "num_clients", "seconds", "bytes_down", "bytes_up")
            self._log.info(name, **{key: values[key] for key in shown if key in values})
        elif name in ("client_restarted", "client_given_up"):
            self._log.warning(name, **values)


class LiveWatcher(Watcher):
    """Draws a progress bar with rounds, accuracy, bytes and the time left."""

    def __init__(self, console: Console, rounds: int) -> None:
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
        if name == "joined":
            self._bar.update(self._task, description=f"joining {values['joined']}/{values['of']}")
        elif name == "phase":
            self._bar.update(
                self._task,
                description=f"{values['phase']} {values['answered']}/{values['of']}",
            )
        elif name == "round_finished":
            accuracy = values.get("accuracy")
            self._bar.update(
                self._task,
                completed=values["round"] + 1,
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
