"""The options that several commands share."""

from __future__ import annotations

import pytest
import typer.main

from fedrpc.cli import app, server_app

EMULATED = {"--link", "--shaper", "--speed"}


def list_shown(program: typer.Typer, *names: str) -> set[str]:
    command = typer.main.get_command(program)
    for name in names:
        command = command.commands[name]  # type: ignore[attr-defined]
    return {name for each in command.params if not getattr(each, "hidden", False) for name in each.opts}


@pytest.mark.parametrize("names", [("run",), ("compare",), ("whatif",)])
def test_links_are_options_of_what_emulates_them(names: tuple[str, ...]) -> None:
    assert EMULATED - {"--shaper"} <= list_shown(app, *names)


@pytest.mark.parametrize(("program", "names"), [(server_app, ()), (app, ("deploy", "render"))])
def test_what_refuses_links_does_not_offer_them(program: typer.Typer, names: tuple[str, ...]) -> None:
    shown = list_shown(program, *names)
    assert not EMULATED & shown
    assert "--dropout" in shown
