"""Completes the values of options and arguments in a shell, without importing torch: a shell asks at every TAB."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import typer
from pydantic_core import PydanticUndefined

from fedrpc import config
from fedrpc.catalog import Entry, read_catalog
from fedrpc.registry import AGGREGATORS, METHODS, MODELS, Registry
from fedrpc.tracking import TRACKERS

Item = tuple[str, str]  # a value, and what it is in one line; zsh and fish show both
Completer = Callable[[str], list[Item]]

_FINISHED = ("summary.json", "compare.json")  # what a run and a comparison leave
_MOST_FOLDERS = 500  # looked at for one TAB


def one_of(*values: str) -> Completer:
    """A completer of values that are known beforehand."""
    return lambda incomplete: _filter(((value, "") for value in values), incomplete)


def _filter(items: Iterable[Item], incomplete: str) -> list[Item]:
    """The items that begin so; typer would break longer lines, of which fish makes items of their own."""
    return [(value, shorten(about, 60, placeholder=" ...")) for value, about in items if value.startswith(incomplete)]


def _list_registered(registry: Registry[Any]) -> Iterator[Item]:
    described = read_catalog().find_group(registry.plural)
    for name in sorted(registry.names):
        yield name, described[name].about if name in described else ""


# Names


def complete_method(incomplete: str) -> list[Item]:
    """A method, or a file with one."""
    return _filter([*_list_registered(METHODS), *_list_sources(incomplete)], incomplete)


def complete_methods(incomplete: str) -> list[Item]:
    """Methods separated by commas; completes the last one, with one that is not there yet."""
    before, comma, last = incomplete.rpartition(",")
    chosen = before.split(",")
    first = () if comma else (("all", "every method that the data and the network suit"),)
    every = (*_list_registered(METHODS), *_list_sources(last))
    items = [*first, *(item for item in every if item[0] not in chosen)]
    return [(f"{before}{comma}{name}", about) for name, about in _filter(items, last)]


def complete_tracker(incomplete: str) -> list[Item]:
    """A tracker."""
    return _filter(_list_registered(TRACKERS), incomplete)


def complete_model(incomplete: str) -> list[Item]:
    """A model, or a file with one."""
    known = [("auto", "chosen by data set and method"), *_list_registered(MODELS)]
    return _filter([*known, *_list_sources(incomplete)], incomplete)


def complete_source(incomplete: str) -> list[Item]:
    """A Python file."""
    return _filter(_list_sources(incomplete), incomplete)


def complete_dataset(ctx: typer.Context, incomplete: str) -> list[Item]:
    """A data set: known, or in the folder of data sets."""
    from fedrpc.data.datasets import list_names  # with NumPy

    return _filter(((name, "") for name in list_names(ctx.params.get("data_dir"))), incomplete)


def complete_origin(incomplete: str) -> list[Item]:
    """A data set that can be prepared."""
    from fedrpc.data.origins import DATASETS

    return _filter(((name, "") for name in sorted(DATASETS.names)), incomplete)


def complete_partition(incomplete: str) -> list[Item]:
    """A partition with what it requires, as in its example: the numbers are there to be changed."""
    from fedrpc.data.partition import PARTITIONERS

    return _filter(((PARTITIONERS[name].shortest, PARTITIONERS[name].about) for name in PARTITIONERS), incomplete)


def complete_recipe(incomplete: str) -> list[Item]:
    """A recipe."""
    return _filter(((name, "") for name in config.list_recipes()), incomplete)


def complete_experiment(incomplete: str) -> list[Item]:
    """An experiment of a paper."""
    return _filter(((name, "") for name in config.list_experiments()), incomplete)


def complete_link(incomplete: str) -> list[Item]:
    """A link that has a name."""
    from fedrpc.emulation.link import PRESETS

    return _filter(((name, "") for name in PRESETS), incomplete)


# Settings


def complete_setting(ctx: typer.Context, incomplete: str) -> list[Item]:
    """A setting with its default, which is there to be changed; parameters are those of the command's method."""
    return _filter(_list_settings(str(ctx.params.get("method") or "fedavg")), incomplete)


def _list_settings(method: str) -> Iterator[Item]:
    for name, field in config.list_settings():
        if name not in ("params", "aggregation"):
            default = field.default
            shown = "" if default is None or default is PydanticUndefined else _write(default)
            yield f"{name}={shown}", field.description or ""
    catalog = read_catalog()
    yield from _list_params("params.", catalog.methods.get(method))
    for layer in sorted(AGGREGATORS.names):
        yield from _list_params(f"aggregation.{layer}.", catalog.aggregators.get(layer))


def _write(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _list_params(prefix: str, entry: Entry | None) -> Iterator[Item]:
    for name, parameter in entry.params.items() if entry else ():
        default = "" if parameter.default == "none" else parameter.default  # the catalog's word for None
        yield f"{prefix}{name}={default}", parameter.about


# Files and folders


def _list_sources(incomplete: str) -> Iterator[Item]:
    """Python files but tests; one level down, too, in folders whose names were begun."""
    parent, start = os.path.split(incomplete)
    below = [os.path.join(parent, folder) for folder in sorted(_list_folders(parent or ".", start))] if start else []
    for place, begun in ((parent, start), *((folder, "") for folder in below)):
        names = sorted(islice(_list_names(place or ".", begun, os.DirEntry.is_file), _MOST_FOLDERS))
        for name in names:
            if name.endswith(".py") and not name.startswith("test_"):
                yield os.path.join(place, name), "a file of your own"


def complete_run(incomplete: str) -> list[Item]:
    """A finished run or comparison, also one level down; a shell offers its own files when there is none."""
    parent, start = os.path.split(incomplete)
    found = []
    for folder in islice(_list_folders(parent or ".", start), _MOST_FOLDERS):
        path = os.path.join(parent, folder)
        if _is_finished(path):
            found.append(path)
        else:
            inner = (os.path.join(path, name) for name in islice(_list_folders(path, ""), _MOST_FOLDERS))
            found += [each for each in inner if _is_finished(each)]
    return [(path, "") for path in sorted(found)]


def _list_folders(parent: str, start: str) -> Iterator[str]:
    return _list_names(parent, start, os.DirEntry.is_dir)


def _list_names(parent: str, start: str, is_wanted: Callable[[os.DirEntry[str]], bool]) -> Iterator[str]:
    try:
        with os.scandir(os.path.expanduser(parent)) as entries:
            for entry in entries:
                hidden = entry.name.startswith(".") and not start.startswith(".")
                if entry.name.startswith(start) and not hidden and is_wanted(entry):
                    yield entry.name
    except OSError:
        return


def _is_finished(folder: str) -> bool:
    return any((Path(folder).expanduser() / name).exists() for name in _FINISHED)
