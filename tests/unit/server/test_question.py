"""Questions: encoded once, sent as they are, forgotten when they are answered."""

from __future__ import annotations

import pytest

from fedrpc.server.question import Question
from fedrpc.wire.codec import decode
from fedrpc.wire.frames import parse, serialise_frame
from fedrpc.wire.ledger import Attempt
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.fakes import received
from tests.unit.wire.messages import Everything, everything, frames_of, same


@pytest.mark.parametrize("shared", [True, False])
def test_a_question_is_encoded_once_and_its_frames_equal_those_on_the_wire(shared, monkeypatch):
    monkeypatch.setattr("fedrpc.wire.frames.SMALL_BYTES", 0)
    question = Question(everything(), shared=shared)
    assert not question.prepared
    question.prepare()
    assert question.prepared
    assert question.payload is question.payload
    assert (question.body.chunks, question.body.inline) == (b"", ())
    for _ in range(2):
        frames = list(question.iter_frames())
        assert [data for _, _, data in frames] == frames_of(everything())[-len(frames) :]
    assert sum(size for _, size, _ in question.iter_frames()) == question.payload.size_bytes


def test_a_small_question_travels_whole_with_its_envelope():
    question = Question(everything(), shared=True)
    assert question.is_small
    assert not list(question.iter_frames())
    frame = serialise_frame(1, pb.Envelope(task_id="t"), question.body)
    chunks = parse(pb.Frame, frame).chunks
    assert [chunk.data for chunk in chunks] == [b"".join(v) for v in question.payload.buffers if v]
    task = received([frame], Attempt(0, "fit", "down", 0))
    assert same(decode(Everything, task.envelope.parts, task.buffers), everything())


def test_only_an_individual_question_is_forgotten_when_it_is_answered():
    shared, own = Question(everything(), shared=True), Question(everything(), shared=False)
    for question in (shared, own):
        question.prepare()
        question.forget()
    assert shared.prepared
    assert not own.prepared
