"""What frames say, in plain types: the rest of the program reads these and never sees protobuf."""

from __future__ import annotations

from dataclasses import dataclass

from fedrpc.wire.v1 import coordinator_pb2 as pb


@dataclass(frozen=True)
class Envelope:
    """What a message is about: the task that it asks or answers, and the headers of its parts.

    Attributes:
        epoch: The durable points that the run had reached when the question was asked.
        digest: SHA-256 of the message.
        question: In an answer, the digest of the question.
        durable: In a question, the durable points that the run has reached.
    """

    task_id: str
    round: int = 0
    phase: str = ""
    step: int = 0
    epoch: int = 0
    parts: tuple[pb.Part, ...] = ()
    digest: bytes = b""
    question: bytes = b""
    durable: int = 0


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for the answer to a task any more."""

    task_id: str
    reason: str


@dataclass(frozen=True)
class Idle:
    """There is nothing to do: poll again after `retry_ms`, unless the run is finished."""

    finished: bool = False
    reason: str = ""
    durable: int = 0
    retry_ms: int = 0


def read_envelope(message: pb.Envelope) -> Envelope:
    """The plain form of an envelope; chunks and privacy rows that came inside it are not part of it."""
    return Envelope(
        message.task_id,
        message.round,
        message.phase,
        message.step,
        message.epoch,
        tuple(message.parts),
        message.digest,
        message.question,
        message.durable,
    )


def build_envelope(envelope: Envelope, *, session: str = "", attempt: int = 0) -> pb.Envelope:
    """The protobuf form, for one transfer within a session."""
    return pb.Envelope(
        session=session,
        task_id=envelope.task_id,
        round=envelope.round,
        phase=envelope.phase,
        step=envelope.step,
        attempt=attempt,
        parts=envelope.parts,
        digest=envelope.digest,
        question=envelope.question,
        durable=envelope.durable,
        epoch=envelope.epoch,
    )
