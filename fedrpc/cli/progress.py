"""Shows the progress of work in steps: a bar on a terminal, a log line for each step elsewhere."""

from __future__ import annotations

import contextlib

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedrpc import log


class StepDisplay(contextlib.AbstractContextManager["StepDisplay"]):
    """Shows each step as it begins.

    Args:
        name: Names the logger where there is no terminal.
    """

    def __init__(self, console: Console, name: str) -> None:
        columns = (TextColumn("[bold]{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._bar.add_task("", total=None)
        self._log = None if console.is_terminal else log.get(name)

    def __enter__(self) -> StepDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._bar.disable:  # before rich 14.3 a bar that was never shown ends with an empty line
            self._bar.stop()

    def show(self, what: str, number: int, total: int) -> None:
        """Shows that a step begins; a total of 0 means that it is not known yet."""
        self._bar.update(self._task, description=what, completed=max(0, number - 1), total=total or None)
        if self._log and total:
            self._log.info("step", number=number, of=total, what=what)
