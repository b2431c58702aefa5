"""Message classes and Hypothesis strategies that the wire's tests share, and exact comparison of messages."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fedrpc.errors import WireError
from fedrpc.wire.codec import decode, encode
from fedrpc.wire.frames import (
    Assembler,
    parse,
    parse_file,
    read_chunk,
    read_file,
    serialise_body,
    serialise_chunks,
    serialise_frame,
)
from fedrpc.wire.kinds import DTYPES, Kind
from fedrpc.wire.message import Tensors, is_message, part, strip_optional
from fedrpc.wire.v2 import coordinator_pb2 as pb

MAX_BYTES = 1 << 24
SESSION = 7


@dataclass(frozen=True)
class Inner:
    features: Tensor = part(Kind.ACTIVATIONS)
    labels: Tensor = part(Kind.ACTIVATIONS)


@dataclass(frozen=True)
class Everything:
    """One field of every type that a message may have."""

    weights: Tensors = part(Kind.WEIGHTS)
    by_class: dict[int, list[Tensor]] = part(Kind.MOMENTS)
    pair: tuple[Tensor, ...] = part(Kind.IMAGES)
    rates: dict[str, float] = part(Kind.SCALARS)
    count: int
    loss: float
    last: bool
    note: str
    inner: Inner
    buffer: Inner | None
    means: Tensor | None = part(Kind.LATENT_MEANS)


@dataclass(frozen=True)
class One:
    value: Tensor = part(Kind.WEIGHTS)


def everything(**changes: Any) -> Everything:
    """A fixed, whole example."""
    plain = Everything(
        weights={
            "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
            "a.count": torch.tensor(7, dtype=torch.int64),
            "b": torch.tensor([True, False]),
            "c": torch.linspace(0, 1, 5, dtype=torch.bfloat16),
        },
        by_class={-3: [], 12: [torch.ones(2, dtype=torch.float64), torch.empty(0, 4)]},
        pair=(torch.full((2,), 1j, dtype=torch.complex64), torch.tensor([], dtype=torch.int8)),
        rates={"x": 0.1, "y": math.inf},
        count=-(2**63),
        loss=1e-300,
        last=True,
        note="ein Wort: \N{SNOWMAN}",
        inner=Inner(torch.ones(3, 2), torch.tensor([1, 2, 3])),
        buffer=None,
        means=None,
    )
    return dataclasses.replace(plain, **changes)


def envelope_of(payload: Any, **values: Any) -> pb.Envelope:
    """An envelope that announces a payload."""
    settings = {"attempt": 0} | values
    return pb.Envelope(task_id="t", phase="fit", parts=payload.parts, digest=payload.digest, **settings)


def frames_of(message: Any) -> list[bytes]:
    """A message as it crosses the wire when it is large, however small it is."""
    payload = encode(message)
    body = dataclasses.replace(serialise_body(payload), chunks=b"")
    head = serialise_frame(SESSION, pb.Envelope(task_id="t", phase="fit"), body)
    return [head, *(data for _, _, data in serialise_chunks(payload))]


def frame_of(message: Any) -> bytes:
    """A small message as it crosses the wire: all of it in one frame."""
    return serialise_frame(SESSION, pb.Envelope(task_id="t", phase="fit"), serialise_body(encode(message)))


def message_of(cls: type, frames: list[bytes], max_bytes: int = MAX_BYTES) -> Any:
    """What the receiver makes of such frames: a message, or WireError."""
    if not frames:
        raise WireError("got no frame")
    first = parse(pb.Frame, frames[0])
    if not first.HasField("envelope"):
        raise WireError("the first frame has no envelope")
    assembler = Assembler(first.envelope, max_bytes)
    for inline in first.chunks:
        assembler.add(inline.part, inline.data)
    for data in frames[1:]:
        chunk = read_chunk(data)
        if chunk is None:
            raise WireError("a frame is no chunk")
        assembler.add(*chunk)
    return decode(cls, first.envelope.parts, assembler.finish())


def raw(tensor: Tensor) -> bytes:
    """A tensor's elements as they lie in memory."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: Any, two: Any) -> bool:
    """Equal in type, structure, order, dtype, shape and every bit (any NaN scalar equals any other)."""
    if type(one) is not type(two) and not (isinstance(one, Tensor) and isinstance(two, Tensor)):
        return False
    if isinstance(one, Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and raw(one) == raw(two)
    if is_message(type(one)):
        return all(same(getattr(one, f.name), getattr(two, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(two)
    return bool(one == two)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, any small shape, any bits: NaN payloads and negative zeros included."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    bits = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        bits = bytes(byte & 1 for byte in bits)
    return torch.frombuffer(bytearray(bits or b"\0"), dtype=torch.uint8)[:size].view(dtype).reshape(shape)


LEAVES: list[Any] = [Tensor, int, float, bool, str]
HINTS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        inner.map(lambda hint: dict[str, hint]),
        inner.map(lambda hint: dict[int, hint]),
        inner.map(lambda hint: list[hint]),
        inner.map(lambda hint: tuple[hint, ...]),
    ),
    max_leaves=3,
)


@st.composite
def classes(draw: st.DrawFn, depth: int = 1) -> type:
    """A random message class: leaves, containers of containers, optionals, nested messages."""
    found: list[Any] = []
    for index in range(draw(st.integers(1, 3))):
        nested = depth and draw(st.booleans())
        hint = draw(classes(depth=depth - 1)) if nested else draw(HINTS)
        if draw(st.booleans()) and not (nested and _only_optional(hint)):
            hint = hint | None
        declared = dataclasses.field(metadata={} if nested else {"kind": draw(st.sampled_from(list(Kind)))})
        found.append((f"f{index}", hint, declared))
    return dataclasses.make_dataclass("Random", found, frozen=True)


def kept_message(cls: type, kept: Path | bytes) -> Any:
    """The message of a kept answer."""
    envelope, views = read_file(kept) if isinstance(kept, Path) else parse_file(memoryview(bytearray(kept)), "kept")
    return decode(cls, envelope.parts, views)


def _only_optional(cls: type) -> bool:
    return all(strip_optional(field.type)[1] for field in dataclasses.fields(cls))


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a message field's type."""
    hint, optional = strip_optional(hint)
    if optional:
        return st.none() | values(hint)
    if is_message(hint):
        return st.builds(hint, **{field.name: values(field.type) for field in dataclasses.fields(hint)})
    leaf = {
        Tensor: tensors(),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(),
        bool: st.booleans(),
        str: st.text(max_size=8),
    }
    if hint in leaf:
        return leaf[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        keys = st.integers() if args[0] is int else st.text(st.characters(exclude_characters="/"), min_size=1)
        return st.dictionaries(keys, values(args[1]), max_size=3)
    items = st.lists(values(args[0]), max_size=3)
    return items if origin is list else items.map(tuple)


messages = classes().flatmap(lambda cls: values(cls))
