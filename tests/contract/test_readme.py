"""The commands in the READMEs are ones that the programs take, and links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer.main

from docs.gather import find_pages
from fedrpc import config
from fedrpc.catalog import read_catalog
from fedrpc.cli import app, client_app, new, server_app
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.launch.plan import Request, plan_runs
from fedrpc.launch.values import collect_options, merge_values, read_layers, read_methods
from fedrpc.owncode import forget_all

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [ROOT / path for path in find_pages()]
WITH_COMMANDS = [
    README,
    ROOT / "fedrpc" / "methods" / "README.md",
    ROOT / "fedrpc" / "data" / "README.md",
]  # others also have commands of their own examples
WITH_FILES = [page for page in PAGES if re.search(r"^(\| file|## Files)", page.read_text(), re.MULTILINE)]
PROGRAMS = {"fedrpc": app, "fedrpc-server": server_app, "fedrpc-client": client_app}


def list_commands() -> Iterator[str]:
    """Everything after a `$` in a console block; a line that ends with a backslash goes on."""
    for page in WITH_COMMANDS:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
            yield from re.findall(r"^\$ (.*)$", block.replace("\\\n", " "), re.MULTILINE)


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files that the examples of own code write, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, source in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README.read_text(), re.DOTALL):
        (tmp_path / name).write_text(source)
    new.method("fedmine")
    (tmp_path / "fedwrong.py").write_text("import torchh\n")
    yield
    forget_all()


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


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize("line", list(list_commands()))
def test_a_command_is_one_that_the_programs_take(line: str) -> None:
    words = [word for word in shlex.split(line, comments=True) if word != "sudo"]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif "fedavgg" in words:  # the example of a mistake
        with pytest.raises(UnknownName, match="Did you mean 'fedavg'"):
            configure(*parse(words[0], words[1:]))
    elif "fedwrong.py" in words:  # another one
        with pytest.raises(ConfigError, match=r"cannot import fedwrong\.py: ModuleNotFoundError"):
            configure(*parse(words[0], words[1:]))
    else:
        configure(*parse(words[0], words[1:]))


def test_the_commands_are_found() -> None:
    found = list(list_commands())
    for start in ("make demo", "fedrpc run", "fedrpc compare", "fedrpc whatif", "fedrpc-server", "fedrpc-client"):
        assert any(line.startswith(start) for line in found), start


def test_the_readme_names_all_methods() -> None:
    [named] = re.findall(r"^The methods are (.*?)\.", README.read_text(), re.DOTALL | re.MULTILINE)
    assert re.split(r",\s+|\s+and\s+", named) == sorted(read_catalog().methods)


@pytest.mark.parametrize("page", WITH_FILES, ids=lambda page: page.parent.name)
def test_a_rooms_table_has_all_its_files(page: Path) -> None:
    named = re.findall(r"`([\w*]+\.py)`", page.read_text())
    files = sorted(path.name for path in page.parent.glob("*.py") if path.name not in ("__init__.py", "__main__.py"))
    assert not [file for file in files if not any(fnmatch(file, name) for name in named)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\[[^\]]*\]\(([^)#]+)[^)]*\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    missing = [each for each in targets if "://" not in each and not (page.parent / each).exists()]
    assert not missing
