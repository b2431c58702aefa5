"""Lists what can be chosen (methods, data sets, models, partitions, recipes), and gets data sets with a bar."""

from __future__ import annotations

import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fedrpc import config, models
from fedrpc.data import datasets
from fedrpc.data.origins import DATASETS
from fedrpc.data.partition import PARTITIONERS, Partitioner
from fedrpc.data.prepare import prepare
from fedrpc.errors import DataError
from fedrpc.methods import METHODS
from fedrpc.methods.method import Method
from fedrpc.models.base import MODELS, Architecture, Shape
from fedrpc.report.table import format_size

# Samples that models are counted for; a model without a data set of its own is counted for the first that it takes.
SHAPES: dict[str, Shape] = {
    "cifar10": (3, 32, 32),
    "mnist": (1, 28, 28),
    "uci-har": (6, 128),
    "urbansound8k": (1, 64, 128),
}
CLASSES = 10


def _table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """A table whose first column, the name that one types, is never broken."""
    made = Table(header_style="bold", show_edge=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        if place == 0:
            made.add_column(name, style="bold cyan", no_wrap=True)
        else:
            right = name in numbers
            made.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right)
    return made


def _add(made: Table, *cells: str | Text) -> None:
    """Adds a row as it is: "[0, 1]" in somebody's docstring is no markup."""
    made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n", 1)[0]


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


# Methods


def methods() -> RenderableType:
    """Every method with its paper and what it shares."""
    made = _table("method", "about", "leaves a client")
    for name in METHODS:
        method = METHODS[name]
        _add(made, name, method_about(name, method), _leaves(method))
    return made


def method_about(name: str, method: type[Method[Any, Any]]) -> str:
    """The first line of its module, which names the paper, if the module is the method's own; else of the class."""
    module = method.__module__.rsplit(".", 1)[-1]
    of_module = _first_line(sys.modules[method.__module__].__doc__) if module == name.replace("-", "_") else ""
    return of_module or _first_line(method.__doc__)


def _leaves(method: type[Method[Any, Any]]) -> str:
    beside = f", {method.shares}" if method.shares else ""
    stance = method.dp_sgd_stance()
    refused = "" if stance.is_allowed else f"; DP-SGD refused: {stance.reason}"
    return f"weights and scalars{beside}{refused}"


# Models


def model_listing() -> RenderableType:
    """Every model with its size for a shape that it is made for."""
    made = _table("model", "about", "parameters", "samples", "default of", numbers=("parameters",))
    for name in MODELS:
        builder = MODELS[name]
        shape = reference_shape(name)
        about = _first_line(inspect.getdoc(builder.make if isinstance(builder, Architecture) else builder))
        counted = f"{num_parameters(name, shape):,}" if shape else "-"
        own = ", ".join(dataset for dataset, model in models.pairing.BY_DATASET.items() if model == name)
        _add(made, name, about, counted, _by(shape) if shape else "-", own or "-")
    return Group(
        made, Text(f"\nParameters with {CLASSES} classes. A model says what it takes when data does not fit it.")
    )


def reference_shape(name: str) -> Shape | None:
    """The sample shape that a model is counted for: of the data set that it is the default of, else one it takes."""
    for dataset, shape in SHAPES.items():
        if models.pairing.BY_DATASET.get(dataset) == name:
            return shape
    return next((shape for shape in SHAPES.values() if name in models.list_fitting(shape)), None)


def num_parameters(name: str, shape: Shape) -> int:
    """How many values a model learns; it is built without memory for them."""
    with torch.device("meta"):
        network = models.build(name, shape, CLASSES)
    return sum(parameter.numel() for parameter in network.parameters())


# Data sets


GET = "Get one with `fedrpc data prepare NAME --data-dir DIR`."


def dataset_listing() -> RenderableType:
    """Every data set with its classes and shape where it is here."""
    made = _table(
        "data set", "here", "classes", "sample", "train", "test", "about", numbers=("classes", "train", "test")
    )
    for line in datasets.list_available():
        if line.where is None:
            _add(made, line.name, "no", "-", "-", "-", "-", Text(_needs(line), style="dim"))
        elif line.note:
            _add(made, line.name, "yes", "-", "-", "-", "-", _state(line, verify=False))
        else:
            data = datasets.open_folder(line.where)
            sizes = (f"{len(half):,}" for half in (data.train, data.test))
            _add(made, line.name, "yes", str(data.num_classes), _by(data.shape), *sizes, data.source)
    return Group(made, Text(f"\n{_looked_in(None)} {GET}"))


def _needs(line: datasets.Listing) -> str:
    return DATASETS[line.name].needs


def data_table(data_dir: Path | None, *, verify: bool) -> RenderableType:
    """What is here and where, what it takes to get the rest; with `verify` every byte of what is here is read."""
    made = _table("data set", "size", "licence", "where it is, or what it takes", numbers=("size",))
    for line in datasets.list_available(data_dir):
        if line.where is None:
            about = Text(f"not here; {_needs(line)}", style="dim")
            _add(made, line.name, f"~{format_size(line.size_bytes)}", line.licence, about)
        else:
            _add(made, line.name, format_size(line.size_bytes), line.licence, _state(line, verify))
    return Group(made, Text(f"\n{_looked_in(data_dir)} {GET}"))


def _state(line: datasets.Listing, verify: bool) -> Text:
    assert line.where is not None, "only what is here has a state"
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


def _looked_in(data_dir: Path | None) -> str:
    chosen = data_dir or os.environ.get("FEDRPC_DATA")
    if not chosen:
        return (
            "Looked among what comes with fedrpc only: --data-dir DIR, or FEDRPC_DATA=DIR, names a folder of your own."
        )
    missing = "" if Path(chosen).expanduser().is_dir() else ", which does not exist"
    return f"Looked in {chosen}{missing}, and among what comes with fedrpc."


def prepare_with_progress(name: str, folder: Path, source: Path | None, console: Console) -> None:
    """Makes a data set's folder while a bar shows how far it is, and says where it is and what to set."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    tasks: dict[str, TaskID] = {}

    def show(step: str, done: int, total: int) -> None:
        bar.start()
        if step not in tasks:
            tasks[step] = bar.add_task(f"{name}: {step}", total=total)
        bar.update(tasks[step], completed=done, total=total)

    try:
        made = prepare(name, folder, source, show)
    finally:
        if tasks:
            bar.stop()
    console.print(Text(_closing(name, folder, made)), soft_wrap=True)


def _closing(name: str, folder: Path, made: Path) -> str:
    if made.parent == datasets.EMBEDDED:
        return f"{name} comes with fedrpc: there is nothing to prepare and nothing to set."
    space = sum(path.stat().st_size for path in made.iterdir())
    told = f"{name} is in {made} ({format_size(space)})."
    if Path(os.environ.get("FEDRPC_DATA") or "/dev/null").expanduser().resolve() == folder.resolve():
        return f"{told} FEDRPC_DATA names that folder already: use it with --dataset {name}."
    return f"{told} Use it with --dataset {name} --data-dir {folder}, or set FEDRPC_DATA={folder.resolve()}."


# Partitions and recipes


def partitions() -> RenderableType:
    """Every partition with its syntax and an example."""
    made = _table("partition", "about, how it is written, and an example")
    for name in PARTITIONERS:
        law = PARTITIONERS[name]
        written = syntax(name, law)
        lines = Text.assemble(law.about, ("\nwrite ", "dim"), written)
        if law.example != written:
            lines.append_text(Text.assemble(("\nsuch as ", "dim"), (law.example, "green")))
        _add(made, name, lines)
    return made


def syntax(name: str, law: Partitioner) -> str:
    """How a partition is written, off its function's signature: `name:a [,b=N] [,flag]`."""
    parameters = list(inspect.signature(law.assign).parameters.values())[1:]
    kinds = typing.get_type_hints(law.assign)
    required = [p.name for p in parameters if p.default is p.empty]
    optional = [_written(p, kinds[p.name]) for p in parameters if p.default is not p.empty]
    if not required:
        return f"{name} [:{','.join(optional)}]" if optional else name
    return " ".join([f"{name}:{','.join(required)}", *(f"[,{option}]" for option in optional)])


def _written(parameter: inspect.Parameter, hint: object) -> str:
    """What one types to change a parameter from its default."""
    if isinstance(parameter.default, bool):
        return f"{parameter.name}=false" if parameter.default else parameter.name
    kinds = {hint, *typing.get_args(hint)}
    return f"{parameter.name}={'N' if int in kinds else 'X' if float in kinds else 'TEXT'}"


def recipes() -> RenderableType:
    """Every recipe with its leading comment."""
    made = _table("recipe", "what it runs", "about")
    for name, path in config.recipes().items():
        values = config.read_toml(path)
        what = (values.get("method"), values.get("dataset"), values.get("partition"))
        made.add_row(
            name, ", ".join(str(word) for word in what if word), recipe_about(path.read_text(encoding="utf-8"))
        )
    return made


def recipe_about(text: str) -> str:
    """The comment that a TOML file opens with, as one line."""
    words = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        words.append(line.lstrip("# ").strip())
    return " ".join(words)


# Settings


def settings() -> RenderableType:
    """Every setting of a run, as --set and TOML name it."""
    made = _table("setting", "default", "about")
    for name, field in _flat(config.RunConfig):
        if name != "params":
            _add(made, name, _default(field), field.description or "")
    return Group(made, Text("\nA method has parameters of its own, params.NAME: see `fedrpc list params`."))


def params() -> RenderableType:
    """Every method's own parameters."""
    made = _table("method", "parameter", "default", "about")
    for name in METHODS:
        for parameter, field in METHODS[name].Params.model_fields.items():
            _add(made, name, f"params.{parameter}", _default(field), field.description or "")
    return made


def _flat(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The fields of a configuration, those of its tables by their dotted names."""
    for name, field in cls.model_fields.items():
        tables = [kind for kind in (field.annotation, *typing.get_args(field.annotation)) if _is_table(kind)]
        if tables:
            yield from _flat(tables[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "none" if value is None else str(value)


LISTINGS: dict[str, Callable[[], RenderableType]] = {
    "methods": methods,
    "datasets": dataset_listing,
    "models": model_listing,
    "partitions": partitions,
    "recipes": recipes,
    "settings": settings,
    "params": params,
}
