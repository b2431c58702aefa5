"""Lists what can be chosen: methods, data sets, models, partitions, recipes and settings."""

from __future__ import annotations

import inspect
import os
import typing
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedrpc import config
from fedrpc.catalog import MethodEntry
from fedrpc.cli import describe
from fedrpc.data import datasets
from fedrpc.data.origins import DATASETS
from fedrpc.data.partition import PARTITIONERS, Partitioner
from fedrpc.errors import DataError, UnknownName
from fedrpc.report.table import format_size


def make_table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """A table whose first column, the name to type, is never broken over lines."""
    table = Table(header_style="bold", show_edge=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        if number == 0:
            table.add_column(name, style="bold cyan", no_wrap=True)
        else:
            right = name in numbers
            table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right)
    return table


def _add_row(table: Table, *cells: str | Text) -> None:
    """Adds a row without markup: "[0, 1]" in a docstring stays as it is."""
    table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))


def _format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


# Methods and models


def list_methods() -> RenderableType:
    """Every method with its paper and what it shares."""
    table = make_table("method", "about", "leaves a client")
    for name, method in describe.find_methods().items():
        _add_row(table, name, method.about, describe_sharing(method))
    return table


def describe_sharing(method: MethodEntry) -> str:
    """What leaves a client, and why DP-SGD is refused if it is."""
    beside = f", {method.shares}" if method.shares else ""
    refused = f"; DP-SGD refused: {method.dp_sgd_refusal}" if method.dp_sgd_refusal else ""
    return f"weights and scalars{beside}{refused}"


def list_models() -> RenderableType:
    """Every model with its number of parameters for a typical input shape."""
    table = make_table("model", "about", "parameters", "samples", "default of", numbers=("parameters",))
    for name, model in describe.find_models().items():
        count = f"{model.num_parameters:,}" if model.num_parameters is not None else "-"
        shape = _format_shape(model.shape) if model.shape else "-"
        _add_row(table, name, model.about, count, shape, ", ".join(model.default_of) or "-")
    counted = f"Parameters with {describe.CLASSES} classes."
    return Group(table, Text(f"\n{counted} A model that does not fit the data says which shapes it takes."))


# Data sets


GET = "Get one with `fedrpc data prepare NAME --data-dir DIR`, import your own with `fedrpc data import PATH`."


def list_datasets() -> RenderableType:
    """Every data set, with its classes and shape if it is installed."""
    table = make_table(
        "data set", "here", "classes", "sample", "train", "test", "about", numbers=("classes", "train", "test")
    )
    for line in datasets.list_available():
        if line.where is None:
            _add_row(table, line.name, "no", "-", "-", "-", "-", Text(_describe_needs(line), style="dim"))
        elif line.note:
            _add_row(table, line.name, "yes", "-", "-", "-", "-", _describe_state(line, verify=False))
        else:
            data = datasets.open_folder(line.where)
            sizes = (f"{len(half):,}" for half in (data.train, data.test))
            _add_row(table, line.name, "yes", str(data.num_classes), _format_shape(data.shape), *sizes, data.source)
    return Group(table, Text(f"\n{_describe_search(None)} {GET}"))


def _describe_needs(line: datasets.Listing) -> str:
    return DATASETS[line.name].needs


def list_installed_data(data_dir: Path | None, *, verify: bool) -> RenderableType:
    """Which data sets are installed and where, and what it takes to get the others; `verify` reads every byte."""
    table = make_table("data set", "size", "licence", "where it is, or what it takes", numbers=("size",))
    for line in datasets.list_available(data_dir):
        if line.where is None:
            about = Text(f"not here; {_describe_needs(line)}", style="dim")
            _add_row(table, line.name, f"~{format_size(line.size_bytes)}", line.licence, about)
        else:
            _add_row(table, line.name, format_size(line.size_bytes), line.licence, _describe_state(line, verify))
    return Group(table, Text(f"\n{_describe_search(data_dir)} {GET}"))


def _describe_state(line: datasets.Listing, verify: bool) -> Text:
    assert line.where is not None, "only an installed data set has a state"
    fault = line.note
    if verify and not fault:
        try:
            datasets.verify(line.where)
        except DataError as error:
            fault = str(error)
    if fault:
        return Text.assemble(("WRONG: ", "bold red"), fault)
    where = "comes with fedrpc" if line.where.parent == datasets.EMBEDDED else str(line.where)
    return Text.assemble(("OK ", "bold green"), where) if verify else Text(where)


def _describe_search(data_dir: Path | None) -> str:
    chosen = data_dir or os.environ.get("FEDRPC_DATA")
    if not chosen:
        return "Looked only among the data sets of fedrpc itself: name a folder with --data-dir DIR or FEDRPC_DATA=DIR."
    missing = "" if Path(chosen).expanduser().is_dir() else ", which does not exist"
    return f"Looked in {chosen}{missing}, and among the data sets that come with fedrpc."


# Partitions and recipes


def list_partitions() -> RenderableType:
    """Every partition with its syntax and an example."""
    table = make_table("partition", "about, how it is written, and an example")
    for name in PARTITIONERS:
        partitioner = PARTITIONERS[name]
        written = write_syntax(name, partitioner)
        lines = Text.assemble(partitioner.about, ("\nwrite ", "dim"), written)
        if partitioner.example != written:
            lines.append_text(Text.assemble(("\nsuch as ", "dim"), (partitioner.example, "green")))
        _add_row(table, name, lines)
    return table


def write_syntax(name: str, partitioner: Partitioner) -> str:
    """How a partition is written, from its function's signature: `name:a [,b=N] [,flag]`."""
    parameters = list(inspect.signature(partitioner.assign).parameters.values())[1:]
    kinds = typing.get_type_hints(partitioner.assign)
    required = [p.name for p in parameters if p.default is p.empty]
    optional = [_write_option(p, kinds[p.name]) for p in parameters if p.default is not p.empty]
    if not required:
        return f"{name} [:{','.join(optional)}]" if optional else name
    return " ".join([f"{name}:{','.join(required)}", *(f"[,{option}]" for option in optional)])


def _write_option(parameter: inspect.Parameter, hint: object) -> str:
    """What to type to change a parameter from its default."""
    if isinstance(parameter.default, bool):
        return f"{parameter.name}=false" if parameter.default else parameter.name
    kinds = {hint, *typing.get_args(hint)}
    return f"{parameter.name}={'N' if int in kinds else 'X' if float in kinds else 'TEXT'}"


def list_recipes() -> RenderableType:
    """Every recipe with the comment that it opens with."""
    table = make_table("recipe", "what it runs", "about")
    for name, path in config.list_recipes().items():
        values = config.read_toml(path)
        what = (*values.get("methods", [values.get("method")]), values.get("dataset"), values.get("partition"))
        table.add_row(
            name, ", ".join(str(word) for word in what if word), read_leading_comment(path.read_text(encoding="utf-8"))
        )
    return table


def list_experiments() -> RenderableType:
    """Every experiment of a paper, and where the paper has it."""
    table = make_table("experiment", "paper", "about")
    for name, path in config.list_experiments().items():
        values = config.read_toml(path)
        table.add_row(name, f"{values['paper']}: {values['where']}", values["title"])
    return table


def read_leading_comment(text: str) -> str:
    """The comment that a TOML file opens with, as one line."""
    words = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        words.append(line.lstrip("# ").strip())
    return " ".join(words)


# Settings


def list_settings() -> RenderableType:
    """Every setting of a run, as --set and TOML name it."""
    table = make_table("setting", "default", "about")
    for name, field in config.list_settings():
        if name != "params":
            _add_row(table, name, describe.format_default(field), describe.describe_field(field))
    return Group(table, Text("\nA method has parameters of its own, params.NAME: see `fedrpc list params`."))


def list_params() -> RenderableType:
    """Every method's own parameters."""
    table = make_table("method", "parameter", "default", "about")
    for name, method in describe.find_methods().items():
        for key, parameter in method.params.items():
            _add_row(table, name, f"params.{key}", parameter.default, parameter.about)
    return table


def list_aggregators() -> RenderableType:
    """Every layer of aggregation, with its parameters."""
    table = make_table("aggregator or parameter", "default", "about")
    for name, layer in describe.find_aggregators().items():
        _add_row(table, name, "", layer.about)
        for key, each in layer.params.items():
            _add_row(table, f"  aggregation.{name}.{key}", each.default, each.about)
    return table


LISTINGS: dict[str, Callable[[], RenderableType]] = {
    "methods": list_methods,
    "aggregators": list_aggregators,
    "datasets": list_datasets,
    "models": list_models,
    "partitions": list_partitions,
    "recipes": list_recipes,
    "settings": list_settings,
    "params": list_params,
}


def render_listing(what: str) -> RenderableType:
    """One of the listings by name; raises UnknownName when there is no such list."""
    if what not in LISTINGS:
        raise UnknownName("list", what, LISTINGS)
    return LISTINGS[what]()
