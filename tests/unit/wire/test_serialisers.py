"""What is written and read without the protobuf library is what the library would write and read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedrpc.wire.codec import encode
from fedrpc.wire.frames import (
    EMPTY_BODY,
    SMALL_BYTES,
    count_field_bytes,
    fits_frame,
    read_chunk,
    read_frame,
    serialise_body,
    serialise_chunks,
    serialise_frame,
)
from fedrpc.wire.ledger import list_inline
from fedrpc.wire.sealing import SEAL_BYTES
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.unit.wire.messages import One, everything, messages

UINT32, UINT64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SESSIONS = st.integers(1, 2**32 - 1)
FAILURES = st.none() | st.builds(pb.Failure, code=st.integers(0, 3), reason=st.text())
ENVELOPES = st.builds(
    pb.Envelope,
    task_id=st.text(),
    round=st.integers(-(2**31), 2**31 - 1),
    phase=st.text(),
    step=UINT32,
    attempt=UINT32,
    question=st.binary(),
    durable=UINT64,
    epoch=UINT64,
    failure=FAILURES,
)
OTHERS = st.builds(
    pb.Frame,
    privacy=st.none() | st.builds(pb.PrivacyRows, first=UINT64, rows=st.lists(st.text(), max_size=3)),
    receipt=st.none() | st.builds(pb.Receipt, task_id=st.text(), durable=UINT64, reason=st.text()),
)


def build_frame(session: int, envelope: pb.Envelope, message: object, others: pb.Frame) -> pb.Frame:
    """The first frame of a small message, as the library builds it."""
    payload = encode(message)
    frame = pb.Frame(session=session, envelope=envelope)
    frame.envelope.MergeFrom(pb.Envelope(parts=payload.parts, digest=payload.digest))
    for index, views in enumerate(payload.buffers):
        if data := b"".join(views):
            frame.chunks.add(part=index, data=data)
    frame.MergeFrom(others)
    return frame


def read_bare(data: bytes) -> pb.Frame:
    """A sealed frame, without its seal."""
    frame = read_frame(data)
    frame.ClearField("hash")
    return frame


@given(SESSIONS, ENVELOPES, messages, OTHERS)
def test_a_first_frame_is_the_librarys(session, envelope, message, others):
    ours = serialise_frame(session, envelope, serialise_body(encode(message)), others.SerializeToString())
    theirs = build_frame(session, envelope, message, others)
    assert read_bare(ours) == theirs
    assert len(ours) == theirs.ByteSize() + SEAL_BYTES


@given(SESSIONS, ENVELOPES)
def test_a_frame_without_parts_is_the_librarys(session, envelope):
    ours = serialise_frame(session, envelope, EMPTY_BODY)
    theirs = pb.Frame(session=session, envelope=envelope)
    assert read_bare(ours) == theirs
    assert len(ours) == theirs.ByteSize() + SEAL_BYTES


@given(messages)
def test_a_body_counts_its_chunks_as_the_receiver_does(message):
    body = serialise_body(encode(message))
    frame = pb.Frame.FromString(serialise_frame(1, pb.Envelope(), body))
    assert list(body.inline) == list_inline(frame)
    assert sum(size for _, size, _ in body.inline) == len(body.chunks)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_body_has_chunks_up_to_256_kib(extra):
    payload = encode(One(torch.zeros(SMALL_BYTES + extra, dtype=torch.uint8)))
    body = serialise_body(payload)
    assert fits_frame(payload) == bool(body.chunks) == bool(body.inline) == (extra <= 0)
    assert pb.Envelope.FromString(body.headers) == pb.Envelope(parts=payload.parts, digest=payload.digest)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2**21])
def test_a_field_takes_the_bytes_that_the_library_writes(size):
    privacy = pb.PrivacyRows(rows=["x" * size])
    assert count_field_bytes(privacy) == len(pb.Frame(privacy=privacy).SerializeToString())


# Reading


def assert_reads_as_the_library(data: bytes) -> None:
    """`read_chunk` may leave any frame to the library, but what it reads is what the library would have read."""
    found = read_chunk(data)
    if found is not None:
        part, view = found
        assert pb.Frame.FromString(data) == pb.Frame(chunks=[pb.Chunk(part=part, data=bytes(view))])


VARINTS = st.sampled_from(
    [b"\0", b"\1", b"\5", b"\x7f", b"\x80\0", b"\x80\1", b"\x83\x80\0", b"\xff" * 9 + b"\1"]
) | st.binary(max_size=10)
TAGS = st.sampled_from([b"\x1a", b"\x08", b"\x12", b"\x0d", b"\x18"])


@settings(max_examples=2000)
@given(st.binary(max_size=40) | st.lists(TAGS | VARINTS, max_size=8).map(b"".join))
@example(b"\x1a\x09\x08\x80\x80\x80\x80\x10\x12\x01x")  # the part 2**32, which does not fit its field
@example(b"\x1a\x00")
@example(b"\x1a\x02\x12\x00")
def test_any_bytes_are_read_as_the_library_reads_them_or_left_to_it(data):
    assert_reads_as_the_library(data)


@settings(max_examples=500)
@given(st.data(), UINT32, st.binary(max_size=300))
def test_a_chunk_frame_is_read_and_a_damaged_one_never_otherwise_than_by_the_library(data, part, content):
    frame = pb.Frame(chunks=[pb.Chunk(part=part, data=content)]).SerializeToString()
    if content:  # without data there is nothing to receive
        assert read_chunk(frame) == (part, content)
    at = data.draw(st.integers(0, len(frame) - 1))
    assert_reads_as_the_library(frame[:at])
    assert_reads_as_the_library(frame[:at] + data.draw(st.binary(min_size=1, max_size=3)) + frame[at:])
    assert_reads_as_the_library(frame[:at] + bytes([data.draw(st.integers(0, 255))]) + frame[at + 1 :])


def test_each_chunk_that_is_sent_is_read_without_the_library():
    payload = encode(everything())
    for index, size, data in serialise_chunks(payload):
        found = read_chunk(data)
        assert found is not None
        assert (found[0], found[1].nbytes) == (index, size)


@pytest.mark.parametrize(
    "changes",
    [
        {"session": 1},
        {"envelope": pb.Envelope()},
        {"receipt": pb.Receipt()},
        {"chunks": [pb.Chunk(part=1, data=b"x"), pb.Chunk(part=1, data=b"y")]},
        {"chunks": [], "heartbeat": pb.Heartbeat()},
    ],
    ids=str,
)
def test_a_frame_with_anything_else_is_left_to_the_library(changes):
    frame = pb.Frame(**({"chunks": [pb.Chunk(part=1, data=b"x")]} | changes))
    assert read_chunk(frame.SerializeToString()) is None


def test_a_chunk_is_not_copied():
    data = pb.Frame(chunks=[pb.Chunk(part=1, data=b"content")]).SerializeToString()
    found = read_chunk(data)
    assert found is not None
    assert found[1].obj is data
