"""Registries of named things: those of fedrpc itself by decorator, those of third parties by entry point.

A name of fedrpc's own that nobody has imported yet is found in the catalog. So names can be listed and checked without
importing torch, and a run imports one method instead of all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from fedrpc.catalog import Entry, list_modules, read_catalog
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.process import pausing_collector

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to registered things, and imports what defines a thing when it is first asked for.

    Args:
        what: The singular noun used in errors, such as "method".
        plural: The last word of the entry point group, such as "methods".
        room: The folder whose modules register the built-in ones, if the catalog describes them.
    """

    def __init__(self, what: str, plural: str, room: str = "") -> None:
        self.what, self.group, self._room = what, f"fedrpc.{plural}", room
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that registers what it decorates under `name`."""

        def add(item: T) -> T:
            if self._items.get(name, item) is not item:
                raise ConfigError(f"two {self.what}s are called '{name}'; rename one of them")
            self._items[name] = item
            return item

        return add

    @property
    def imported(self) -> Mapping[str, T]:
        """What has been imported so far, by name."""
        return self._items

    def find_params(self, name: str) -> Collection[str] | None:
        """The names of the parameters of something that only the catalog knows yet; None for anything else."""
        entry = self._catalog.get(name)
        return None if entry is None or name in self._items else entry.params

    @cached_property
    def _catalog(self) -> Mapping[str, Entry]:
        return read_catalog().find_group(self.group.rpartition(".")[2])

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        """What third parties add; names of fedrpc's own stay its own."""
        return {point.name: point for point in entry_points(group=self.group) if point.name not in self._catalog}

    def check(self, name: str) -> None:
        """Raises UnknownName if there is nothing of this name; imports nothing."""
        if name not in {*self._items, *self._catalog, *self._points}:
            self._import_new_modules()
        if name not in (known := {*self._items, *self._catalog, *self._points}):
            raise UnknownName(self.what, name, known)

    def _import_new_modules(self) -> None:
        """Imports the room's modules that the catalog does not know: a new file works before `make catalog`."""
        for module in list_modules(self._room) if self._room else ():
            if module not in read_catalog().modules:
                importlib.import_module(module)

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            self.check(name)
            if name in self._items:
                pass  # in a module that is newer than the catalog
            elif name in self._catalog:
                with pausing_collector():
                    importlib.import_module(self._catalog[name].module)
            else:
                self._load_point(self._points[name])
        return self._items[name]

    def __contains__(self, name: str) -> bool:
        return name in self._items or name in self._catalog or self._is_whole(name)

    def __iter__(self) -> Iterator[str]:
        self._import_new_modules()
        return iter(sorted({*self._items, *self._catalog, *filter(self._is_whole, self._points)}))

    def _is_whole(self, name: str) -> bool:
        """Whether a third party has something of this name that can be loaded: one broken package hides no other."""
        try:
            self._load_point(self._points[name])
        except (KeyError, ConfigError):
            return False
        return True

    def _load_point(self, point: EntryPoint) -> None:
        if point.name in self._items:
            return
        try:
            self._items[point.name] = point.load()
        except Exception as error:
            why = f"'{point.value}': {type(error).__name__}: {error}"
            raise ConfigError(f"the {self.what} '{point.name}' cannot be loaded from {why}") from None


# The registries whose modules import torch are created here; their rooms say of what type they are.
METHODS: Registry[Any] = Registry("method", "methods", "methods")
AGGREGATORS: Registry[Any] = Registry("aggregator", "aggregators", "aggregation")
MODELS: Registry[Any] = Registry("model", "models", "models")
