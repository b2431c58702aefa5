"""What frames say, in plain types: the rest of the program reads these and never sees protobuf."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedrpc.errors import Diverged, MethodFailed
from fedrpc.wire.v2 import coordinator_pb2 as pb

DEVICE_BYTES = 80  # of the text with which a process says what it trains on

# Failures that would happen again, by what a run ends with that has too many of them.
FAILURE_CODES: dict[type[MethodFailed], pb.Failure.Code.ValueType] = {
    MethodFailed: pb.Failure.CODE_MISTAKE,
    Diverged: pb.Failure.CODE_DIVERGED,
}


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
class Finished:
    """The run is over."""

    reason: str
    durable: int = 0


@dataclass(frozen=True)
class ClientTiming:
    """What a client says of the time that an answer took; none of it is a fact.

    Attributes:
        download_s: From the task's first frame to its last; nothing for one that came in one frame.
        wait_s: From there until the client began to answer it.
        compute_s: Until the answer was ready and stored.
        cpu_s: CPU time of the client's process meanwhile.
        peak_bytes: The most memory that the process has held so far; 0 when it cannot tell.
        resent: TCP segments that the client's kernel has sent again on this connection so far.
    """

    download_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    resent: int = 0


def build_timing(timing: ClientTiming) -> pb.Timing:
    """The protobuf form, which always has every field."""
    return pb.Timing(**vars(timing))


def read_timing(message: pb.Timing) -> ClientTiming:
    """The plain form of what a client said: durations that are not finite, or negative, are none."""
    return ClientTiming(
        _clean(message.download_s),
        _clean(message.wait_s),
        _clean(message.compute_s),
        _clean(message.cpu_s),
        message.peak_bytes,
        message.resent,
    )


def _clean(seconds: float) -> float:
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def read_envelope(message: pb.Envelope) -> Envelope:
    """The plain form of an envelope."""
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


def build_envelope(envelope: Envelope, *, attempt: int = 0, with_parts: bool = True) -> pb.Envelope:
    """The protobuf form, for one transfer.

    Args:
        with_parts: Whether headers and digest are in it; a frame has them serialised already.
    """
    return pb.Envelope(
        task_id=envelope.task_id,
        round=envelope.round,
        phase=envelope.phase,
        step=envelope.step,
        attempt=attempt,
        parts=envelope.parts if with_parts else (),
        digest=envelope.digest if with_parts else b"",
        question=envelope.question,
        durable=envelope.durable,
        epoch=envelope.epoch,
    )
