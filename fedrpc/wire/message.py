"""Typed messages: dataclasses whose fields become parts, flattened to tensors and back by their annotations.

A field's type may be Tensor, int, float, bool, str, `dict[str, T]`, `dict[int, T]`, `list[T]` or `tuple[T, ...]` of
such types, another message, or any of these `| None`. The same two functions serve the wire and the checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import numbers
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrpc.errors import WireError
from fedrpc.wire.kinds import Kind

Tensors = dict[str, Tensor]

_SCALARS: dict[Any, tuple[Any, torch.dtype]] = {  # what a sender may give, and what travels
    int: (numbers.Integral, torch.int64),
    float: (numbers.Real, torch.float64),
    bool: ((bool, np.bool_), torch.int64),
}
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,99}")  # as `str` writes it: one name for one number
_MISSING = dataclasses.MISSING
_FIELDS: dict[type[Any], tuple[Field, ...]] = {}
_AVERAGED: dict[type[Any], dict[str, Callable[[Any], float]]] = {}


def part(
    kind: Kind,
    *,
    default: Any = _MISSING,
    averaged_by: str | Callable[[Any], float] | None = None,
    counts_examples: bool = False,
    by_epoch: bool = False,
) -> Any:
    """Declares a field of a message and what its bytes are booked under.

    Args:
        averaged_by: For a field of an answer, of type Tensors, that only counts in the mean over clients: the field
            with its weight, or a function of the answer that gives the weight.
        counts_examples: For numbers of an answer that count its client's training examples: the server refuses an
            answer in which they add up to more than the client can have.
        by_epoch: For numbers of an answer of which there is one for each epoch: the server refuses more.
    """
    metadata = {"kind": kind, "averaged_by": averaged_by, "counts_examples": counts_examples, "by_epoch": by_epoch}
    return dataclasses.field(metadata=metadata, **({} if default is _MISSING else {"default": default}))


@functools.cache
def counted_fields(cls: type) -> tuple[str, ...]:
    """The fields of an answer that count its client's training examples."""
    return tuple(item.name for item in dataclasses.fields(cls) if item.metadata.get("counts_examples"))


@functools.cache
def fields_by_epoch(cls: type) -> tuple[str, ...]:
    """The fields of an answer that have a number for each epoch."""
    return tuple(item.name for item in dataclasses.fields(cls) if item.metadata.get("by_epoch"))


def averaged_fields(cls: type[Any]) -> dict[str, Callable[[Any], float]]:
    """The fields of an answer that only count in the mean, with what gives the weight of one answer.

    Raises:
        TypeError: A weight is no field of the message, or the field is not of type Tensors.
    """
    if cls in _AVERAGED:
        return _AVERAGED[cls]
    hints, found = typing.get_type_hints(cls), {}
    for item in dataclasses.fields(cls):
        weight, inner = item.metadata.get("averaged_by"), strip_optional(hints[item.name])[0]
        if is_message(inner) and averaged_fields(inner):
            raise TypeError(f"{cls.__name__}.{item.name}: a nested message cannot have averaged fields")
        if weight is None:
            continue
        if inner != Tensors:
            raise TypeError(f"{cls.__name__}.{item.name} is averaged, so it must be of type Tensors")
        if isinstance(weight, str) and weight not in hints:
            raise TypeError(f"{cls.__name__}.{item.name} is averaged by '{weight}', which is no field of the message")
        found[item.name] = operator.attrgetter(weight) if isinstance(weight, str) else weight
    _AVERAGED[cls] = found
    return found


@dataclass(frozen=True)
class Field:
    """One leaf field of a message: where it is, what it is about, what it holds."""

    path: tuple[str, ...]
    kind: Kind | None
    hint: Any
    optionals: tuple[bool, ...]  # for each step of the path, whether it may be None

    @property
    def name(self) -> str:
        """The part's name on the wire."""
        return ".".join(self.path)

    @property
    def optional(self) -> bool:
        """Whether a message can be without this field."""
        return any(self.optionals)


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
            inner = fields(hint)
            if optional and all(sub.optional for sub in inner):
                raise TypeError(
                    f"{cls.__name__}.{item.name} with all its fields None could not be distinguished from None"
                )
            found += [
                dataclasses.replace(sub, path=(item.name, *sub.path), optionals=(optional, *sub.optionals))
                for sub in inner
            ]
        else:
            _check_type(hint)
            found.append(Field((item.name,), item.metadata.get("kind") or _infer_kind(hint), hint, (optional,)))
    return tuple(found)


def _check_type(hint: Any) -> None:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict and args[0] in (str, int):
        _check_type(args[1])
    elif origin is list or (origin is tuple and args[1:] == (...,)):
        _check_type(args[0])
    elif not (hint is Tensor or hint is str or hint in _SCALARS):
        raise TypeError(f"a message field cannot be of type {hint}; see fedrpc/wire/message.py for what can")


def _infer_kind(hint: Any) -> Kind | None:
    if hint in _SCALARS:
        return Kind.SCALARS
    return Kind.ENVELOPE if hint is str else None


def describe_scalar(hint: Any) -> dict[str, tuple[torch.dtype, tuple[int, ...]]] | None:
    """The layout of a field that holds one number; None for any other field, whose layout its type does not tell."""
    return {"": (_SCALARS[hint][1], ())} if hint in _SCALARS else None


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
        for depth, (name, optional) in enumerate(zip(field.path, field.optionals, strict=True), start=1):
            value = getattr(value, name)
            if value is None:
                if not optional:
                    where = ".".join([type(message).__name__, *field.path[:depth]])
                    raise WireError(f"{where} is None but its type does not allow that")
                break
        else:
            parts.append(FlatPart(field.name, field.kind, dict(_flatten(field.hint, value, ""))))
    return parts


def _flatten(hint: Any, value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if hint is Tensor:
        yield path, _to_plain_tensor(value, path)
    elif hint in _SCALARS:
        yield path, _to_scalar_tensor(hint, value, path)
    elif hint is str:
        if not isinstance(value, str):
            raise WireError(f"expected a str at '{path}', got {type(value).__name__}")
        yield path, torch.frombuffer(bytearray(value.encode() or b"\0"), dtype=torch.uint8)[: len(value.encode())]
    else:
        inner, items = _list_children(hint, value)
        if not items:
            # An empty container has no tensor of its own: a marker keeps it apart from None.
            yield _join(path, ""), torch.empty(0, dtype=torch.uint8)
        for key, item in items:
            yield from _flatten(inner, item, _join(path, key))


def _to_plain_tensor(value: Any, path: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise WireError(f"expected a tensor at '{path}', got {type(value).__name__}")
    if value.layout != torch.strided:
        raise WireError(f"tensor '{path}' is {value.layout}, which cannot be sent; make it dense first")
    # `conj` and `neg` bits are lazy views whose raw memory is not their value.
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _to_scalar_tensor(hint: Any, value: Any, path: str) -> Tensor:
    given, dtype = _SCALARS[hint]
    if not isinstance(value, given) or (hint is int and not -(2**63) <= int(value) < 2**63):
        raise WireError(f"expected a {hint.__name__} of 64 bits at '{path}', got {type(value).__name__} {value!r:.40}")
    return torch.tensor(hint(value), dtype=dtype)


def _list_children(hint: Any, value: Any) -> tuple[Any, list[tuple[str, Any]]]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    wanted: Any = Mapping if origin is dict else (list, tuple)
    if not isinstance(value, wanted):
        raise WireError(f"expected a {hint}, got {type(value).__name__}")
    if origin is dict:
        return args[1], [(_format_segment(args[0], key), item) for key, item in value.items()]
    return args[0], [(str(index), item) for index, item in enumerate(value)]


def _format_segment(hint: Any, key: Any) -> str:
    if not isinstance(key, numbers.Integral if hint is int else str):
        raise WireError(f"expected a name of type {hint.__name__}, got {key!r:.40}")
    text = str(int(key)) if hint is int else str(key)
    if "/" in text or not text:
        raise WireError(f"a name on the wire cannot be empty or contain '/', got {text!r}")
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


@functools.cache
def _read_layout(cls: type) -> tuple[tuple[str, Any, bool], ...]:
    """Name, type and whether it may be None of each field; reading annotations costs more than a small message."""
    hints = typing.get_type_hints(cls)
    return tuple((item.name, *strip_optional(hints[item.name])) for item in dataclasses.fields(cls))


def _build(cls: type, prefix: str, parts: Mapping[str, Tensors]) -> Any:
    values = {}
    for own, hint, optional in _read_layout(cls):
        name = prefix + own
        if is_message(hint):
            present = any(key.startswith(name + ".") for key in parts)
            values[own] = _build(hint, name + ".", parts) if present or not optional else None
        elif name in parts:
            values[own] = _unflatten(hint, parts[name], name)
        elif optional:
            values[own] = None
        else:
            raise WireError(f"part '{name}' of {cls.__name__} is missing")
    try:
        return cls(**values)
    except Exception as error:
        raise WireError(f"{cls.__name__} does not take what came: {error}") from error


def _unflatten(hint: Any, tensors: Tensors, name: str) -> Any:
    if hint is Tensor or hint in _SCALARS or hint is str:
        if list(tensors) != [""]:
            raise WireError(f"part '{name}' should be one {getattr(hint, '__name__', hint)}, got {list(tensors)[:4]}")
        return _read_leaf(hint, tensors[""], name)
    grouped = {} if list(tensors) == ["/"] and not tensors["/"].numel() else _group_by_segment(tensors, name)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    inner = args[1] if origin is dict else args[0]
    if origin is dict:
        return {_parse_key(args[0], key, name): _unflatten(inner, sub, name) for key, sub in grouped.items()}
    if set(grouped) != {str(index) for index in range(len(grouped))}:
        raise WireError(f"part '{name}' does not number the items of a {hint}: {list(grouped)[:4]}")
    return origin([_unflatten(inner, grouped[str(index)], name) for index in range(len(grouped))])


def _group_by_segment(tensors: Tensors, name: str) -> dict[str, Tensors]:
    """Tensors by the first segment of their paths."""
    grouped: dict[str, Tensors] = {}
    for path, tensor in tensors.items():
        head, slash, rest = path.partition("/")
        if not head:
            raise WireError(f"part '{name}' has a tensor without a name: '{path}'")
        grouped.setdefault(head, {})[rest or slash] = tensor
    if not grouped:
        raise WireError(f"part '{name}' has no tensor")
    return grouped


def _parse_key(hint: Any, text: str, name: str) -> Any:
    if hint is int and not _INTEGER.fullmatch(text):
        raise WireError(f"part '{name}' has the name '{text[:40]}', which is not a whole number")
    return hint(text)


def _read_leaf(hint: Any, tensor: Tensor, name: str) -> Any:
    if hint is Tensor:
        return tensor
    dtype, dims = (torch.uint8, 1) if hint is str else (_SCALARS[hint][1], 0)
    if tensor.dtype != dtype or tensor.dim() != dims:
        raise WireError(f"part '{name}' should be a {hint.__name__}, got {tensor.dtype} {tuple(tensor.shape)}")
    if hint is str:
        try:
            return tensor.numpy().tobytes().decode()
        except UnicodeDecodeError as error:
            raise WireError(f"part '{name}' is not text: {error}") from None
    value = tensor.item()
    if hint is bool and value not in (0, 1):
        raise WireError(f"part '{name}' should be 0 or 1, got {value}")
    return hint(value)
