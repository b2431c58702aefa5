"""`fedrpc new`: writes the skeleton of a method or a model of one's own, with its test."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from fedrpc.errors import ConfigError
from fedrpc.files import explain_unwritable
from fedrpc.owncode import show_path
from fedrpc.registry import METHODS, own_modules

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
    title = "".join(word.capitalize() for word in module.split("_"))
    _check_name(what, name, module, title)
    path, test = folder / f"{module}.py", folder / f"test_{module}.py"
    for each in (path, test):
        if each.exists():
            raise ConfigError(f"{each} is there already; choose another name or another --dir")
        _refuse_hiding(each)
    for each, skeleton in ((path, what), (test, f"test_{what}")):
        text = (resources.files("fedrpc") / "cli" / "skeletons" / f"{skeleton}.txt").read_text(encoding="utf-8")
        with explain_unwritable(each):
            folder.mkdir(parents=True, exist_ok=True)
            each.write_text(Template(text).substitute(name=name, module=module, title=title), encoding="utf-8")
    shown, tested = (show_path(each.absolute()) for each in (path, test))
    typer.echo(f"wrote {shown} and {tested}; try them with\n  pytest {tested}\n  fedrpc run --{what} {shown}")


def _check_name(what: str, name: str, module: str, title: str) -> None:
    """Raises ConfigError unless a module and a class can have these names."""
    if not re.fullmatch("[a-z][a-z0-9_-]*", name):
        raise ConfigError(f"a {what}'s name has lower-case letters, digits, - and _, the first a letter, got '{name}'")
    for word, thing in ((module, "module"), (title, "class")):
        if keyword.iskeyword(word):
            raise ConfigError(f"'{word}' is a keyword of Python, which no {thing} can be named; choose another name")


def _refuse_hiding(path: Path) -> None:
    """Raises ConfigError if Python would find a file in place of a module of its own or an installed one."""
    module = path.stem
    if module in sys.stdlib_module_names:
        owner = "Python's own"
    elif _is_installed(module):
        owner = "the installed"
    else:
        return
    raise ConfigError(
        f"{path.name} would hide {owner} module '{module}' from every program in its folder; choose another name"
    )


def _is_installed(module: str) -> bool:
    """Whether Python finds a module, which is not imported, beside those in the current folder."""
    if module in own_modules:
        return False
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:  # a user's own file, found too late to be imported
        return False
    except ValueError:  # imported, without a specification
        return True
    if spec is None or spec.loader is None:  # a folder without __init__.py is found last, and hides behind any file
        return False
    return spec.origin is None or Path(spec.origin).parent != Path.cwd()
