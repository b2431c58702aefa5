"""Makes malformed messages out of real ones, by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fedrpc.wire.sealing import seal
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.altered import reseal

NUMBERS = (0, 1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63))
TEXTS = ("", "\0", "../x", "/etc/passwd", "fit", "x" * 200, "\x1b[2J", "٣", "{", "[[[[", "null")
_INTEGERS = {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32}
_NUM_ADDED = 3


def break_bytes(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Does to a message what a bad line could do."""
    spot = rng.randrange(len(data) + 1)
    match rng.randrange(6):
        case 0 if data:
            spot = rng.randrange(len(data))
            return data[:spot] + bytes([data[spot] ^ rng.randrange(1, 256)]) + data[spot + 1 :]
        case 1:
            return data[:spot]
        case 2:
            return data[:spot] + rng.randbytes(rng.randrange(1, 20)) + data[spot:]
        case 3:
            return data[:spot] + rng.choice(others)[spot:]
        case 4:
            return data + rng.choice(others)
        case _:
            return rng.randbytes(rng.randrange(60))


def tell_lies(data: bytes, kind: Callable[[bytes], Message], rng: random.Random) -> Message:
    """Changes some fields of a message to what a bad peer could say; it can still be parsed."""
    message = kind(data)
    for _ in range(rng.randint(1, 3)):
        _change(message, rng)
    return message


def _change(message: Message, rng: random.Random) -> None:
    field = rng.choice(message.DESCRIPTOR.fields)
    if field.message_type is not None and rng.random() < 0.9:
        inner = getattr(message, field.name)
        if not field.is_repeated:
            _change(inner, rng)
        elif inner:
            _change(rng.choice(inner), rng)
        return
    match rng.randrange(3):
        case 0:
            message.ClearField(field.name)
        case 1 if field.is_repeated:
            _add(message, field, rng)
        case _ if not field.is_repeated and field.message_type is None:
            setattr(message, field.name, _draw(field, rng))


def _add(message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    values = getattr(message, field.name)
    for _ in range(rng.randint(1, _NUM_ADDED)):
        if field.message_type is not None:
            values.add().CopyFrom(rng.choice(values) if values else values.add())
        else:
            values.append(_draw(field, rng))


def _draw(field: FieldDescriptor, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return (
            rng.choice(TEXTS) if field.type == FieldDescriptor.TYPE_STRING else rng.randbytes(rng.choice([0, 16, 32]))
        )
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice((0.0, -1.0, 1e38, float("inf"), float("nan")))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((0, 1, 5, 77))
    signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    bits = 32 if kind in _INTEGERS else 64
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return rng.choice([number for number in NUMBERS if least <= number <= most])


def draw_frame(real: Sequence[bytes], session: int, rng: random.Random) -> bytes:
    """A malformed frame: mostly one that a stream survives, since it is of the right session."""
    data = rng.choice(real)
    if rng.random() < 0.003:
        return break_bytes(data, real, rng)
    frame = tell_lies(data, pb.Frame.FromString, rng)
    assert isinstance(frame, pb.Frame)
    if rng.random() < 0.998:
        frame.session = session
        frame.ClearField("attach")
    return reseal(frame)


def draw_join(real: Sequence[bytes], rng: random.Random) -> bytes:
    """A malformed Join."""
    data = rng.choice(real)
    if rng.random() < 0.5:
        return break_bytes(data, real, rng)
    return seal(tell_lies(data, pb.JoinRequest.FromString, rng).SerializeToString())
