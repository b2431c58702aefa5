"""Serves the three calls, health and reflection: the only module of the server that knows gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, BinaryIO

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

import fedrpc
from fedrpc import log
from fedrpc.errors import FedrpcError, Refused, Unavailable, WireError
from fedrpc.privacy.ledger import PrivacyFile
from fedrpc.server.coordinator import Coordinator
from fedrpc.server.mailbox import Delivery, Mailbox, Task
from fedrpc.server.roster import IdTaken, OutOfRange, Roster, Session, UnknownSession
from fedrpc.server.rounds import ServerContext
from fedrpc.tls.credentials import ServerTls, server_credentials
from fedrpc.tls.endpoint import check_address
from fedrpc.wire.envelope import Cancel, Idle
from fedrpc.wire.frames import SCHEMA_DIGEST, SERVICE, Assembler, build_inline_chunks, check_name, parse
from fedrpc.wire.kinds import Direction, Kind
from fedrpc.wire.ledger import SESSION, Attempt, LedgerFile, Rows, classify_frame, merge
from fedrpc.wire.v1 import coordinator_pb2 as pb

# The status code of each error on the wire; the first match counts.
STATUS: list[tuple[type[Exception], grpc.StatusCode]] = [
    (UnknownSession, grpc.StatusCode.UNAUTHENTICATED),
    (OutOfRange, grpc.StatusCode.OUT_OF_RANGE),
    (IdTaken, grpc.StatusCode.ALREADY_EXISTS),
    (Refused, grpc.StatusCode.FAILED_PRECONDITION),
    (WireError, grpc.StatusCode.INVALID_ARGUMENT),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (FedrpcError, grpc.StatusCode.INTERNAL),
]

OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind the same port
    ("grpc.http2.bdp_probe", 0),  # with it, gRPC buffers whole models for slow readers
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.http2.max_frame_size", 1 << 20),  # 9 bytes a MiB instead of 9 bytes in 16 KiB
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 20_000),
]


class Servicer:
    """Join, Poll and Submit.

    Args:
        coordinator: The run's coordinator.
        client_name: The name that clients' certificates must have, with the id for {client} (mutual TLS); None for any.
    """

    def __init__(
        self,
        server: ServerContext,
        roster: Roster,
        coordinator: Coordinator,
        book: LedgerFile,
        privacy: PrivacyFile,
        *,
        client_name: str | None = None,
    ) -> None:
        self._server, self._roster, self._coordinator = server, roster, coordinator
        self._mailbox: Mailbox = server.mailbox
        self._book, self._privacy, self._client_name = book, privacy, client_name
        self._limits = server.problem.config.limits
        self._transfers = asyncio.Semaphore(self._limits.transfers)
        self._log = log.get("server")

    def build_handlers(self) -> grpc.GenericRpcHandler:
        """Builds the handlers; bytes pass through unchanged, so that a broadcast is serialised once for all clients."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Join": grpc.unary_unary_rpc_method_handler(_report_errors(self.join)),
                "Poll": grpc.unary_stream_rpc_method_handler(self.poll),  # frames go by context.write
                "Submit": grpc.stream_unary_rpc_method_handler(_report_errors(self.submit)),
            },
        )

    def _count_session(self, direction: Direction, client: int, size: int) -> Rows:
        attempt = Attempt(self._coordinator.round, SESSION, direction, client)
        attempt.add(Kind.ENVELOPE, size)
        return attempt.rows

    def _book_session(self, direction: Direction, client: int, size: int) -> None:
        self._book.book(self._count_session(direction, client, size))

    async def join(self, data: bytes, context: Any) -> bytes:
        """Opens a session, or refuses with the reason."""
        request = parse(pb.JoinRequest, data)
        if request.schema_digest != SCHEMA_DIGEST:
            raise Refused(
                f"the wire schema differs: server {fedrpc.__version__} has schema {SCHEMA_DIGEST.hex()[:12]}, client "
                f"{request.package_version or '?'} has {request.schema_digest.hex()[:12] or 'none'}; "
                "install the same fedrpc on both sides"
            )
        self._check_certificate(request.client_id, context)
        session, old = self._roster.join(request.client_id, request.instance)
        if old:
            self._mailbox.replace_session(old)
        if request.package_version != fedrpc.__version__:
            self._log.warning("version_skew", client=request.client_id, theirs=request.package_version)
        rows, head = self._privacy.get_head(request.client_id)
        spent = self._privacy.get_history(request.client_id)
        problem = self._server.problem
        answer = pb.JoinResponse(
            session=session.token,
            run_id=self._server.run_id,
            config=problem.config.dump_for_join(),
            dataset_digest=problem.dataset.digest,
            partition_sha256=problem.partition.sha256,
            method_digest=problem.schema_digest(),
            package_version=fedrpc.__version__,
            durable=self._mailbox.durable,
            privacy_rows=rows,
            privacy_head=head,
            privacy_spent=[pb.Spent(noise_multiplier=n, sample_rate=q, steps=s) for n, q, s in spent],
        ).SerializeToString()
        self._book_session("up", request.client_id, len(data))
        self._book_session("down", request.client_id, len(answer))
        self._server.progress("joined", {"joined": len(self._roster), "of": problem.config.clients})
        return answer

    def _check_certificate(self, client: int, context: Any) -> None:
        if self._client_name is None:
            return
        names = [name.decode() for name in context.auth_context().get("x509_common_name", [])]
        wanted = self._client_name.replace("{client}", str(client))
        if wanted not in names:
            raise Refused(f"the certificate is for {names or 'nobody'}, not for {wanted}")

    # Poll

    async def poll(self, data: bytes, context: Any) -> None:
        """Answers a parked poll with a task, a cancel or Idle."""
        try:
            session = self._roster.find(parse(pb.PollRequest, data).session)
            self._book_session("up", session.client, len(data))
            item = await self._mailbox.next(session)
            if isinstance(item, Delivery):
                await self._deliver(item, session, context)
                return
            frame = _serialise_notice(item)
            self._book_session("down", session.client, len(frame))
            if isinstance(item, Idle) and item.finished:
                # This frees the id for another process. Before the write, since a client that has read this frame hangs
                # up, which can cancel this call.
                self._roster.close(session)
            await self._write(context, frame)
        except FedrpcError as error:
            await _abort(context, error)

    async def _write(self, context: Any, frame: bytes) -> None:
        """Writes a frame; gives up on a client that stops reading, or it would hold its permit forever."""
        try:
            async with asyncio.timeout(self._limits.transfer_idle_s):
                await context.write(frame)
        except TimeoutError:
            raise Unavailable(
                f"the client read nothing for {self._limits.transfer_idle_s:g} s; the transfer was aborted"
            ) from None

    async def _deliver(self, delivery: Delivery, session: Session, context: Any) -> None:
        task, whole = delivery.task, False
        attempt = Attempt(task.round, task.phase, "down", task.client, delivery.attempt)
        session.streams += 1
        try:
            if not await self._prepare(task):
                return
            async with self._transfers:
                envelope = self._build_envelope(delivery, session)
                head = pb.Frame(envelope=envelope).SerializeToString()
                attempt.add_envelope(envelope, len(head))
                await self._write(context, head)
                for kind, size, data in task.question.iter_frames():
                    attempt.add(kind, len(data), size)
                    await self._write(context, data)
            whole = True
        finally:
            session.streams -= 1
            self._book.book(attempt.close(aborted=not whole))
            if whole:
                self._mailbox.mark_delivered(delivery)
            else:
                self._mailbox.return_to_queue(delivery)

    async def _prepare(self, task: Task) -> bool:
        try:
            if not task.question.prepared:
                await self._server.off_loop(task.question.prepare)
            return True
        except Exception as error:
            self._mailbox.fail_question(task, error)
            return False

    def _build_envelope(self, delivery: Delivery, session: Session) -> pb.Envelope:
        task = delivery.task
        return pb.Envelope(
            session=session.token,
            task_id=task.task_id,
            round=task.round,
            phase=task.phase,
            step=task.step,
            attempt=delivery.attempt,
            parts=task.question.payload.parts,
            digest=task.question.payload.digest,
            durable=self._mailbox.durable,
            epoch=task.epoch,
            chunks=build_inline_chunks(task.question.payload),
        )

    # Submit

    async def submit(self, stream: AsyncIterator[bytes], context: Any) -> bytes:
        """Receives one result; it is on disk and checked before it is acknowledged."""
        frames = stream.__aiter__()
        head = await anext(frames, b"")
        envelope = parse(pb.Frame, head).envelope
        session = self._roster.find(envelope.session)
        task = self._mailbox.find(envelope.task_id)
        if task is None or task.client != session.client:
            task = None
        # A result for a task that is not open gets no row of its own: its envelope is not trusted.
        where = (task.round, task.phase) if task else (self._coordinator.round, SESSION)
        attempt = Attempt(*where, "up", session.client, envelope.attempt if task else 0)
        rows = attempt.add_envelope(envelope, len(head))
        session.streams += 1
        whole, answer = False, b""
        try:
            status = await self._receive(envelope, task, session, frames, attempt)
            whole = status == pb.SubmitResponse.STATUS_ACCEPTED
            held = self._privacy.get_head(session.client)[0]
            response = pb.SubmitResponse(status=status, durable=self._mailbox.durable, privacy_rows=held)
            answer = response.SerializeToString()
            merge(rows, self._count_session("down", session.client, len(answer)))
        finally:
            session.streams -= 1
            merge(rows, attempt.close(aborted=not whole))
            self._book.book(rows)  # together: every booking is a write to the journal
        return answer

    async def _receive(
        self,
        envelope: pb.Envelope,
        task: Task | None,
        session: Session,
        frames: AsyncIterator[bytes],
        attempt: Attempt,
    ) -> pb.SubmitResponse.Status.ValueType:
        failure = envelope.HasField("failure")
        inline = list(envelope.chunks)
        whole = bool(inline) and sum(len(chunk.data) for chunk in inline) == sum(part.size for part in envelope.parts)
        # Rows are kept whatever becomes of the result: what they describe has left the client.
        if envelope.HasField("privacy"):
            self._privacy.extend(session.client, envelope.privacy.first, envelope.privacy.rows)
        first = b"" if failure or whole else await self._receive_privacy_rows(frames, session)
        for field in ("chunks", "privacy"):
            envelope.ClearField(field)
        if task is None:
            held = self._mailbox.was_answered(envelope.task_id)
            again = held or self._server.spool.exists(envelope.epoch, check_name(envelope.task_id))
            return pb.SubmitResponse.STATUS_DUPLICATE if again else pb.SubmitResponse.STATUS_LATE
        if task.done or envelope.question != task.question.payload.digest:
            return pb.SubmitResponse.STATUS_LATE
        if failure:
            abstained = envelope.failure.code == pb.Failure.CODE_ABSTAINED
            self._mailbox.accept_failure(
                task, envelope.failure.reason or "the client gave no reason", abstained=abstained
            )
            return pb.SubmitResponse.STATUS_ACCEPTED
        if whole:
            data = io.BytesIO()
            self._start_assembly(envelope, inline, data).finish()
            small = self._server.spool.keep_small(data.getvalue(), task.epoch, task.task_id)
            self._mailbox.accept_reply(task, small)
            return pb.SubmitResponse.STATUS_ACCEPTED
        task.receiving += 1
        incoming = self._server.spool.make_incoming_path(task.epoch, task.task_id)
        try:
            async with self._transfers:
                with incoming.open("wb") as file:
                    await self._receive_chunks(self._start_assembly(envelope, inline, file), first, frames, attempt)
            if task.done:
                return pb.SubmitResponse.STATUS_LATE
            self._mailbox.accept_reply(task, self._server.spool.keep(incoming, task.epoch, task.task_id))
            return pb.SubmitResponse.STATUS_ACCEPTED
        finally:
            task.receiving -= 1
            incoming.unlink(missing_ok=True)

    def _start_assembly(self, envelope: pb.Envelope, inline: list[pb.Chunk], file: BinaryIO) -> Assembler:
        assembler = Assembler(envelope, self._limits.max_message_bytes, file)
        for chunk in inline:
            assembler.add(chunk)
        return assembler

    async def _receive_privacy_rows(self, frames: AsyncIterator[bytes], session: Session) -> bytes:
        """Keeps the privacy rows that come before a result's chunks; returns the first frame after them."""
        data = await self._next_frame(frames)
        if data:
            frame = parse(pb.Frame, data)
            if frame.WhichOneof("body") == "privacy":
                self._privacy.extend(session.client, frame.privacy.first, frame.privacy.rows)
                self._book_session("up", session.client, len(data))
                return await self._next_frame(frames)
        return data

    async def _next_frame(self, frames: AsyncIterator[bytes]) -> bytes:
        try:
            return await asyncio.wait_for(anext(frames, b""), self._limits.transfer_idle_s)
        except TimeoutError:
            raise Unavailable(
                f"the client sent nothing for {self._limits.transfer_idle_s:g} s; the transfer was aborted"
            ) from None

    async def _receive_chunks(
        self, assembler: Assembler, data: bytes, frames: AsyncIterator[bytes], attempt: Attempt
    ) -> None:
        """Receives the chunks that have frames of their own."""
        while data:
            frame = parse(pb.Frame, data)
            kind, tensor_bytes = classify_frame(frame, assembler.envelope)
            attempt.add(kind, len(data), tensor_bytes)
            if frame.WhichOneof("body") != "chunk":
                raise WireError(f"expected a chunk, got {frame.WhichOneof('body')}")
            assembler.add(frame.chunk)
            data = await self._next_frame(frames)
        assembler.finish()


def _serialise_notice(notice: Cancel | Idle) -> bytes:
    if isinstance(notice, Cancel):
        frame = pb.Frame(cancel=pb.Cancel(task_id=notice.task_id, reason=notice.reason))
    else:
        idle = pb.Idle(retry_ms=notice.retry_ms, finished=notice.finished, reason=notice.reason, durable=notice.durable)
        frame = pb.Frame(idle=idle)
    return frame.SerializeToString()


async def _abort(context: Any, error: Exception) -> None:
    code = next((code for cls, code in STATUS if isinstance(error, cls)), grpc.StatusCode.INTERNAL)
    await context.abort(code, str(error)[:1000])


def _report_errors(call: Callable[[Any, Any], Awaitable[bytes]]) -> Callable[[Any, Any], Awaitable[bytes]]:
    """Wraps a call so that its errors reach the client as a status; a bad client never takes the server down."""

    async def answer(request: Any, context: Any) -> bytes:
        try:
            return await call(request, context)
        except FedrpcError as error:
            log.get("server").warning("call_refused", error=str(error))
            await _abort(context, error)
        raise AssertionError("abort always raises")

    return answer


def _bind(server: grpc.aio.Server, address: str, creds: grpc.ServerCredentials | None, option: str) -> int:
    """Binds a server to an address and returns its port."""
    try:
        port = server.add_secure_port(address, creds) if creds else server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if not port:
        raise Unavailable(
            f"cannot listen on {address}: the port is in use, or the address is not this machine's; "
            f"choose another {option}"
        )
    return port


class Health:
    """The standard health service: "" is SERVING while the process lives, the service's name while clients can join.

    On a port of its own it is plaintext, since a cluster's probes do not speak TLS. That port serves nothing else, and
    its traffic is not in the run's kernel bytes.
    """

    def __init__(self) -> None:
        self._servicer = HealthServicer()
        self._own: grpc.aio.Server | None = None

    async def listen(self, address: str) -> str:
        """Serves on an address of its own; returns the address with the port that was chosen."""
        check_address(address, "--health-listen")
        self._own = grpc.aio.server(options=OPTIONS)
        port = _bind(self._own, address, None, "--health-listen")
        self.add_to(self._own)
        await self.set_status(alive=True, ready=False)
        await self._own.start()
        return f"{address.rpartition(':')[0]}:{port}"

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the health service to a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_status(self, *, alive: bool, ready: bool) -> None:
        """Sets the statuses to report."""
        for name, good in (("", alive), (SERVICE, ready)):
            status = health_pb2.HealthCheckResponse
            await self._servicer.set(name, status.SERVING if good else status.NOT_SERVING)

    async def stop(self) -> None:
        """Closes the health port, if there is one."""
        if self._own:
            await self._own.stop(0)


class GrpcServer:
    """The listening server with health and reflection.

    Args:
        address: host:port; port 0 picks a free one.
        health: The health service.
    """

    def __init__(self, address: str, tls: ServerTls | None, insecure: bool, health: Health) -> None:
        creds = server_credentials(address, tls, insecure)
        self._server, self._health = grpc.aio.server(options=OPTIONS), health
        self.port = _bind(self._server, address, creds, "--listen")
        self.address = f"{address.rpartition(':')[0]}:{self.port}"

    async def start(self, servicer: Servicer) -> None:
        """Starts serving."""
        self._server.add_generic_rpc_handlers((servicer.build_handlers(),))
        self._health.add_to(self._server)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self._server.start()
        await self._health.set_status(alive=True, ready=True)

    async def stop(self, grace_s: float) -> None:
        """Reports NOT_SERVING, lets calls end, and closes."""
        with contextlib.suppress(Exception):
            await self._health.set_status(alive=False, ready=False)
        await self._server.stop(grace_s)
