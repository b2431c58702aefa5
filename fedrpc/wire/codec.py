"""Encodes messages as bytes and decodes them: flat little-endian buffers, no pickle, every dtype exact."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedrpc.errors import Diverged, WireError
from fedrpc.wire.kinds import DTYPE_NUMBERS, DTYPES, Kind
from fedrpc.wire.message import FlatPart, Tensors, describe_scalar, fields, flatten, unflatten
from fedrpc.wire.v2 import coordinator_pb2 as pb

assert sys.byteorder == "little", "the wire is little-endian and buffers travel as they lie in memory"

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of each tensor of a part, by path

# Headers are looked at on the event loop, before anything else is known of a message: what they may cost has a bound.
MAX_PARTS = 1000  # a part is a field of a message's dataclass
MAX_TENSORS = 1 << 16  # in a message
MAX_DIMENSIONS = 64  # as in torch
MAX_NAME = 1000  # characters of a part's name or of a tensor's path


@dataclass(frozen=True)
class Payload:
    """An encoded message: a header for each part and views of the bytes, which are not copied.

    Args:
        parts: The headers.
        buffers: For each part the pieces of memory that make it up, in wire order.
        digest: SHA-256 over headers and bytes: the message's identity.
    """

    parts: tuple[pb.Part, ...]
    buffers: tuple[tuple[memoryview, ...], ...]
    digest: bytes

    @property
    def size_bytes(self) -> int:
        """Tensor bytes of all parts."""
        return sum(part.size for part in self.parts)

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kind of each part, by the part's name."""
        return {part.name: Kind(part.kind) for part in self.parts}


def encode(message: Any, *, finite: bool = False) -> Payload:
    """Encodes a typed message as headers and buffers; a tensor that is contiguous on the CPU is not copied.

    Args:
        finite: Raise Diverged when a part other than scalars has NaN or infinity.
    """
    parts, buffers = [], []
    hasher = hashlib.sha256()
    flattened = flatten(message)
    _check_counts(len(flattened), sum(len(flat.tensors) for flat in flattened))
    for flat in flattened:
        if finite and flat.kind != Kind.SCALARS:
            check_finite(flat.name, flat.tensors)
        header, views = _encode_part(flat)
        hasher.update(header.SerializeToString(deterministic=True))
        for view in views:
            hasher.update(view)
        parts.append(header)
        buffers.append(views)
    return Payload(tuple(parts), tuple(buffers), hasher.digest())


def _encode_part(flat: FlatPart) -> tuple[pb.Part, tuple[memoryview, ...]]:
    if flat.kind is None:
        raise WireError(f"part '{flat.name}' has no kind; declare it as `= part(Kind....)`")
    views = tuple(_view_bytes(tensor) for tensor in _sort_by_width(list(flat.tensors.values())) if tensor.numel())
    specs = [_build_spec(path, tensor) for path, tensor in flat.tensors.items()]
    size = sum(view.nbytes for view in views)
    header = pb.Part(name=flat.name, kind=pb.Kind.ValueType(flat.kind), codec=pb.CODEC_RAW, size=size, tensors=specs)
    return header, views


def _sort_by_width(tensors: Sequence[Tensor]) -> list[Tensor]:
    # Widest elements first keeps every tensor aligned without padding; the sort is stable.
    return sorted(tensors, key=lambda tensor: -tensor.element_size())


def _view_bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _build_spec(path: str, tensor: Tensor) -> pb.TensorSpec:
    if tensor.dtype not in DTYPE_NUMBERS:
        raise WireError(f"tensor '{path}' has dtype {tensor.dtype}, which cannot be sent; cast it first")
    if len(path) > MAX_NAME:
        raise WireError(
            f"the tensor '{path[:60]}...' has a path of {len(path)} characters, expected {MAX_NAME} at most"
        )
    return pb.TensorSpec(path=path, dtype=pb.DType.ValueType(DTYPE_NUMBERS[tensor.dtype]), shape=list(tensor.shape))


def check_headers(parts: Sequence[pb.Part]) -> None:
    """Raises WireError unless the received headers of a message are consistent, and few and small enough."""
    _check_counts(len(parts), sum(len(part.tensors) for part in parts[:MAX_PARTS]))
    for part in parts:
        check_header(part)


def _check_counts(num_parts: int, num_tensors: int) -> None:
    if num_parts > MAX_PARTS:
        raise WireError(f"a message has {num_parts} parts, expected {MAX_PARTS} at most")
    if num_tensors > MAX_TENSORS:
        raise WireError(f"a message has {num_tensors} tensors, expected {MAX_TENSORS} at most; stack them to fewer")


def check_header(part: pb.Part) -> None:
    """Raises WireError unless a received header is consistent and of a known codec, kind and dtypes."""
    if len(part.name) > MAX_NAME:
        raise WireError(f"a part's name has {len(part.name)} characters, expected {MAX_NAME} at most")
    if part.codec != pb.CODEC_RAW:
        raise WireError(f"part '{part.name}' has codec {part.codec}; this side knows {pb.CODEC_RAW} (raw)")
    if part.kind not in Kind._value2member_map_:
        raise WireError(f"part '{part.name}' has kind number {part.kind}, which this side does not know")
    total = 0
    for spec in part.tensors:
        total += _count_bytes(part.name, spec)
        if total > part.size:
            break
    if total != part.size:
        taken = total if total < 2**63 else "far more"
        raise WireError(f"part '{part.name}' says {part.size} bytes but its tensors take {taken}")


def _count_bytes(part: str, spec: pb.TensorSpec) -> int:
    if len(spec.path) > MAX_NAME:
        raise WireError(f"part '{part}': a tensor's path has {len(spec.path)} characters, expected {MAX_NAME} at most")
    where = f"part '{part}', tensor '{spec.path}'"
    if spec.dtype not in DTYPES:
        raise WireError(f"{where}: unknown dtype number {spec.dtype}")
    if len(spec.shape) > MAX_DIMENSIONS:
        raise WireError(f"{where} has {len(spec.shape)} dimensions, expected {MAX_DIMENSIONS} at most")
    if any(length >= 2**63 for length in spec.shape):
        raise WireError(f"{where}: no tensor has the shape {list(spec.shape)}")
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize


def check_answer_headers(cls: type, parts: Sequence[pb.Part], layouts: Mapping[str, Layout]) -> None:
    """Raises WireError when consistent headers cannot be those of a message of type `cls`.

    Args:
        layouts: The layouts that are known in advance, by part.
    """
    known = {field.name: field for field in fields(cls)}
    seen: set[str] = set()
    for part in parts:
        field = known.get(part.name)
        if field is None:
            raise WireError(f"{cls.__name__} has no part '{part.name}'; expected {', '.join(sorted(known))}")
        if part.name in seen:
            raise WireError(f"part '{part.name}' was received twice")
        seen.add(part.name)
        _check_kind(part, field.kind)
        expected = layouts[part.name] if part.name in layouts else describe_scalar(field.hint)
        if expected is not None:
            check_same_layout(part.name, expected, read_layout([part], part.name))


def check_same_layout(name: str, expected: Layout, got: Layout) -> None:
    """Raises WireError when a part's tensors have not the names, shapes and dtypes that are expected."""
    for path in [*expected, *got]:
        if expected.get(path) != got.get(path):
            raise WireError(f"'{name}' tensor '{path}': expected {expected.get(path)}, got {got.get(path)}")


def _check_kind(part: pb.Part, expected: Kind | None) -> None:
    if expected != Kind(part.kind):
        wanted = expected and expected.name
        raise WireError(f"part '{part.name}' has kind {pb.Kind.Name(part.kind)}, expected {wanted}")


def read_layout(parts: Iterable[pb.Part], name: str) -> Layout:
    """Reads the dtype and shape of each tensor in the part of that name, by the tensor's path."""
    specs = [spec for part in parts if part.name == name for spec in part.tensors]
    return {spec.path: (DTYPES[spec.dtype], tuple(spec.shape)) for spec in specs}


def check_finite(name: str, tensors: Tensors) -> None:
    """Raises Diverged when a part has NaN or infinity."""
    for path, tensor in tensors.items():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        # NaN and infinity always reach the sum, which is quicker by far; a sum that overflows is looked at closely.
        small = tensor.dtype.itemsize < 2  # float8 has no sum
        if (small or not bool(torch.isfinite(tensor.sum()))) and not bool(torch.isfinite(tensor).all()):
            raise Diverged(f"'{name}' tensor '{path}' has NaN or infinity: training diverged")


def decode(cls: type, parts: Sequence[pb.Part], buffers: Sequence[memoryview]) -> Any:
    """Decodes a message of type `cls`; its tensors share the buffers' memory."""
    return unflatten(cls, decode_parts(cls, parts, buffers))


def decode_parts(cls: type, parts: Sequence[pb.Part], buffers: Sequence[memoryview]) -> dict[str, Tensors]:
    """Decodes each part to named tensors, without building the message."""
    kinds = {field.name: field.kind for field in fields(cls)}
    flat: dict[str, Tensors] = {}
    for header, buffer in zip(parts, buffers, strict=True):
        check_header(header)
        if header.name in flat:
            raise WireError(f"part '{header.name}' was received twice")
        if header.name in kinds:
            _check_kind(header, kinds[header.name])
        flat[header.name] = _decode_part(header, buffer)
    return flat


def _decode_part(header: pb.Part, buffer: memoryview) -> Tensors:
    if buffer.nbytes != header.size:
        raise WireError(f"part '{header.name}' has {buffer.nbytes} bytes, its header says {header.size}")
    offsets, offset = {}, 0
    widths = [DTYPES[spec.dtype].itemsize for spec in header.tensors]
    for index in sorted(range(len(widths)), key=lambda i: -widths[i]):
        offsets[index] = offset
        offset += math.prod(header.tensors[index].shape) * widths[index]
    tensors: Tensors = {}
    for index, spec in enumerate(header.tensors):
        if spec.path in tensors:
            raise WireError(f"part '{header.name}' has tensor '{spec.path}' twice")
        count, dtype = math.prod(spec.shape), DTYPES[spec.dtype]
        plain = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offsets[index]) if count else None
        tensors[spec.path] = (torch.empty(0, dtype=dtype) if plain is None else plain).reshape(tuple(spec.shape))
    return tensors


def count_tensor_bytes(message: Any) -> dict[Kind, int]:
    """Counts the tensor bytes of a message by kind, without encoding it; cost formulas are compared with these."""
    sizes: dict[Kind, int] = {}
    for flat in flatten(message):
        assert flat.kind is not None
        size = sum(tensor.numel() * tensor.element_size() for tensor in flat.tensors.values())
        sizes[flat.kind] = sizes.get(flat.kind, 0) + size
    return sizes
