"""The client's side of the three calls: frames in and out, every byte booked, gRPC errors turned into ours."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from fedrpc.errors import FedrpcError, Refused, Taken, Unavailable, WireError
from fedrpc.tls.credentials import ClientTls, channel_credentials
from fedrpc.wire.frames import SMALL_BYTES, Assembler, chunk_frames, parse, riding_chunks, stored_payload
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import SESSION, Attempt, Rows, frame_kind
from fedrpc.wire.tcpinfo import Meter
from fedrpc.wire.v1 import coordinator_pb2 as pb

_SERVICE = "/fedrpc.wire.v1.Coordinator/"
_REFUSALS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
}
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # one socket for each client, also when a process holds several
    ("grpc.enable_retries", 0),  # retries are ours: they are booked
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.http2.max_frame_size", 1 << 20),  # 9 bytes a MiB instead of 9 bytes in 16 KiB
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class SessionLost(FedrpcError):
    """The server does not know this session (it was restarted, or gave us up): join again."""


@dataclass(frozen=True)
class Task:
    """A question that came whole."""

    envelope: pb.Envelope
    buffers: list[memoryview]


class Transport:
    """One channel to one server.

    Args:
        address: host:port.
        client: The client's id, for the ledger.
        book: Takes the rows of every closed attempt.
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
        # Bytes pass through these calls as they are: a result is serialised once and sent as often as needed.
        self._join: Any = self._channel.unary_unary(_SERVICE + "Join")
        self._poll: Any = self._channel.unary_stream(_SERVICE + "Poll")
        self._submit: Any = self._channel.stream_unary(_SERVICE + "Submit")
        # The same call: a stream of one message is no other on the wire, and costs half as much to send as one.
        self._submit_one: Any = self._channel.unary_unary(_SERVICE + "Submit")

    def _session(self, direction: str, size: int) -> None:
        attempt = Attempt(0, SESSION, "up" if direction == "up" else "down", self._client)
        attempt.add(Kind.ENVELOPE, size)
        self._book(attempt.closed())

    async def join(self, request: pb.JoinRequest) -> pb.JoinResponse:
        """Opens a session."""
        data = request.SerializeToString()
        try:
            answer: bytes = await self._join(data, timeout=30)
        except grpc.aio.AioRpcError as error:
            raise self._ours(error) from None
        self._session("up", len(data))
        self._session("down", len(answer))
        return parse(pb.JoinResponse, answer)

    async def poll(self, session: str, max_bytes: int) -> Task | pb.Cancel | pb.Idle:
        """Parks until the server has something for us."""
        request = pb.PollRequest(session=session).SerializeToString()
        self._session("up", len(request))
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
                kind, tensor_bytes = frame_kind(frame, envelope)
                attempt.add(kind, len(data), tensor_bytes)
                if frame.WhichOneof("body") == "idle":
                    done = True
                    return frame.idle
                if frame.WhichOneof("body") == "cancel":
                    done = True
                    return frame.cancel
                if frame.WhichOneof("body") == "chunk":
                    if assembler is None:
                        raise WireError("a chunk came before its envelope")
                    assembler.add(frame.chunk)
            if envelope is None or assembler is None:
                raise WireError("a poll ended without a word")
            task = Task(envelope, assembler.finish())
            done = True
            return task
        except grpc.aio.AioRpcError as error:
            raise self._ours(error) from None
        finally:
            self._book(attempt.closed(aborted=not done))

    async def submit(
        self, kept: Path | bytes, session: str, attempt_number: int, rows: pb.PrivacyRows
    ) -> pb.SubmitResponse:
        """Sends a kept answer; its bytes are read from the file as they go, and a small one goes as one message."""
        envelope, payload = stored_payload(kept)
        envelope.session, envelope.attempt = session, attempt_number
        if payload.size_bytes <= SMALL_BYTES:
            envelope.chunks.extend(riding_chunks(payload))
            if rows.rows:
                envelope.privacy.CopyFrom(rows)
            return await self._send_one(envelope)
        head = pb.Frame(envelope=envelope).SerializeToString()
        chunks = ((Kind(payload.parts[part].kind), size, data) for part, size, data in chunk_frames(payload))
        return await self._send(envelope, head, rows, chunks)

    async def submit_failure(self, envelope: pb.Envelope) -> pb.SubmitResponse:
        """Tells the server why there is no answer."""
        return await self._send_one(envelope)

    async def _send_one(self, envelope: pb.Envelope) -> pb.SubmitResponse:
        attempt = Attempt(envelope.round, envelope.phase, "up", self._client, envelope.attempt)
        data = pb.Frame(envelope=envelope).SerializeToString()
        self._book(attempt.add_envelope(envelope, len(data)))
        return await self._answered(self._submit_one(data), attempt)

    async def _send(
        self, envelope: pb.Envelope, head: bytes, rows: pb.PrivacyRows, chunks: Iterator[tuple[Kind, int, bytes]]
    ) -> pb.SubmitResponse:
        attempt = Attempt(envelope.round, envelope.phase, "up", self._client, envelope.attempt)

        async def frames() -> AsyncIterator[bytes]:
            attempt.add(Kind.ENVELOPE, len(head))
            yield head
            if rows.rows:
                data = pb.Frame(privacy=rows).SerializeToString()
                self._session("up", len(data))
                yield data
            for kind, size, data in chunks:
                attempt.add(kind, len(data), size)
                yield data

        return await self._answered(self._submit(frames()), attempt)

    async def _answered(self, call: Any, attempt: Attempt) -> pb.SubmitResponse:
        """What the server says to a result; its bytes count as whole when it was accepted."""
        response = pb.SubmitResponse()
        try:
            answer: bytes = await call
            self._session("down", len(answer))
            response = parse(pb.SubmitResponse, answer)
            return response
        except grpc.aio.AioRpcError as error:
            raise self._ours(error) from None
        finally:
            whole = response.status == pb.SubmitResponse.STATUS_ACCEPTED
            self._book(attempt.closed(aborted=not whole))

    def _ours(self, error: grpc.aio.AioRpcError) -> FedrpcError:
        code, text = error.code(), error.details() or ""
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return SessionLost(text)
        if code == grpc.StatusCode.ALREADY_EXISTS:
            return Taken(text)
        if code in _REFUSALS:
            return Refused(text)
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return Refused(f"what answers at {self.address} is no fedrpc server of this version: {text}")
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            return WireError(text)
        return Unavailable(f"no fedrpc server answers at {self.address}: {text.splitlines()[0] if text else code}")

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()
