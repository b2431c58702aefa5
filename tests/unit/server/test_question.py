"""Questions: encoded once, sent as they are, forgotten when they are answered; and what their answers can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedrpc.errors import WireError
from fedrpc.methods.fedavg import FIT, Global, Update
from fedrpc.methods.phases import Phase
from fedrpc.server.question import Expectation, Question
from fedrpc.wire.codec import decode, encode
from fedrpc.wire.frames import parse, serialise_frame
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import Attempt
from fedrpc.wire.message import Tensors, part
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.fakes import received
from tests.unit.wire.messages import Everything, One, everything, frames_of, same


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


# What can be told of an answer from its headers

STATE = Global({"w": torch.zeros(2, 3), "n": torch.tensor(0)})


def answer(**changes: Any) -> Update:
    return Update(**({"weights": STATE.weights, "num_examples": 1, "losses": torch.zeros(1).double()} | changes))


def check(message: Any, phase: Phase[Any, Any] = FIT, **limits: Any) -> None:
    question = Question(STATE, shared=True, expected=Expectation(phase, **limits))
    question.check_answer(message if isinstance(message, list) else encode(message).parts)


def test_an_honest_answer_has_the_headers_that_are_expected():
    check(answer())
    check(answer(losses=torch.zeros(0).double()))


@dataclass(frozen=True)
class Counted:
    weights: Tensors = part(Kind.WEIGHTS)
    num_examples: float = part(Kind.SCALARS)


@dataclass(frozen=True)
class OtherKind:
    weights: Tensors = part(Kind.ACTIVATIONS)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (answer(weights={"w": torch.zeros(3, 2), "n": torch.tensor(0)}), r"'weights' tensor 'w': expected .*\(2, 3\)"),
        (answer(weights={"w": torch.zeros(2, 3).double(), "n": torch.tensor(0)}), "float64"),
        (answer(weights={"w": torch.zeros(2, 3)}), "'weights' tensor 'n'"),
        (answer(weights=STATE.weights | {"x": torch.zeros(1)}), "'weights' tensor 'x': expected None"),
        (One(torch.zeros(1)), "Update has no part 'value'; expected losses, num_examples, weights"),
        (Counted(STATE.weights, 1.0), "'num_examples' tensor '': expected .*int64"),
        (OtherKind(STATE.weights), "KIND_ACTIVATIONS, expected WEIGHTS"),
        (list(encode(STATE).parts) * 2, "part 'weights' was received twice"),
    ],
    ids=["shape", "dtype", "lost", "extra", "unknown", "scalar", "kind", "twice"],
)
def test_an_answer_that_would_be_refused_is_known_by_its_headers(message, what):
    with pytest.raises(WireError, match=what):
        check(message)


def test_where_the_question_does_not_tell_a_layout_the_first_answer_does():
    loose, expected = Phase("fit", Global, Update), Expectation(Phase("fit", Global, Update))
    check(answer(weights={"w": torch.zeros(1)}), loose)
    expected.note_layout("weights", {"w": (torch.float32, (2, 3)), "n": (torch.int64, ())})
    question = Question(STATE, shared=True, expected=expected)
    question.check_answer(encode(answer()).parts)
    with pytest.raises(WireError, match="'weights' tensor 'w'"):
        question.check_answer(encode(answer(weights={"w": torch.zeros(1)})).parts)


def test_the_size_of_an_answer_is_bounded_by_what_it_can_be_made_from():
    def announce(size: int) -> list[pb.Part]:
        spec = pb.TensorSpec(dtype=pb.DTYPE_UINT8, shape=[size])
        return [pb.Part(name="losses", kind=pb.KIND_SCALARS, codec=pb.CODEC_RAW, size=size, tensors=[spec])]

    check(announce(1 << 20))
    with pytest.raises(WireError, match=r"of 2000000000 bytes is over the limit of .*set limits.max_message_bytes"):
        check(announce(2 * 10**9))
    with pytest.raises(WireError, match="'losses' should have a value for each of 5 epochs, got 1000 bytes"):
        check(announce(1000), epochs=5)
    check(announce(40), epochs=5)
    check(announce(2 * 10**9), data_bytes=10**9)
    check(announce(2 * 10**9), max_bytes=2 * 10**9)
    with pytest.raises(WireError, match="of 1000 bytes is over the limit of 999"):
        check(announce(1000), data_bytes=10**9, max_bytes=999)
