"""The client's end of the three calls: sends and receives frames, books every byte, and translates gRPC's errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

import fedrpc
from fedrpc.errors import FedrpcError, Refused, Taken, Unavailable, WireError
from fedrpc.privacy.mechanisms import History
from fedrpc.tls.credentials import ClientTls, channel_credentials
from fedrpc.wire.envelope import Cancel, Envelope, Idle, build_envelope, read_envelope
from fedrpc.wire.frames import (
    SCHEMA_DIGEST,
    SERVICE,
    Assembler,
    build_inline_chunks,
    fits_envelope,
    load_payload,
    parse,
    serialise_chunks,
)
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import SESSION, Attempt, Rows, classify_frame
from fedrpc.wire.tcpinfo import Meter
from fedrpc.wire.v1 import coordinator_pb2 as pb

_REFUSALS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
}
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # one socket for each client, even when several share a process
    ("grpc.enable_retries", 0),  # the client retries by itself, and books every attempt
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.http2.max_frame_size", 1 << 20),  # 9 bytes a MiB instead of 9 bytes in 16 KiB
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class SessionLost(FedrpcError):
    """The server does not know this session (it restarted, or closed the session): join again."""


@dataclass(frozen=True)
class Task:
    """A question that arrived completely."""

    envelope: Envelope
    buffers: list[memoryview]


@dataclass(frozen=True)
class Failure:
    """Why a client has no answer to a task; abstaining is a choice, not an error."""

    reason: str
    abstained: bool = False


@dataclass(frozen=True)
class Admission:
    """What the server replies to Join.

    Attributes:
        config: The run's configuration, as JSON.
        durable: How many durable points the run has reached.
        privacy_rows: How many of this client's privacy rows the server holds.
        privacy_head: The hash of the last of them.
        privacy_spent: What they spent together.
    """

    session: str
    run_id: str
    config: str
    dataset_digest: str
    partition_sha256: str
    method_digest: bytes
    package_version: str
    durable: int
    privacy_rows: int
    privacy_head: bytes
    privacy_spent: History


@dataclass(frozen=True)
class Receipt:
    """What the server replies to a result: its durable points, and how many of our privacy rows it holds."""

    durable: int
    privacy_rows: int


class Transport:
    """One channel to one server.

    Args:
        address: host:port.
        client: The client's id, for the ledger.
        book: Receives the rows of every closed attempt.
    """

    def __init__(
        self,
        address: str,
        client: int,
        book: Callable[[Rows], None],
        *,
        tls: ClientTls | None = None,
        insecure: bool = False,
    ) -> None:
        creds = channel_credentials(address, tls, insecure)
        self._client, self._book = client, book
        self.address = address
        self._channel = (
            grpc.aio.secure_channel(address, creds, OPTIONS) if creds else grpc.aio.insecure_channel(address, OPTIONS)
        )
        self.meter = Meter(int(address.rpartition(":")[2]), local=False)
        # Bytes pass through these calls unchanged: an answer is serialised once and sent as often as needed.
        self._join: Any = self._channel.unary_unary(f"/{SERVICE}/Join")
        self._poll: Any = self._channel.unary_stream(f"/{SERVICE}/Poll")
        self._submit: Any = self._channel.stream_unary(f"/{SERVICE}/Submit")
        # The same call: on the wire one message is a stream of one, and sending it this way costs half as much.
        self._submit_one: Any = self._channel.unary_unary(f"/{SERVICE}/Submit")

    def _book_session(self, direction: str, size: int) -> None:
        attempt = Attempt(0, SESSION, "up" if direction == "up" else "down", self._client)
        attempt.add(Kind.ENVELOPE, size)
        self._book(attempt.close())

    async def join(self, instance: str) -> Admission:
        """Opens a session.

        Args:
            instance: Distinguishes this client from another one with the same id.
        """
        data = pb.JoinRequest(
            client_id=self._client,
            instance=instance,
            package_version=fedrpc.__version__,
            schema_digest=SCHEMA_DIGEST,
        ).SerializeToString()
        try:
            answer: bytes = await self._join(data, timeout=30)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from None
        self._book_session("up", len(data))
        self._book_session("down", len(answer))
        return _read_admission(parse(pb.JoinResponse, answer))

    async def poll(self, session: str, max_bytes: int) -> Task | Cancel | Idle:
        """Waits until the server sends a task or a notice."""
        request = pb.PollRequest(session=session).SerializeToString()
        self._book_session("up", len(request))
        attempt = Attempt(0, SESSION, "down", self._client)
        envelope: pb.Envelope | None = None
        assembler: Assembler | None = None
        done = False
        try:
            async for data in self._poll(request):
                frame = parse(pb.Frame, data)
                if frame.WhichOneof("body") == "envelope":
                    envelope = frame.envelope
                    attempt = Attempt(
                        envelope.round, envelope.phase, "down", self._client, envelope.attempt, attempt.rows
                    )
                    attempt.add_envelope(envelope, len(data))
                    assembler = Assembler(envelope, max_bytes)
                    for chunk in envelope.chunks:
                        assembler.add(chunk)
                    envelope.ClearField("chunks")
                    continue
                kind, tensor_bytes = classify_frame(frame, envelope)
                attempt.add(kind, len(data), tensor_bytes)
                if frame.WhichOneof("body") == "idle":
                    done = True
                    idle = frame.idle
                    return Idle(idle.finished, idle.reason, idle.durable, idle.retry_ms)
                if frame.WhichOneof("body") == "cancel":
                    done = True
                    return Cancel(frame.cancel.task_id, frame.cancel.reason)
                if frame.WhichOneof("body") == "chunk":
                    if assembler is None:
                        raise WireError("got a chunk before its envelope")
                    assembler.add(frame.chunk)
            if envelope is None or assembler is None:
                raise WireError("a poll ended without a frame")
            task = Task(read_envelope(envelope), assembler.finish())
            done = True
            return task
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from None
        finally:
            self._book(attempt.close(aborted=not done))

    async def submit(
        self, kept: Path | bytes, session: str, attempt_number: int, first_row: int, rows: Sequence[str]
    ) -> Receipt:
        """Sends a kept answer: a small one as one message, a larger one chunk by chunk from its file.

        Args:
            first_row: The index of the first of `rows`.
            rows: Privacy rows that the server does not hold yet.
        """
        answer, payload = load_payload(kept)
        envelope = build_envelope(answer, session=session, attempt=attempt_number)
        privacy = pb.PrivacyRows(first=first_row, rows=rows)
        if fits_envelope(payload):
            envelope.chunks.extend(build_inline_chunks(payload))
            if rows:
                envelope.privacy.CopyFrom(privacy)
            return await self._send_one(envelope)
        head = pb.Frame(envelope=envelope).SerializeToString()
        chunks = ((Kind(payload.parts[part].kind), size, data) for part, size, data in serialise_chunks(payload))
        return await self._send(envelope, head, privacy, chunks)

    async def submit_failure(self, question: Envelope, session: str, failure: Failure) -> Receipt:
        """Sends the reason why there is no answer."""
        code = pb.Failure.CODE_ABSTAINED if failure.abstained else pb.Failure.CODE_ERROR
        envelope = pb.Envelope(
            session=session,
            task_id=question.task_id,
            round=question.round,
            phase=question.phase,
            step=question.step,
            question=question.digest,
            failure=pb.Failure(code=code, reason=failure.reason),
            epoch=question.epoch,
        )
        return await self._send_one(envelope)

    async def _send_one(self, envelope: pb.Envelope) -> Receipt:
        attempt = Attempt(envelope.round, envelope.phase, "up", self._client, envelope.attempt)
        data = pb.Frame(envelope=envelope).SerializeToString()
        self._book(attempt.add_envelope(envelope, len(data)))
        return await self._receive_receipt(self._submit_one(data), attempt)

    async def _send(
        self, envelope: pb.Envelope, head: bytes, privacy: pb.PrivacyRows, chunks: Iterator[tuple[Kind, int, bytes]]
    ) -> Receipt:
        attempt = Attempt(envelope.round, envelope.phase, "up", self._client, envelope.attempt)

        async def frames() -> AsyncIterator[bytes]:
            attempt.add(Kind.ENVELOPE, len(head))
            yield head
            if privacy.rows:
                data = pb.Frame(privacy=privacy).SerializeToString()
                self._book_session("up", len(data))
                yield data
            for kind, size, data in chunks:
                attempt.add(kind, len(data), size)
                yield data

        return await self._receive_receipt(self._submit(frames()), attempt)

    async def _receive_receipt(self, call: Any, attempt: Attempt) -> Receipt:
        """Waits for the reply to a result; the result's bytes count as completed only when it was accepted."""
        response = pb.SubmitResponse()
        try:
            answer: bytes = await call
            self._book_session("down", len(answer))
            response = parse(pb.SubmitResponse, answer)
            return Receipt(response.durable, response.privacy_rows)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from None
        finally:
            whole = response.status == pb.SubmitResponse.STATUS_ACCEPTED
            self._book(attempt.close(aborted=not whole))

    def _translate(self, error: grpc.aio.AioRpcError) -> FedrpcError:
        code, text = error.code(), error.details() or ""
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return SessionLost(text)
        if code == grpc.StatusCode.ALREADY_EXISTS:
            return Taken(text)
        if code in _REFUSALS:
            return Refused(text)
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return Refused(f"the server at {self.address} is no fedrpc server of this version: {text}")
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            return WireError(text)
        return Unavailable(f"no fedrpc server answers at {self.address}: {text.splitlines()[0] if text else code}")

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()


def _read_admission(answer: pb.JoinResponse) -> Admission:
    spent = tuple((entry.noise_multiplier, entry.sample_rate, entry.steps) for entry in answer.privacy_spent)
    return Admission(
        session=answer.session,
        run_id=answer.run_id,
        config=answer.config,
        dataset_digest=answer.dataset_digest,
        partition_sha256=answer.partition_sha256,
        method_digest=answer.method_digest,
        package_version=answer.package_version,
        durable=answer.durable,
        privacy_rows=answer.privacy_rows,
        privacy_head=answer.privacy_head,
        privacy_spent=spent,
    )
