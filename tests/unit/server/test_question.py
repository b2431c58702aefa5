"""Questions: encoded once, sent as they are, forgotten when they are answered."""

from __future__ import annotations

import pytest

from fedrpc.server.mailbox import Question
from fedrpc.wire.frames import build_inline_chunks
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.unit.wire.messages import Everything, envelope_of, everything, frames_of, message_of, same


@pytest.mark.parametrize("shared", [True, False])
def test_a_question_is_encoded_once_and_its_frames_equal_those_on_the_wire(shared, monkeypatch):
    monkeypatch.setattr("fedrpc.wire.frames.SMALL_BYTES", 0)
    question = Question(everything(), shared=shared)
    assert not question.prepared
    question.prepare()
    assert question.prepared
    assert question.payload is question.payload
    for _ in range(2):
        assert [data for _, _, data in question.iter_frames()] == frames_of(everything())[1:]
    assert sum(size for _, size, _ in question.iter_frames()) == question.payload.size_bytes


def test_a_small_question_travels_whole_in_its_envelope():
    question = Question(everything(), shared=True)
    assert not list(question.iter_frames())
    chunks = build_inline_chunks(question.payload)
    assert [chunk.data for chunk in chunks] == [b"".join(v) for v in question.payload.buffers if v]
    envelope = envelope_of(question.payload)
    envelope.chunks.extend(chunks)
    assert same(message_of(Everything, [pb.Frame(envelope=envelope).SerializeToString()]), everything())


def test_only_an_individual_question_is_forgotten_when_it_is_answered():
    shared, own = Question(everything(), shared=True), Question(everything(), shared=False)
    for question in (shared, own):
        question.prepare()
        question.forget()
    assert shared.prepared
    assert not own.prepared
