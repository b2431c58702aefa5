"""Messages that somebody changed on their way: every field in turn, found by protobuf's own descriptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fedrpc.wire.frames import _skip_chunks, read_chunk
from fedrpc.wire.sealing import make_seal
from fedrpc.wire.v2 import coordinator_pb2 as pb

M = TypeVar("M", bound=Message)
_HASH = "hash"
_TEXTS = {FieldDescriptor.TYPE_STRING: "one", FieldDescriptor.TYPE_BYTES: b"one"}


def reseal(frame: pb.Frame) -> bytes:
    """Serialises a frame that was changed since it was sealed, or never was; a lone chunk goes without a seal."""
    chunks, rest = _split(frame)
    rest.ClearField(_HASH)
    data = chunks + rest.SerializeToString()
    return data if read_chunk(data) else data + make_seal(memoryview(data)[_skip_chunks(data) :])


def serialise_altered(frame: pb.Frame) -> bytes:
    """Serialises a changed frame with the hash that `reseal` gave it before."""
    chunks, rest = _split(frame)
    return chunks + rest.SerializeToString()


def _split(frame: pb.Frame) -> tuple[bytes, pb.Frame]:
    """The chunks, which are sent first, and the rest of a frame."""
    rest = _copy(frame)
    rest.ClearField("chunks")
    return pb.Frame(chunks=frame.chunks).SerializeToString(), rest


def fill(cls: type[M]) -> M:
    """A message that has every field, and two items of each list."""
    message = cls()
    for field in message.DESCRIPTOR.fields:
        if field.name == _HASH:
            continue
        if field.message_type:
            inner = fill(field.message_type._concrete_class)
            if field.is_repeated:
                getattr(message, field.name).extend([inner, inner])
            else:
                getattr(message, field.name).CopyFrom(inner)
        elif field.is_repeated:
            getattr(message, field.name).extend([_TEXTS.get(field.type, 1)] * 2)
        else:
            setattr(message, field.name, _change(field, field.default_value))
    return message


def list_paths(cls: type[Message]) -> list[str]:
    """The names of all fields, also of those within others."""
    found = []
    for field in cls.DESCRIPTOR.fields:
        found.append(field.name)
        if field.message_type:
            found += [f"{field.name}.{inner}" for inner in list_paths(field.message_type._concrete_class)]
    return found


def alter(message: M, path: str) -> Iterator[M]:
    """The message with another value of one field, in several ways: changed, left out, one more or one less."""
    head, _, rest = path.partition(".")
    field = message.DESCRIPTOR.fields_by_name[head]
    if not rest:
        yield from _alter_field(message, field)
        return
    for inner in alter(_get_first(_copy(message), field), rest):
        whole = _copy(message)
        _get_first(whole, field).CopyFrom(inner)
        yield whole


def _get_first(message: Message, field: Any) -> Any:
    """The value of a field, or the first of several, which is made when there is none."""
    value = getattr(message, field.name)
    if not field.is_repeated:
        return value
    return value[0] if value else value.add()


def _alter_field(message: M, field: Any) -> Iterator[M]:
    others = [_copy(message) for _ in range(3)]
    for other in others:
        other.ClearField(field.name)
    value = getattr(message, field.name)
    if field.is_repeated:
        getattr(others[1], field.name).extend([*value, *value])
        getattr(others[2], field.name).extend(value[1:])
    elif field.message_type:
        getattr(others[1], field.name).SetInParent()
    else:
        setattr(others[1], field.name, _change(field, value))
    for number, other in enumerate(others):
        if other not in (message, *others[:number]):
            yield other


def _change(field: Any, value: Any) -> Any:
    """Another value of the same type."""
    if field.enum_type:
        return next(number for number in field.enum_type.values_by_number if number != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, str | bytes):
        return value + _TEXTS[field.type]
    return value + 1


def _copy(message: M) -> M:
    found = type(message)()
    found.CopyFrom(message)
    return found
