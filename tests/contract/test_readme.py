"""The commands in the READMEs are ones that the programs take, and links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from fedrpc import config
from fedrpc.cli import app, client_app, server_app
from fedrpc.cli.options import collect_options, merge_values, read_layers, read_methods
from fedrpc.errors import UnknownName
from fedrpc.launch.plan import Request, plan_runs

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "fedrpc").glob("*/README.md"))]
WITH_COMMANDS = [README, ROOT / "fedrpc" / "methods" / "README.md"]  # others also have commands of their own examples
PROGRAMS = {"fedrpc": app, "fedrpc-server": server_app, "fedrpc-client": client_app}


def list_commands() -> Iterator[str]:
    """Everything after a `$` in a console block; a line that ends with a backslash goes on."""
    for page in WITH_COMMANDS:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
            yield from re.findall(r"^\$ (.*)$", block.replace("\\\n", " "), re.MULTILINE)


def parse(program: str, words: list[str]) -> tuple[str, dict[str, Any]]:
    """Parses a command line without running it: the command's name, and its parameters."""
    command, name = typer.main.get_command(PROGRAMS[program]), program
    context = None
    while hasattr(command, "resolve_command"):
        context = command.make_context(name, words[:1], parent=context, resilient_parsing=True)
        name, command, words = command.resolve_command(context, words)
    return name, command.make_context(name, list(words), parent=context).params


def configure(name: str, params: dict[str, Any]) -> None:
    """Builds the configurations of a command that starts something, which checks every name and value."""
    if name == "compare" and not params["folders"]:
        layers = read_layers(params)
        methods = params["methods"] or read_methods(layers)
        goals = params["seeds"] or "", params["grid"] or []
        plan_runs(Request(methods, True, layers, collect_options(params), params["set_"] or [], *goals))
    elif "recipe" in params and name != "compare":
        config.build(merge_values(params))


@pytest.mark.parametrize("line", list(list_commands()))
def test_a_command_is_one_that_the_programs_take(line: str) -> None:
    words = [word for word in shlex.split(line, comments=True) if word != "sudo"]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif "fedavgg" in words:  # the example of a mistake
        with pytest.raises(UnknownName, match="Did you mean 'fedavg'"):
            configure(*parse(words[0], words[1:]))
    else:
        configure(*parse(words[0], words[1:]))


def test_the_commands_are_found() -> None:
    found = list(list_commands())
    for start in ("make demo", "fedrpc run", "fedrpc compare", "fedrpc whatif", "fedrpc-server", "fedrpc-client"):
        assert any(line.startswith(start) for line in found), start


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(
        r"(?<!!)\[[^\]]*\]\(([^)#]+)[^)]*\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    )
    missing = [each for each in targets if "://" not in each and not (page.parent / each).exists()]
    assert not missing
