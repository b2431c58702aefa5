"""Seals: whatever of a message changes on its way, it is never taken for another message."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedrpc.errors import Altered, WireError
from fedrpc.wire.codec import MAX_PARTS, encode
from fedrpc.wire.frames import SERVICE, assemble_frame, parse, read_frame, seal_frame, serialise_body, serialise_frame
from fedrpc.wire.sealing import SEAL_BYTES, check_seal, seal
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.altered import alter, fill, list_paths, reseal, serialise_altered
from tests.unit.wire.messages import MAX_BYTES, One

METHODS = pb.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]].methods
# All that the service takes and gives, so that what comes later is tried, too.
TYPES = {kind.name: kind._concrete_class for method in METHODS for kind in (method.input_type, method.output_type)}


def read(data: bytes, cls: Any) -> Any:
    """Reads a received message as both sides do."""
    if cls is pb.Frame:
        return read_frame(data)
    check_seal(data, cls.__name__)
    return parse(cls, data)


def small_frame() -> bytes:
    """The first frame of a small message, as it is sent."""
    envelope = pb.Envelope(task_id="t", round=3, phase="fit", step=2, attempt=1, question=b"q", durable=4, epoch=5)
    receipt = pb.Frame(receipt=pb.Receipt(task_id="s", status=pb.Receipt.STATUS_ACCEPTED)).SerializeToString()
    return serialise_frame(7, envelope, serialise_body(encode(One(torch.arange(3.0)))), receipt)


def take(data: bytes) -> tuple[pb.Frame, list[bytes]]:
    """What a receiver makes of a small message's frame."""
    frame = read_frame(data)
    return frame, [bytes(view) for view in assemble_frame(frame, MAX_BYTES)]


@pytest.mark.parametrize("name", TYPES)
def test_the_seal_is_the_last_field_of_every_message_that_travels(name):
    fields = TYPES[name].DESCRIPTOR.fields
    assert max(fields, key=lambda field: field.number).name == "hash"
    data = fill(TYPES[name]).SerializeToString()
    found = TYPES[name].FromString(seal(data))
    assert len(seal(data)) == len(data) + SEAL_BYTES
    assert found.hash == seal(data)[-32:]


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, cls in TYPES.items() for path in list_paths(cls)])
def test_a_change_of_any_field_is_noticed(name, path):
    whole = fill(TYPES[name])
    sent = seal(whole.SerializeToString())
    received = read(sent, TYPES[name])
    ways = list(alter(received, path))
    assert ways
    for altered in ways:
        with pytest.raises(Altered, match="was changed on its way"):
            read(altered.SerializeToString(), TYPES[name])


@pytest.mark.parametrize("path", list_paths(pb.Frame))
def test_a_change_of_any_field_of_a_small_message_is_noticed_also_in_its_chunks(path):
    data = reseal(pb.Frame.FromString(small_frame()))
    sent, _ = take(data)
    assert serialise_altered(sent) == data, "reading and writing it changes nothing"
    for altered in alter(sent, path):
        with pytest.raises(WireError):
            take(serialise_altered(altered))


def test_no_flipped_bit_makes_another_message():
    sent = small_frame()
    wanted = take(sent)
    for position in range(len(sent)):
        for bit in range(8):
            data = bytearray(sent)
            data[position] ^= 1 << bit
            try:
                frame, buffers = take(bytes(data))
            except WireError:
                continue
            # Protobuf ignores what it does not know: within a chunk such bytes change nothing.
            assert (frame.envelope, frame.receipt, buffers) == (wanted[0].envelope, wanted[0].receipt, wanted[1])


@pytest.mark.parametrize("name", TYPES)
def test_a_message_that_was_cut_off_or_has_more_is_noticed(name):
    sent = seal(fill(TYPES[name]).SerializeToString())
    assert read(sent, TYPES[name])
    for end in range(len(sent)):
        with pytest.raises(Altered):
            read(sent[:end], TYPES[name])
    for more in (b"\0", sent, sent[-SEAL_BYTES:]):
        with pytest.raises(Altered):
            read(sent + more, TYPES[name])


def test_a_refusal_says_what_was_expected_and_what_to_do():
    sent = bytearray(seal(pb.JoinRequest(package_version="1").SerializeToString()))
    sent[2] ^= 1
    with pytest.raises(
        Altered, match=r"a Join was changed on its way: expected SHA-256 [0-9a-f]{12}, got [0-9a-f]{12}; "
    ):
        check_seal(bytes(sent), "a Join")


def test_more_chunks_than_a_message_can_have_are_hashed_and_not_looked_at_one_by_one():
    frame = pb.Frame(chunks=[pb.Chunk()] * (MAX_PARTS + 5))
    assert len(read_frame(seal_frame(frame)).chunks) == MAX_PARTS + 5
    data = bytearray(seal_frame(frame))
    data[2 * MAX_PARTS + 4] ^= 1
    with pytest.raises(Altered):
        read_frame(bytes(data))
