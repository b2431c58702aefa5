from __future__ import annotations

import io

from rich.console import Console

from fedrpc.cli.progress import StepDisplay


def test_steps_are_a_bar_on_a_terminal() -> None:
    screen = io.StringIO()
    with StepDisplay(Console(file=screen, force_terminal=True, width=80), "attack") as display:
        display.show("tracing", 0, 0)
        display.show("first thing", 1, 2)
        display.show("second thing", 2, 2)
    assert "second thing" in screen.getvalue()


def test_a_screen_that_is_no_terminal_stays_empty() -> None:
    screen = io.StringIO()
    with StepDisplay(Console(file=screen), "attack") as display:
        display.show("tracing", 0, 0)
    assert screen.getvalue() == ""
