"""Chunks: cut, put together again, and every byte checked on the way."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.errors import WireError
from fedrpc.wire import frames as wire
from fedrpc.wire.codec import encode
from fedrpc.wire.frames import CHUNK_BYTES, Assembler, count_message_bytes, parse, serialise_chunks
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.unit.wire.messages import MAX_BYTES, One, envelope_of, everything, frames_of, message_of, same

SIZES = sorted(
    {*range(300), *(2**power + extra for power in range(8, 22) for extra in (-9, -5, -2, -1, 0, 1, 2) if power < 21)}
    | {2**21 - 1, 2**21}
)


def chunk_frame(part: int, data: bytes) -> bytes:
    """A frame of one chunk, as the library writes it."""
    return pb.Frame(chunks=[pb.Chunk(part=part, data=data)]).SerializeToString()


@pytest.mark.parametrize("number", [0, 1, 126, 127, 128, 129, 300, 16_383, 16_384, 2**21, 2**32 - 1])
def test_the_chunk_prefix_equals_the_one_that_protobuf_writes(number):
    for size in SIZES:
        data = bytes(size)
        ours = wire._encode_chunk_prefix(number, size) + data
        assert ours == chunk_frame(number, data), size


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**21))
def test_the_chunk_prefix_equals_the_one_that_protobuf_writes_anywhere(number, size):
    data = bytes(size)
    assert wire._encode_chunk_prefix(number, size) + data == chunk_frame(number, data)


def test_a_message_costs_five_more_bytes_on_the_wire():
    assert count_message_bytes(0) == 5
    assert count_message_bytes(100) == 105


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 3])
def test_parts_are_cut_at_one_mebibyte(size):
    payload = encode(One(torch.arange(size, dtype=torch.int64).to(torch.uint8)))
    sizes = [length for _, length, _ in serialise_chunks(payload)]
    assert sum(sizes) == size
    assert all(length == CHUNK_BYTES for length in sizes[:-1])
    assert len(sizes) == -(-size // CHUNK_BYTES)
    sent = One(torch.arange(size, dtype=torch.int64).to(torch.uint8))
    assert same(message_of(One, frames_of(sent)), sent)


def test_many_small_tensors_share_a_chunk_and_none_holds_two_parts():
    @dataclasses.dataclass(frozen=True)
    class Two:
        first: Tensors = part(Kind.WEIGHTS)
        second: Tensors = part(Kind.IMAGES)

    half = torch.zeros(CHUNK_BYTES // 2 + 1, dtype=torch.uint8)
    many = {str(i): torch.full((3,), i, dtype=torch.uint8) for i in range(200)}
    sent = Two({"a": half, "b": half.clone(), "c": half.clone()}, many)
    assert [(index, size) for index, size, _ in serialise_chunks(encode(sent))] == [
        (0, CHUNK_BYTES),
        (0, CHUNK_BYTES // 2 + 3),
        (1, 600),
    ]
    assert same(message_of(Two, frames_of(sent)), sent)


def test_over_127_parts_arrive():
    names = [f"f{i}" for i in range(140)]
    cls = dataclasses.make_dataclass("Wide", [(name, int) for name in names])
    sent = cls(*range(140))
    assert message_of(cls, frames_of(sent)) == sent


def test_the_receiver_does_not_care_how_the_sender_cuts():
    sent = everything()
    payload = encode(sent)
    frames = [pb.Frame(envelope=envelope_of(payload)).SerializeToString()]
    rng = random.Random(0)
    for index, views in enumerate(payload.buffers):
        data = b"".join(views)
        while data:
            size = rng.randint(1, 5)
            frames.append(chunk_frame(index, data[:size]))
            data = data[size:]
    assert same(message_of(type(sent), frames), sent)


def chunks(message: object) -> tuple[pb.Envelope, list[pb.Chunk]]:
    first, *rest = [parse(pb.Frame, data) for data in frames_of(message)]
    return first.envelope, [frame.chunks[0] for frame in rest]


def assembled(envelope: pb.Envelope, received: list[pb.Chunk], max_bytes: int = MAX_BYTES) -> list[memoryview]:
    assembler = Assembler(envelope, max_bytes)
    for chunk in received:
        assembler.add(chunk.part, chunk.data)
    return assembler.finish()


def test_one_flipped_bit_is_noticed_wherever_it_is():
    envelope, whole = chunks(everything())
    for number, chunk in enumerate(whole):
        for position in range(len(chunk.data)):
            data = bytearray(chunk.data)
            data[position] ^= 1 << position % 8
            broken = [*whole[:number], pb.Chunk(part=chunk.part, data=bytes(data)), *whole[number + 1 :]]
            with pytest.raises(WireError, match="corrupted"):
                assembled(envelope, broken)


def test_the_bytes_of_another_message_do_not_match_the_digest():
    envelope, _ = chunks(One(torch.zeros(2)))
    other, ones = chunks(One(torch.ones(2)))
    other.digest = envelope.digest
    with pytest.raises(WireError, match="SHA-256"):
        assembled(other, ones)


def test_a_header_that_changed_does_not_match_the_digest():
    envelope, whole = chunks(everything())
    envelope.parts[0].tensors[0].path = "a.weighs"
    with pytest.raises(WireError, match="SHA-256"):
        assembled(envelope, whole)


def test_swapped_doubled_and_lost_chunks_are_noticed():
    sent = One(torch.arange(CHUNK_BYTES // 4 + 1).view(torch.uint8))
    envelope, (one, two, three) = chunks(sent)
    assert len(assembled(envelope, [one, two, three])) == 1
    for wrong in ([two, one, three], [one, one, three], [one, two], [one], [], [one, two, three, three], [one, three]):
        with pytest.raises(WireError):
            assembled(envelope, wrong)


def test_chunks_of_another_part_are_refused():
    envelope, whole = chunks(everything())
    with pytest.raises(WireError, match="got a chunk of part 1, expected part 0"):
        assembled(envelope, whole[1:])
    with pytest.raises(WireError, match="got a chunk of part 900"):
        assembled(envelope, [pb.Chunk(part=900, data=b"x")])
    with pytest.raises(WireError, match=f"expected part {len(envelope.parts)} of"):
        assembled(envelope, [*whole, whole[-1]])


def test_an_empty_chunk_is_refused_so_that_a_stream_cannot_stall():
    envelope, _ = chunks(One(torch.zeros(2)))
    with pytest.raises(WireError):
        assembled(envelope, [pb.Chunk(part=0, data=b"")])


def test_chunks_of_a_byte_do_not_go_on_for_long():
    envelope, _ = chunks(One(torch.zeros(100_000, dtype=torch.uint8)))
    most = -(-100_000 // 4096) + 64
    with pytest.raises(WireError, match="the stream ended in part 'value' at"):
        assembled(envelope, [pb.Chunk(part=0, data=b"\0")] * most)
    with pytest.raises(WireError, match="too many chunks: expected 1048576 bytes in each"):
        assembled(envelope, [pb.Chunk(part=0, data=b"\0")] * (most + 1))


def test_a_stream_that_ends_early_says_where():
    envelope, whole = chunks(One(torch.zeros(2)))
    whole[0].data = whole[0].data[:5]
    with pytest.raises(WireError, match="the stream ended in part 'value' at 5 of 8"):
        assembled(envelope, whole)


def test_a_message_over_the_limit_is_refused_before_it_is_received():
    envelope, whole = chunks(One(torch.zeros(2)))
    assert len(assembled(envelope, whole, max_bytes=8)) == 1
    with pytest.raises(WireError, match=r"8 bytes is over the limit of 7 \(limits.max_message_bytes\)"):
        assembled(envelope, whole, max_bytes=7)
    huge = pb.TensorSpec(dtype=pb.DTYPE_UINT8, shape=[2**62])
    envelope.parts[0].CopyFrom(pb.Part(name="value", kind=1, codec=1, size=2**62, tensors=[huge]))
    with pytest.raises(WireError, match="over the limit"):
        assembled(envelope, [])


def test_a_header_is_checked_before_any_memory_is_taken():
    envelope, _ = chunks(One(torch.zeros(2)))
    envelope.parts[0].size = 4
    with pytest.raises(WireError, match="says 4 bytes but its tensors take 8"):
        Assembler(envelope, MAX_BYTES)


def test_bytes_that_are_no_protobuf_are_a_wire_error():
    with pytest.raises(WireError, match="3 bytes are not a Frame"):
        parse(pb.Frame, b"\xff\xff\xff")
