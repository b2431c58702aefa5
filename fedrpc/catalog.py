"""The catalog: what fedrpc itself registers, described without importing it, since its modules import torch.

`make catalog` writes catalog.json from the registered classes; a unit test holds it against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

PATH = Path(__file__).with_suffix(".json")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Parameter(_Frozen):
    """A parameter of a method or an aggregator: its default in words, and what it is."""

    default: str
    about: str


class Entry(_Frozen):
    """What is registered under a name.

    Attributes:
        module: Registers it when it is imported.
        about: One line.
        params: The parameters of a method or an aggregator, by name.
    """

    module: str
    about: str
    params: dict[str, Parameter] = {}


class MethodEntry(Entry):
    """A method.

    Attributes:
        shares: What leaves a client beside weights and scalars.
        dp_sgd_refusal: Why the method refuses DP-SGD; "" when it allows it.
    """

    shares: str
    dp_sgd_refusal: str


class ModelEntry(Entry):
    """A model.

    Attributes:
        num_parameters: Their number for samples of `shape`; None when no shape is known to fit.
        default_of: The data sets whose default it is.
    """

    num_parameters: int | None
    shape: tuple[int, ...] | None
    default_of: tuple[str, ...]


class Catalog(_Frozen):
    """All entries, by group and name."""

    modules: tuple[str, ...]  # of the rooms that it describes; a module that is not here is newer than the catalog
    methods: dict[str, MethodEntry]
    aggregators: dict[str, Entry]
    models: dict[str, ModelEntry]

    def find_group(self, group: str) -> Mapping[str, Entry]:
        """The entries of one group; empty for a group that registers without importing torch."""
        found: Mapping[str, Entry] = getattr(self, group, {})
        return found


def list_modules(room: str) -> list[str]:
    """The modules in a room's folder, by file: nothing is imported."""
    root = Path(__file__).parent
    found = [path.relative_to(root).with_suffix("").parts for path in sorted((root / room).rglob("*.py"))]
    return [".".join(["fedrpc", *parts]) for parts in found if parts[-1] != "__init__"]


@cache
def read_catalog() -> Catalog:
    """The catalog that comes with the package."""
    return Catalog.model_validate_json(PATH.read_bytes())
