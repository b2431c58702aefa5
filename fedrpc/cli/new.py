"""`fedrpc new`: writes the skeleton of a method or a model of one's own, with its test."""

from __future__ import annotations

import keyword
import re
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from fedrpc.errors import ConfigError
from fedrpc.files import explain_unwritable
from fedrpc.owncode import show_path
from fedrpc.registry import METHODS

Name = Annotated[str, typer.Argument(help="Lower-case letters, digits, - and _.")]
Folder = Annotated[Path, typer.Option("--dir", help="The folder that the two files are written to.")]


def method(name: Name, folder: Folder = Path()) -> None:
    """Write a method of your own, FedAvg with another loss, and its test."""
    if name in METHODS.names:
        raise ConfigError(f"there is a method '{name}' already; choose another name")
    _write("method", name, folder)


def model(name: Name, folder: Folder = Path()) -> None:
    """Write a network of your own and its test."""
    _write("model", name, folder)


def _write(what: str, name: str, folder: Path) -> None:
    module = name.replace("-", "_")
    if not re.fullmatch("[a-z][a-z0-9_-]*", name) or keyword.iskeyword(module):
        raise ConfigError(f"a {what}'s name has lower-case letters, digits, - and _, the first a letter, got '{name}'")
    title = "".join(word.capitalize() for word in module.split("_"))
    path, test = folder / f"{module}.py", folder / f"test_{module}.py"
    for each in (path, test):
        if each.exists():
            raise ConfigError(f"{each} is there already; choose another name or another --dir")
    for each, skeleton in ((path, what), (test, f"test_{what}")):
        text = (resources.files("fedrpc") / "cli" / "skeletons" / f"{skeleton}.txt").read_text(encoding="utf-8")
        with explain_unwritable(each):
            folder.mkdir(parents=True, exist_ok=True)
            each.write_text(Template(text).substitute(name=name, module=module, title=title), encoding="utf-8")
    shown, tested = (show_path(each.absolute()) for each in (path, test))
    typer.echo(f"wrote {shown} and {tested}; try them with\n  pytest {tested}\n  fedrpc run --{what} {shown}")
