"""Typed messages: dataclasses whose fields become parts, flattened to tensors and back by their annotations.

A field's type may be Tensor, int, float, bool, str, another message, `dict[str | int, T]`, `list[T]`,
`tuple[T, ...]`, or `T | None`. The same two functions serve the wire and the checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedrpc.errors import WireError
from fedrpc.wire.kinds import Kind

Tensors = dict[str, Tensor]

_SCALARS = (int, float, bool)
_MISSING = dataclasses.MISSING
_FIELDS: dict[type[Any], tuple[Field, ...]] = {}


def part(kind: Kind, *, default: Any = _MISSING) -> Any:
    """Declares a field of a message and what its bytes are booked under."""
    return dataclasses.field(metadata={"kind": kind}, **({} if default is _MISSING else {"default": default}))


@dataclass(frozen=True)
class Field:
    """One leaf field of a message: where it is, what it is about, what it holds."""

    path: tuple[str, ...]
    kind: Kind | None
    hint: Any
    optional: bool

    @property
    def name(self) -> str:
        """The part's name on the wire."""
        return ".".join(self.path)


@dataclass(frozen=True)
class FlatPart:
    """A field's value as named tensors, in the order of the value."""

    name: str
    kind: Kind | None
    tensors: Tensors


def strip_optional(hint: Any) -> tuple[Any, bool]:
    """`T | None` -> (T, True); anything else -> (itself, False)."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(inner) != 1:
            raise TypeError(f"a message field can be 'T | None' but no other union, got {hint}")
        return inner[0], True
    return hint, False


def is_message(hint: Any) -> bool:
    """Whether a type is a dataclass, hence a message of its own."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def fields(cls: type[Any]) -> tuple[Field, ...]:
    """The leaf fields of a message class; nested messages are spliced in."""
    if cls not in _FIELDS:
        _FIELDS[cls] = _find_fields(cls)
    return _FIELDS[cls]


def _find_fields(cls: type[Any]) -> tuple[Field, ...]:
    if not is_message(cls):
        raise TypeError(f"{cls!r} is not a message: make it a dataclass")
    hints = typing.get_type_hints(cls)
    found: list[Field] = []
    for item in dataclasses.fields(cls):
        hint, optional = strip_optional(hints[item.name])
        if is_message(hint):
            found += [
                dataclasses.replace(sub, path=(item.name, *sub.path), optional=sub.optional or optional)
                for sub in fields(hint)
            ]
        else:
            found.append(Field((item.name,), item.metadata.get("kind") or _default_kind(hint), hint, optional))
    return tuple(found)


def _default_kind(hint: Any) -> Kind | None:
    if hint in _SCALARS:
        return Kind.SCALARS
    return Kind.ENVELOPE if hint is str else None


def check_message(cls: type) -> None:
    """Raises TypeError unless every field of a message says what it is about."""
    for field in fields(cls):
        if field.kind is None:
            raise TypeError(f"{cls.__name__}.{field.name} has no kind; declare it as `= part(Kind....)`")


def schema_text(cls: type) -> str:
    """A canonical text of a message's layout; equal texts can talk to each other."""
    rows = [f"{f.name}:{f.kind.label if f.kind else '-'}:{f.hint}:{f.optional}" for f in fields(cls)]
    return f"{cls.__name__}({';'.join(rows)})"


def schema_digest(*classes: type) -> bytes:
    """SHA-256 over several messages' layouts."""
    return hashlib.sha256("\n".join(schema_text(cls) for cls in classes).encode()).digest()


def flatten(message: Any) -> list[FlatPart]:
    """A message as parts of named CPU tensors; fields that are None are left out."""
    parts = []
    for field in fields(type(message)):
        value: Any = message
        for name in field.path:
            value = getattr(value, name) if value is not None else None
        if value is None:
            if not field.optional:
                raise WireError(f"{type(message).__name__}.{field.name} is None but its type does not allow that")
            continue
        parts.append(FlatPart(field.name, field.kind, dict(_flatten(field.hint, value, ""))))
    return parts


def _flatten(hint: Any, value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if hint is Tensor:
        yield path, _plain(value, path)
    elif hint in _SCALARS:
        yield path, torch.tensor(value, dtype=torch.float64 if hint is float else torch.int64)
    elif hint is str:
        yield path, torch.frombuffer(bytearray(value.encode() or b"\0"), dtype=torch.uint8)[: len(value.encode())]
    else:
        inner, items = _children(hint, value)
        if not items:
            # An empty container has no tensor of its own: a marker keeps it apart from None.
            yield _join(path, ""), torch.empty(0, dtype=torch.uint8)
        for key, item in items:
            yield from _flatten(inner, item, _join(path, key))


def _plain(value: Any, path: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise WireError(f"expected a tensor at '{path}', got {type(value).__name__}")
    # `conj` and `neg` bits are lazy views whose raw memory is not their value.
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _children(hint: Any, value: Any) -> tuple[Any, list[tuple[str, Any]]]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict and args[0] in (str, int):
        return args[1], [(_segment(key), item) for key, item in value.items()]
    if origin in (list, tuple) and (origin is list or args[1:] == (...,)):
        return args[0], [(str(index), item) for index, item in enumerate(value)]
    raise TypeError(f"a message field can not be of type {hint}; see fedrpc/wire/message.py for what can")


def _segment(key: Any) -> str:
    text = str(key)
    if "/" in text or not text:
        raise WireError(f"a name on the wire can not be empty or have '/', got {text!r}")
    return text


def _join(path: str, segment: str) -> str:
    return f"{path}/{segment}" if path else (segment or "/")


def unflatten(cls: type, parts: Mapping[str, Tensors]) -> Any:
    """The message that `flatten` was given; raises WireError on missing, unknown or misshapen parts."""
    known = {field.name for field in fields(cls)}
    unknown = sorted(set(parts) - known)
    if unknown:
        raise WireError(f"{cls.__name__} has no part {', '.join(unknown)}; expected {', '.join(sorted(known))}")
    return _build(cls, "", parts)


def _build(cls: type, prefix: str, parts: Mapping[str, Tensors]) -> Any:
    hints = typing.get_type_hints(cls)
    values = {}
    for item in dataclasses.fields(cls):
        name = prefix + item.name
        hint, optional = strip_optional(hints[item.name])
        if is_message(hint):
            present = any(key.startswith(name + ".") for key in parts)
            values[item.name] = _build(hint, name + ".", parts) if present or not optional else None
        elif name in parts:
            values[item.name] = _unflatten(hint, parts[name], name)
        elif optional:
            values[item.name] = None
        else:
            raise WireError(f"part '{name}' of {cls.__name__} is missing")
    return cls(**values)


def _unflatten(hint: Any, tensors: Tensors, name: str) -> Any:
    if hint is Tensor or hint in _SCALARS or hint is str:
        if list(tensors) != [""]:
            raise WireError(f"part '{name}' should be one {getattr(hint, '__name__', hint)}, got {list(tensors)[:4]}")
        return _leaf(hint, tensors[""], name)
    grouped: dict[str, Tensors] = {}
    for path, tensor in tensors.items():
        if path != "/":
            head, _, rest = path.partition("/")
            if head:
                grouped.setdefault(head, {})[rest if rest or not path.endswith("/") else "/"] = tensor
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    try:
        built = {key: _unflatten(args[0] if origin is not dict else args[1], sub, name) for key, sub in grouped.items()}
        if origin is dict:
            return {args[0](key): item for key, item in built.items()}
        return origin([built[str(index)] for index in range(len(built))])
    except (KeyError, ValueError, TypeError) as error:
        raise WireError(f"part '{name}' does not hold a {hint}: {error}") from None


def _leaf(hint: Any, tensor: Tensor, name: str) -> Any:
    if hint is Tensor:
        return tensor
    if hint is str:
        return tensor.numpy().tobytes().decode(errors="replace")
    if tensor.dim() != 0:
        raise WireError(f"part '{name}' should be a scalar, got shape {tuple(tensor.shape)}")
    return hint(tensor.item())
