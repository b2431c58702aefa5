"""Registries of named things: built-in ones by decorator, those of third parties by entry point."""

from __future__ import annotations

import importlib
import pkgutil
import threading
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
        self._is_loaded = self._is_loading = False
        self._lock = threading.RLock()  # others wait for the thread that loads, which may itself look names up

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
        with self._lock:
            if self._is_loaded or self._is_loading:
                return
            self._is_loading = True
            try:
                self._load_builtins()
                self._load_entry_points()
                self._is_loaded = True
            finally:
                self._is_loading = False

    def _load_builtins(self) -> None:
        """Imports the built-in package; only now, since its modules import this registry's module, and each other."""
        if self._builtin:
            package = importlib.import_module(self._builtin)
            for module in pkgutil.walk_packages(package.__path__, f"{self._builtin}."):
                importlib.import_module(module.name)

    def _load_entry_points(self) -> None:
        for point in entry_points(group=self.group):
            if point.name in self._items:
                continue
            try:
                self._items[point.name] = point.load()
            except Exception as error:  # one broken package must not hide the others
                self._broken[point.name] = f"'{point.value}': {type(error).__name__}: {error}"
