"""Registries of named things: those of fedrpc itself by decorator, those of others by entry point or by file.

A name of fedrpc's own that nobody has imported yet is found in the catalog. So names can be listed and checked without
importing torch, and a run imports one method instead of all.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from types import FrameType, ModuleType
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakSet

from fedrpc.catalog import Entry, list_modules, read_catalog
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.process import pausing_collector

T = TypeVar("T")

own_modules: dict[str, ModuleType] = {}  # the user's own files (`owncode`), by their names without .py


class Registry(Generic[T]):
    """Maps names to registered things, and imports what defines a thing when it is first asked for.

    Args:
        what: The singular noun used in errors, such as "method".
        plural: The last word of the entry point group, such as "methods".
        room: The folder whose modules register the built-in ones, if the catalog describes them.
        base: What classes in the user's own files derive from, as module:Class, since its module imports torch.
    """

    everyone: ClassVar[WeakSet[Registry[Any]]] = WeakSet()

    def __init__(self, what: str, plural: str, room: str = "", base: str = "") -> None:
        self.what, self.plural, self.group = what, plural, f"fedrpc.{plural}"
        self._room, self._base = room, base
        self._items: dict[str, T] = {}
        self._owners: dict[str, str] = {}  # the modules of what came from the user's own files
        self.everyone.add(self)

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that registers what it decorates under `name`."""

        def add(item: T) -> T:
            self._add(name, item, _find_registering_module(sys._getframe(1)))
            return item

        return add

    def _add(self, name: str, item: T, module: str) -> None:
        if is_own := module in {own.__name__ for own in own_modules.values()}:
            self._check_free(name)
        if self._items.get(name, item) is not item:
            raise ConfigError(f"two {self.what}s are called '{name}'; rename one of them")
        self._items[name] = item
        if is_own:
            self._owners[name] = module

    # The user's own files

    def list_classes(self, module: ModuleType) -> list[type]:
        """The classes that a module of the user's own defines and that could be in this registry."""
        return [
            value
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__ == module.__name__ and self._derives(value)
        ]

    def _derives(self, cls: type) -> bool:
        return any(f"{base.__module__}:{base.__qualname__}" == self._base for base in cls.__mro__[1:])

    def adopt(self, module: ModuleType) -> None:
        """Registers the classes of an own module that have a name of their own and did not register themselves."""
        for cls in self.list_classes(module):
            name = vars(cls).get("name")
            if isinstance(name, str) and self._items.get(name) is not cls:
                self._add(name, cls, module.__name__)  # type: ignore[arg-type]

    def _check_free(self, name: str) -> None:
        if point := self._points.get(name):
            raise ConfigError(f"'{name}' is the name of a {self.what} of {point.value}; choose another `name`")
        if name in self._catalog or (name in self._items and name not in self._owners):
            raise ConfigError(f"'{name}' is the name of a {self.what} of fedrpc itself; choose another `name`")

    def list_owned(self, module: ModuleType) -> list[str]:
        """The names that an own module registered."""
        return [name for name, owner in self._owners.items() if owner == module.__name__]

    def find_owner(self, name: str) -> str:
        """The own module that a name comes from; "" for one of fedrpc or of a package."""
        module = own_modules.get(name.partition(":")[0]) if ":" in name else None
        return module.__name__ if module else self._owners.get(name, "")

    def forget_owned(self) -> None:
        """Removes all that came from the user's own files."""
        for name in self._owners:
            self._items.pop(name, None)
        self._owners.clear()

    def _find_plain(self, name: str) -> Any:
        """A class or function of the user's own that is named as file:object, such as net:Net; None if not there."""
        file, sign, thing = name.partition(":")
        return getattr(own_modules.get(file), thing, None) if sign else None

    # All

    @contextlib.contextmanager
    def lend(self, name: str, item: T) -> Iterator[None]:
        """Registers something for a while, also in place of what had the name; fedrpc's own names stay its own."""
        if name in self._catalog and self[name] is not item:
            raise ConfigError(f"'{name}' is the name of a {self.what} of fedrpc itself; choose another name")
        before = self._items.get(name)
        self._items[name] = item
        try:
            yield
        finally:
            del self._items[name]
            if before is not None:
                self._items[name] = before

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
        return read_catalog().find_group(self.plural)

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        """What third parties add; names of fedrpc's own stay its own."""
        return {point.name: point for point in entry_points(group=self.group) if point.name not in self._catalog}

    @property
    def names(self) -> set[str]:
        """All names that are known without importing anything."""
        return {*self._items, *self._catalog, *self._points}

    def check(self, name: str) -> None:
        """Raises UnknownName if there is nothing of this name; imports nothing that the catalog knows."""
        if self._find_plain(name) is not None:
            return
        if name not in self.names:
            self._import_new_modules()
        if name not in self.names:
            raise UnknownName(self.what, name, self.names)

    def _import_new_modules(self) -> None:
        """Imports the room's modules that the catalog does not know: a new file works before `make catalog`."""
        for module in list_modules(self._room) if self._room else ():
            if module not in read_catalog().modules:
                importlib.import_module(module)

    def __getitem__(self, name: str) -> T:
        if (plain := self._find_plain(name)) is not None:
            found: T = plain
            return found
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


def _find_registering_module(frame: FrameType | None) -> str:
    """The module that is being imported where something is registered."""
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")) if frame else ""


# The registries whose modules import torch are created here; their rooms say of what type they are.
METHODS: Registry[Any] = Registry("method", "methods", "methods", "fedrpc.methods.method:Method")
AGGREGATORS: Registry[Any] = Registry(
    "aggregator", "aggregators", "aggregation", "fedrpc.aggregation.aggregator:Aggregator"
)
MODELS: Registry[Any] = Registry("model", "models", "models", "torch.nn.modules.module:Module")
