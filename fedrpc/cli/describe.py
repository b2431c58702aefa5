"""Describes methods, aggregators and models: those of fedrpc itself from the catalog, others from their classes.

`python -m fedrpc.cli.describe` (`make catalog`) writes the catalog.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedrpc.catalog import PATH, Catalog, Entry, MethodEntry, ModelEntry, Parameter, list_modules, read_catalog
from fedrpc.errors import ConfigError
from fedrpc.own_names import list_plain_models
from fedrpc.registry import AGGREGATORS, METHODS, MODELS

# Input shapes that models' parameters are counted for; a model that is no data set's default takes the first that fits.
SHAPES: dict[str, tuple[int, ...]] = {
    "cifar10": (3, 32, 32),
    "mnist": (1, 28, 28),
    "uci-har": (6, 128),
    "urbansound8k": (1, 64, 128),
    "a table": (12,),
}
CLASSES = 10


# By name


def find_methods() -> dict[str, MethodEntry]:
    """Every method."""
    known = read_catalog().methods
    return {name: known.get(name) or describe_method(name, METHODS[name]) for name in METHODS}


def find_aggregators() -> dict[str, Entry]:
    """Every layer of aggregation."""
    known = read_catalog().aggregators
    return {name: known.get(name) or describe_aggregator(AGGREGATORS[name]) for name in AGGREGATORS}


def find_models() -> dict[str, ModelEntry]:
    """Every model."""
    known = read_catalog().models
    names = [*MODELS, *list_plain_models()]
    return {name: known.get(name) or describe_model(name, MODELS[name]) for name in names}


# From classes


def first_line(text: str | None) -> str:
    """The first line of a docstring."""
    return (text or "").strip().split("\n", 1)[0]


def describe_method(name: str, method: Any) -> MethodEntry:
    """Describes a method by the first line of its module, which names the paper, or of its class if it shares one."""
    own = name.replace("-", "_") in method.__module__.split(".")[-2:]  # a file, or a package, of that name
    of_module = first_line(sys.modules[method.__module__].__doc__) if own else ""
    stance = method.dp_sgd_stance()
    return MethodEntry(
        module=method.__module__,
        about=of_module or first_line(method.__doc__),
        shares=method.shares,
        dp_sgd_refusal="" if stance.is_allowed else stance.reason,
        params=_describe_params(method.Params),
    )


def describe_aggregator(aggregator: Any) -> Entry:
    """Describes a layer of aggregation by the first line of its class."""
    return Entry(
        module=aggregator.__module__,
        about=first_line(aggregator.__doc__),
        params=_describe_params(aggregator.Params),
    )


def describe_model(name: str, builder: Any) -> ModelEntry:
    """Describes a model by the first line of its class or function, and counts its parameters."""
    from fedrpc.models.pairing import BY_DATASET

    make, shape = getattr(builder, "make", builder), find_reference_shape(name)
    return ModelEntry(
        module=make.__module__,
        about=first_line(inspect.getdoc(make)),
        num_parameters=count_parameters(name, shape) if shape else None,
        shape=shape,
        default_of=tuple(dataset for dataset, model in BY_DATASET.items() if model == name),
    )


def find_reference_shape(name: str) -> tuple[int, ...] | None:
    """The input shape to count a model's parameters for: of the data set whose default it is, or one that fits."""
    from fedrpc.models.pairing import BY_DATASET, list_fitting

    for dataset, shape in SHAPES.items():
        if BY_DATASET.get(dataset) == name:
            return shape
    if MODELS.find_owner(name):
        return next((shape for shape in SHAPES.values() if _can_build(name, shape)), None)
    return next((shape for shape in SHAPES.values() if name in list_fitting(shape)), None)


def _can_build(name: str, shape: tuple[int, ...]) -> bool:
    try:
        count_parameters(name, shape)
    except ConfigError:
        return False
    return True


def count_parameters(name: str, shape: tuple[int, ...]) -> int:
    """The number of values that a model learns; it is built without memory for them."""
    import torch

    from fedrpc.models.pairing import build

    with torch.device("meta"):
        network = build(name, shape, CLASSES)
    return sum(parameter.numel() for parameter in network.parameters())


def _describe_params(cls: type[BaseModel]) -> dict[str, Parameter]:
    return {
        name: Parameter(default=format_default(field), about=describe_field(field))
        for name, field in cls.model_fields.items()
    }


def format_default(field: FieldInfo) -> str:
    """The default of a setting, as in TOML but for the quotes around text."""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool | tuple):
        return json.dumps(value)
    return "none" if value is None else str(value)


def describe_field(field: FieldInfo) -> str:
    """What a setting is, and the values to choose from where the words do not name them all."""
    about, choices = field.description or "", list(_list_choices(field.annotation))
    return about if {*choices} <= {*re.findall(r"[\w-]+", about)} else f"{about} ({', '.join(choices)})"


def _list_choices(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for each in get_args(annotation):
            yield from _list_choices(each)


# The catalog


def build_catalog() -> Catalog:
    """Imports every module of the three rooms, and describes what they registered."""
    modules = tuple(module for room in ("methods", "aggregation", "models") for module in list_modules(room))
    for module in modules:
        importlib.import_module(module)
    return Catalog(
        modules=modules,
        methods=_select_own({name: describe_method(name, cls) for name, cls in METHODS.imported.items()}),
        aggregators=_select_own({name: describe_aggregator(cls) for name, cls in AGGREGATORS.imported.items()}),
        models=_select_own({name: describe_model(name, builder) for name, builder in MODELS.imported.items()}),
    )


def _select_own(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of fedrpc itself, sorted."""
    return {name: entry for name, entry in sorted(entries.items()) if entry.module.startswith("fedrpc.")}


if __name__ == "__main__":
    # An empty one first, so that nothing comes from the old catalog, which may be stale or half merged.
    PATH.write_text(Catalog(modules=(), methods={}, aggregators={}, models={}).model_dump_json(), encoding="utf-8")
    PATH.write_text(build_catalog().model_dump_json(indent=1, exclude_defaults=True) + "\n", encoding="utf-8")
