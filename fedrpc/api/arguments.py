"""Reads the arguments of `fedrpc.run`, `fedrpc.compare` and `fedrpc.load` that are no settings, or refuses them.

Each raises ConfigError, which names the argument.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedrpc.errors import ConfigError
from fedrpc.methods.method import Method

StrPath = str | Path
_SHOWN = 80  # characters of a wrong value in a message


def refuse(name: str, expected: str, got: object) -> ConfigError:
    """The error for an argument that cannot be read, in one line."""
    shown = " ".join(repr(got).split())
    return ConfigError(f"{name}: expected {expected}, got {shown if len(shown) <= _SHOWN else f'{shown[:_SHOWN]}...'}")


def read_path(name: str, value: Any) -> Path:
    """A path, with its ~ resolved."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise refuse(name, "a path", value)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise refuse(name, "a path in the folder of a user of this machine", value) from None


def read_optional_path(name: str, value: Any) -> Path | None:
    """The same, or None."""
    return None if value is None else read_path(name, value)


def read_text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise refuse(name, "a string", value)
    return value


def read_count(name: str, value: Any) -> int | None:
    """A whole number of 1 or more, also one of numpy's; or None."""
    if value is None:
        return None
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if count < 1 or isinstance(value, bool):
        raise refuse(name, "a whole number of 1 or more", value)
    return count


def read_method(value: Any) -> str | type[Method[Any, Any]] | None:
    """A method's name, the path of its file, or its class."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, type) and issubclass(value, Method) and isinstance(getattr(value, "name", None), str):
        return value
    if isinstance(value, os.PathLike):
        return str(read_path("method", value))
    expected = "a method's name, the path of its file, or a class that derives from Method and has a name"
    raise refuse("method", expected, value)


def read_names(name: str, value: Any) -> list[str]:
    """One or several names, or paths of files."""
    if isinstance(value, str | os.PathLike):
        return [os.fspath(value)]
    found = list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(each, str | os.PathLike) for each in found):
        raise refuse(name, "names, or paths of files, in a list", value)
    return [os.fspath(each) for each in found]


def write_seeds(value: Any) -> str:
    """Seeds as the command line has them."""
    if value is None or isinstance(value, str):
        return value or ""
    expected = 'whole numbers such as range(5), [0, 3, 7] or "0-4"'
    if isinstance(value, bytes):
        raise refuse("seeds", expected, value)
    try:
        return ",".join(str(operator.index(each)) for each in value)
    except TypeError:
        raise refuse("seeds", expected, value) from None


def write_grid(value: Any) -> list[str]:
    """A grid as the command line has it."""
    expected = 'a mapping from settings to lists of values such as {"params.mu": [0.1, 1]}'
    if not isinstance(value, Mapping):
        raise refuse("grid", expected, value)
    try:
        return [f"{key}={','.join(json.dumps(each) for each in _list_values(axis))}" for key, axis in value.items()]
    except (TypeError, ValueError):  # not a list, or of values that no setting has
        raise refuse("grid", expected, value) from None


def _list_values(axis: Any) -> list[Any]:
    """The values of an axis, numpy's as Python's own; raises TypeError if it is a single value."""
    if isinstance(axis, str | bytes | Mapping):
        raise TypeError
    return [each.item() if hasattr(each, "item") else each for each in axis]


def read_targets(value: Any) -> list[float]:
    """One or several accuracies."""
    found = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    try:
        targets = [float(operator.pos(each)) for each in found]  # a string has no sign
    except (TypeError, ValueError, OverflowError):
        targets = [math.nan]
    if not all(0 <= target <= 100 for target in targets):
        raise refuse("target", "an accuracy in percent, or a list of them", value)
    return targets
