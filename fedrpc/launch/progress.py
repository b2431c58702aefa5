"""What people see while a run goes on: a live line on a terminal, one log line a round elsewhere."""

from __future__ import annotations

import contextlib
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedrpc import log
from fedrpc.launch.launcher import Watcher
from fedrpc.report.table import format_size


class LogWatcher(Watcher):
    """One structured line for each event that a person would want in a log."""

    def __init__(self) -> None:
        self._log = log.get("run")

    def event(self, name: str, values: dict[str, Any]) -> None:
        """Logs rounds and troubles."""
        if name == "round_finished":
            shown = ("round", "accuracy", "loss", "num_clients", "seconds", "bytes_down", "bytes_up")
            self._log.info(name, **{key: values[key] for key in shown if key in values})
        elif name in ("client_restarted", "client_given_up"):
            self._log.warning(name, **values)


class LiveWatcher(Watcher):
    """A progress bar with rounds, accuracy, bytes and the time left."""

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
        """Starts to draw."""
        self._bar.start()

    def event(self, name: str, values: dict[str, Any]) -> None:
        """Redraws."""
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
            self._bar.console.print(f"client {values['client']} ended (code {values['code']}); started again")
        elif name == "client_given_up":
            self._bar.console.print(f"client {values['client']} ended too often; see {values['log']}")

    def close(self) -> None:
        """Stops drawing."""
        self._bar.stop()


class Steps(contextlib.AbstractContextManager["Steps"]):
    """A work of many steps that are not rounds: a bar on a terminal, a log line for each step elsewhere."""

    def __init__(self, console: Console, name: str) -> None:
        columns = (TextColumn("[bold]{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._bar.add_task("", total=None)
        self._log, self._on_terminal, self._count, self._of = log.get(name), console.is_terminal, 0, 0

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, what: str) -> None:
        """What is being done before the number of steps is known."""
        self._bar.update(self._task, description=what)

    def expect(self, total: int) -> None:
        """How many steps there will be."""
        self._of = total
        self._bar.update(self._task, total=total)

    def next(self, what: str) -> None:
        """The next step begins."""
        self._bar.update(self._task, description=what, completed=self._count)
        self._count += 1
        if not self._on_terminal:
            self._log.info("step", number=self._count, of=self._of, what=what)
