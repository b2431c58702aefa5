"""Shows how far a run or a comparison is: bars in a notebook and on a terminal, log lines elsewhere."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from rich.console import Console

from fedrpc import log
from fedrpc.api.markup import draw_progress
from fedrpc.launch.comparison_progress import LiveDisplay, LogDisplay
from fedrpc.launch.launcher import Watcher
from fedrpc.launch.plan import Planned
from fedrpc.launch.progress import LiveWatcher, LogWatcher, RoundCounter
from fedrpc.report.table import format_size

_DRAW_EVERY_S = 0.1  # thousands of clients join within seconds, and a notebook cuts off what floods it


def choose_watcher(rounds: int, *, is_shown: bool, may_draw: bool = True) -> Watcher:
    """Chooses what shows the progress of one run here.

    Args:
        may_draw: Whether the terminal is free for a bar that moves: a debugger's prompt may come.
    """
    if not is_shown:
        return Watcher()
    if _is_notebook():
        return NotebookWatcher(rounds)
    console = Console(stderr=True)
    return LiveWatcher(console, rounds) if may_draw and console.is_terminal else LineWatcher(rounds)


def choose_display(runs: Sequence[Planned], *, is_shown: bool) -> ComparisonDisplay:
    """Chooses what shows the progress of a comparison here."""
    if not is_shown:
        return ComparisonDisplay()
    if _is_notebook():
        return NotebookDisplay(runs)
    console = Console(stderr=True)
    if console.is_terminal:
        return _Delegating(LiveDisplay(console, runs))
    _set_up_log("compare")
    return _Delegating(LogDisplay(runs))


def _is_notebook() -> bool:
    """Whether this is the kernel of a notebook, which shows HTML."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return bool(getattr(shell, "kernel", None))


def _set_up_log(role: str) -> None:
    """Has lines written, unless the caller's program has its own idea of how."""
    if not structlog.is_configured():
        log.set_up("info", role=role)


class ComparisonDisplay:
    """Shows nothing; others show more."""

    def announce(self, run: Planned, event: str, **values: Any) -> None:
        """A run starts, resumes, was finished already, is refused, or fails."""

    def event(self, run: Planned, name: str, values: dict[str, Any]) -> None:
        """Something happened in a run that is under way."""

    def end(self, run: Planned) -> None:
        """A run is over."""

    def refresh(self) -> None:
        """Called several times a second."""

    def close(self) -> None:
        """The comparison is over."""


class _Delegating(ComparisonDisplay):
    """Passes everything on to a display of the command line."""

    def __init__(self, display: LiveDisplay | LogDisplay) -> None:
        self._display = display

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name == "_display" else getattr(self._display, name)


@dataclass
class _Line:
    name: str
    of: int
    done: int = 0
    words: str = "starting"


class _Board:
    """Lines in a notebook's output that change in place."""

    def __init__(self, lines: Sequence[_Line]) -> None:
        self.lines = lines
        display = importlib.import_module("IPython.display").display
        self._handle = display(self._draw(), raw=True, display_id=True)
        self._drawn_at, self._is_stale = time.monotonic(), False

    def _draw(self) -> dict[str, str]:
        rows = [(line.name, line.done, line.of, line.words) for line in self.lines]
        plain = "\n".join(f"{name} {done}/{of} {words}".strip() for name, done, of, words in rows)
        return {"text/html": draw_progress(rows), "text/plain": plain}

    def note(self, line: _Line, name: str, values: dict[str, Any]) -> None:
        """Notes an event of a run, and draws the line anew if it shows it."""
        if name in ("round_finished", "resumed"):
            line.done = values["round"] + 1
        if name == "joined":
            line.words = f"{values['joined']:,} of {values['of']:,} clients have joined"
        elif name == "round_finished":
            accuracy = [f"{values['accuracy']:.2f} %"] if values.get("accuracy") is not None else []
            traffic = f"↓ {format_size(values['bytes_down'])} ↑ {format_size(values['bytes_up'])}"
            line.words = ", ".join([*accuracy, traffic])
        elif name in ("client_restarted", "client_given_up"):
            line.words = f"{values['process']} ended with code {values['code']}"
        elif name != "resumed":
            return
        self.draw()

    def draw(self) -> None:
        """Draws all lines anew, unless that was done just now; then `flush` does it later."""
        self._is_stale = True
        if time.monotonic() - self._drawn_at >= _DRAW_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Draws what was not drawn yet."""
        if self._is_stale:
            self._handle.update(self._draw(), raw=True)
            self._drawn_at, self._is_stale = time.monotonic(), False


class LineWatcher(LogWatcher):
    """Prints a line for each round, whatever logging the caller's program has."""

    def _say(self, name: str, describe: Callable[[dict[str, Any]], str], values: dict[str, Any]) -> None:
        print(describe(values), file=sys.stderr)


class NotebookWatcher(RoundCounter):
    """Draws a bar of rounds in a notebook."""

    def __init__(self, rounds: int) -> None:
        super().__init__(rounds)
        self._line = _Line("", rounds)
        self._board = _Board([self._line])

    def event(self, name: str, values: dict[str, Any]) -> None:
        """Updates the bar."""
        super().event(name, values)
        self._board.note(self._line, name, values)

    def close(self) -> None:
        """Draws how it ended."""
        self._board.flush()


class NotebookDisplay(ComparisonDisplay):
    """Draws a bar for each run of a comparison in a notebook."""

    def __init__(self, runs: Sequence[Planned]) -> None:
        self._lines = {run.label: _Line(run.label, run.config.rounds, words="waiting") for run in runs}
        self._board = _Board(list(self._lines.values()))

    def announce(self, run: Planned, event: str, **values: Any) -> None:
        """Says what becomes of a run."""
        line = self._lines[run.label]
        line.words = ": ".join([event.replace("_", " "), *map(str, values.values())])
        line.done = line.of if event == "finished_already" else line.done
        self._board.draw()

    def event(self, run: Planned, name: str, values: dict[str, Any]) -> None:
        """Updates the run's bar."""
        self._board.note(self._lines[run.label], name, values)

    def close(self) -> None:
        """Draws how it ended."""
        self._board.flush()
