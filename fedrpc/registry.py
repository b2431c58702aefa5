"""Registries of named things: built-in ones by decorator, those of third parties by entry point."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from fedrpc.errors import ConfigError, UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to registered things; loads built-ins and entry points on the first miss.

    Args:
        what: The singular noun used in errors, such as "method".
        plural: The last word of the entry point group, such as "methods".
        builtin: A package whose modules register what they hold when they are imported.
    """

    def __init__(self, what: str, plural: str, builtin: str | None = None) -> None:
        self.what, self.group, self._builtin = what, f"fedrpc.{plural}", builtin
        self._items: dict[str, T] = {}
        self._broken: dict[str, str] = {}  # why an entry point could not be loaded, by name
        self._is_loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that registers what it decorates under `name`."""

        def add(item: T) -> T:
            if self._items.get(name, item) is not item:
                raise ConfigError(f"two {self.what}s are called '{name}'; rename one of them")
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            self._load()
        if name in self._broken:
            raise ConfigError(f"the {self.what} '{name}' cannot be loaded from {self._broken[name]}")
        if name not in self._items:
            raise UnknownName(self.what, name, self._items)
        return self._items[name]

    def __contains__(self, name: str) -> bool:
        if name not in self._items:
            self._load()
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._items))

    def _load(self) -> None:
        if self._is_loaded:
            return
        self._is_loaded = True
        if self._builtin:
            # Only now: its modules import this registry's module, and each other.
            package = importlib.import_module(self._builtin)
            for module in pkgutil.walk_packages(package.__path__, f"{self._builtin}."):
                importlib.import_module(module.name)
        for point in entry_points(group=self.group):
            if point.name in self._items:
                continue
            try:
                self._items[point.name] = point.load()
            except Exception as error:  # one broken package must not hide the others
                self._broken[point.name] = f"'{point.value}': {type(error).__name__}: {error}"
