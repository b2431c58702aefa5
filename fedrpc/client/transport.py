"""The client's end of the wire: Join and the stream; it books every byte of a task and translates gRPC's errors."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

import fedrpc
from fedrpc.errors import Altered, FedrpcError, MethodFailed, Refused, Taken, Unavailable, WireError
from fedrpc.log import clean_text
from fedrpc.privacy.ledger import parse_history
from fedrpc.privacy.mechanisms import Histories, History
from fedrpc.tls.credentials import ClientTls, channel_credentials
from fedrpc.wire.codec import Payload
from fedrpc.wire.envelope import FAILURE_CODES, ClientTiming, Envelope, build_envelope, build_timing, read_envelope
from fedrpc.wire.frames import (
    EMPTY_BODY,
    MAX_MISSED_HEARTBEATS,
    SCHEMA_DIGEST,
    SERVICE,
    Assembler,
    announces_chunks,
    assemble_frame,
    fits_frame,
    load_payload,
    parse,
    read_chunk,
    read_frame,
    seal_frame,
    serialise_body,
    serialise_chunks,
    serialise_frame,
)
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import Attempt, Rows, count_other_fields, list_inline
from fedrpc.wire.receiving import LEAST_BYTES_S, Receiver
from fedrpc.wire.sealing import check_seal, seal
from fedrpc.wire.tcpinfo import Meter
from fedrpc.wire.v2 import coordinator_pb2 as pb

_CALL_S = 30.0  # for Greet and Join
_REFUSALS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
}
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a socket of its own for each transport, even within one process
    ("grpc.enable_retries", 0),  # the client retries by itself, and books every attempt
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.http2.max_frame_size", 1 << 20),  # 9 bytes a MiB instead of 9 bytes in 16 KiB
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # for a connection to open: some round trips, TLS among them
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
NO_TIMING = ClientTiming()


class SessionLost(FedrpcError):
    """The server does not know this session (it restarted, or closed the session): join again."""


@dataclass(frozen=True)
class Task:
    """A question that arrived completely.

    Attributes:
        download_s: From its first frame to its last.
        received_at: When it was complete.
    """

    envelope: Envelope
    buffers: list[memoryview]
    download_s: float = 0.0
    received_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Failure:
    """Why a client has no answer to a task; abstaining is a choice, not an error.

    Args:
        failed: What failed, if it would fail again.
    """

    reason: str
    abstained: bool = False
    failed: type[MethodFailed] | None = None


@dataclass(frozen=True)
class Admission:
    """What the server says of one client that joined.

    Attributes:
        session: Names the client in frames.
        privacy_rows: How many of this client's privacy rows the server holds.
        privacy_head: The hash of the last of them.
        privacy_spent: What they spent together, by adjacency.
    """

    session: int
    privacy_rows: int
    privacy_head: bytes
    privacy_spent: Histories


@dataclass(frozen=True)
class Welcome:
    """What the server replies to Join.

    Attributes:
        config: The run's configuration, as JSON.
        durable: How many durable points the run has reached.
        admissions: In the order of the clients that joined.
    """

    token: bytes
    run_id: str
    config: str
    dataset_digest: str
    partition_sha256: str
    method_digest: bytes
    package_version: str
    durable: int
    admissions: tuple[Admission, ...]


@dataclass(frozen=True)
class Receipt:
    """What the server replies to a result: its durable points, and how many of our privacy rows it holds."""

    durable: int
    privacy_rows: int


@dataclass(frozen=True)
class SignedRows:
    """Privacy rows that the server does not hold yet.

    Attributes:
        first: The index of the first of them in the client's chain.
        signature: The client's, of the chain's head after the last of them.
    """

    first: int
    rows: Sequence[str]
    signature: bytes


@dataclass(frozen=True)
class Greeting:
    """What the server replies to Greet: its run, and what clients have to sign to join it, once."""

    run_id: str
    challenge: bytes


@dataclass(frozen=True)
class Proof:
    """What shows at Join that a client is who it says.

    Attributes:
        public_key: The client's.
        signature: Made with its key.
        token_proof: Made with its join token; b"" when it has none.
    """

    public_key: bytes
    signature: bytes
    token_proof: bytes


class Applicant(Protocol):
    """A client that joins; its instance distinguishes it from another one with its id."""

    client: int
    instance: str

    def prove(self, run_id: str, challenge: bytes) -> Proof:
        """Proves who it is, for one Join."""


class Listener(Protocol):
    """A client, as its stream sees it."""

    client: int

    def receive_task(self, task: Task) -> None:
        """Takes a task that arrived completely."""

    def receive_cancel(self, task_id: str) -> None:
        """Learns that nobody waits for an answer any more."""

    def receive_durable(self, durable: int) -> None:
        """Learns how many durable points the run has reached."""

    def book(self, rows: Rows) -> None:
        """Adds the rows of a closed attempt to the client's ledger."""


class Transport:
    """One channel to one server.

    Args:
        address: host:port.
        channel: A channel within this process, instead of gRPC's.
    """

    def __init__(
        self, address: str, *, tls: ClientTls | None = None, insecure: bool = False, channel: Any = None
    ) -> None:
        self.address, self._is_local = address, channel is not None
        self._channel = channel or _open_channel(address, channel_credentials(address, tls, insecure))
        # Bytes pass through these calls unchanged: an answer is serialised once and sent as often as needed.
        self._greet: Any = self._channel.unary_unary(f"/{SERVICE}/Greet")
        self._join: Any = self._channel.unary_unary(f"/{SERVICE}/Join")
        self._connect: Any = self._channel.stream_stream(f"/{SERVICE}/Connect")

    async def greet(self) -> Greeting:
        """Asks for what the clients of the next Join have to sign."""
        answer = parse(pb.GreetResponse, await self._call(self._greet, pb.GreetRequest(), "the answer to Greet"))
        return Greeting(answer.run_id, answer.challenge)

    async def join(self, applicants: Sequence[Applicant], greeting: Greeting) -> Welcome:
        """Opens a session for each client, which proves that it holds its key, and its join token if it has one."""
        request = pb.JoinRequest(
            members=[_build_member(applicant, greeting) for applicant in applicants],
            package_version=fedrpc.__version__,
            schema_digest=SCHEMA_DIGEST,
            challenge=greeting.challenge,
        )
        return _read_welcome(parse(pb.JoinResponse, await self._call(self._join, request, "the answer to Join")))

    async def _call(self, call: Any, request: pb.GreetRequest | pb.JoinRequest, what: str) -> bytes:
        """Makes a call, and checks that its answer came as it was sent."""
        try:
            answer: bytes = await call(seal(request.SerializeToString()), timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from None
        check_seal(answer, what)
        return answer

    def connect(self, max_bytes: int, heartbeat_s: float, pool: Executor) -> Stream:
        """Opens the stream; the caller runs it."""
        if self._is_local:  # stands still as a whole, as in a debugger
            return Stream(self._connect(), max_bytes, heartbeat_s, pool, self._translate, silence_s=math.inf)
        meter = Meter(int(self.address.rpartition(":")[2]), local=False)
        return Stream(
            self._connect(),
            max_bytes,
            heartbeat_s,
            pool,
            self._translate,
            count_moved=lambda: sum(meter.read()),
            count_resent=lambda: sum(connection.resent for connection in meter.open.values()),
        )

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
        if code == grpc.StatusCode.DATA_LOSS:
            return Altered(text)
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            return WireError(text)
        return Unavailable(f"no fedrpc server answers at {self.address}: {text.splitlines()[0] if text else code}")

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()


def _open_channel(address: str, creds: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(address, creds, OPTIONS) if creds else grpc.aio.insecure_channel(address, OPTIONS)


class _Sending:
    """A result on its way: what the server says of it."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.granted: asyncio.Future[None] = loop.create_future()
        self.receipt: asyncio.Future[pb.Receipt] = loop.create_future()

    def fail(self, error: Exception) -> None:
        if not self.receipt.done():
            self.receipt.set_exception(error)
            self.receipt.exception()  # seen, even if nobody waits for it any more


class Stream:
    """The one stream of a connection.

    Args:
        call: The gRPC call.
        max_bytes: The largest message that is accepted.
        heartbeat_s: The time between heartbeats; a server that misses three is gone.
        pool: For hashing large messages.
        translate: Turns a gRPC error into one of ours.
        count_moved: The bytes that went to and came from the server by the kernel's count, which moves within a frame.
        count_resent: The segments that the kernel had sent again when `count_moved` was last called.
        silence_s: How long the server may be silent, if not for three heartbeats.
    """

    def __init__(
        self,
        call: Any,
        max_bytes: int,
        heartbeat_s: float,
        pool: Executor,
        translate: Callable[[Any], FedrpcError],
        count_moved: Callable[[], int] = lambda: 0,
        count_resent: Callable[[], int] = lambda: 0,
        *,
        silence_s: float | None = None,
    ) -> None:
        self._call, self._max_bytes, self._heartbeat_s, self._pool = call, max_bytes, heartbeat_s, pool
        self._translate, self._count_moved, self._num_moved = translate, count_moved, 0
        self._count_resent = count_resent
        self._silence_s = MAX_MISSED_HEARTBEATS * heartbeat_s if silence_s is None else silence_s
        self._listeners: dict[int, Listener] = {}
        self._writing, self._sending_large = asyncio.Lock(), asyncio.Lock()
        self._heard_at = time.monotonic()
        self._sent: dict[tuple[int, str], _Sending] = {}
        self._download: tuple[Listener, pb.Envelope, Receiver, float] | None = None  # since when it comes
        self.was_useful = False  # whether the server accepted a result

    async def attach(self, token: bytes, config_hash: str, listeners: Mapping[int, Listener], device: str = "") -> None:
        """Takes the sessions of a Join.

        Args:
            config_hash: Of the configuration that the clients train with; the server compares it with its own.
            listeners: By session.
            device: What they train on, always as long.
        """
        self._listeners |= listeners
        attach = pb.Attach(token=token, config_hash=config_hash, device=device)
        await self._write(seal_frame(pb.Frame(session=next(iter(listeners)), attach=attach)))

    async def run(self) -> str:
        """Serves the stream until the run is over; returns the reason. Raises what broke the stream."""
        work = [asyncio.ensure_future(part) for part in (self._receive(), self._beat())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            return next(str(part.result()) for part in done)
        finally:
            for part in work:
                part.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            self._call.cancel()
            for sending in self._sent.values():
                sending.fail(Unavailable("the stream broke"))
            if self._download:
                listener, _, receiver, _ = self._download
                await receiver.abandon()
                listener.book(receiver.attempt.close(aborted=True))

    async def _beat(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            before, self._num_moved = self._num_moved, self._count_moved()
            if self._num_moved - before >= LEAST_BYTES_S * self._heartbeat_s:
                self._heard_at = time.monotonic()  # a frame is on its way: on a slow link that takes minutes
            if time.monotonic() - self._heard_at > self._silence_s:
                raise Unavailable(f"the server was silent for {self._silence_s:g} s")
            session = next(iter(self._listeners))
            await self._write(seal_frame(pb.Frame(session=session, heartbeat=pb.Heartbeat())))

    async def _write(self, data: bytes) -> None:
        try:
            async with self._writing:
                await self._call.write(data)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from None
        except asyncio.InvalidStateError:
            raise Unavailable("the stream broke") from None

    # Receiving

    async def _receive(self) -> str:
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                self._heard_at = time.monotonic()
                if chunk := read_chunk(data):
                    await self._receive_chunk(*chunk, len(data))
                elif reason := await self._handle(read_frame(data), len(data)):
                    return reason
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from None
        raise Unavailable("the server closed the stream")

    async def _handle(self, frame: pb.Frame, size: int) -> str:
        """Handles a frame; returns the reason for the end of the run when it says so."""
        listener = self._listeners.get(frame.session)
        if listener is None:
            raise WireError(f"got a frame of session {frame.session}, which is not of this stream")
        if frame.HasField("receipt"):
            self.was_useful |= frame.receipt.status == pb.Receipt.STATUS_ACCEPTED
            self._settle(frame.session, frame.receipt)
            if frame.receipt.status in (pb.Receipt.STATUS_LATE, pb.Receipt.STATUS_DUPLICATE):
                # At once: the same frame may ask the same question again (a server that came back), and a task that
                # is still on hand would be ignored as delivered twice.
                listener.receive_cancel(frame.receipt.task_id)
        if frame.HasField("grant"):
            sending = self._sent.get((frame.session, frame.grant.task_id))
            if sending and not sending.granted.done():
                sending.granted.set_result(None)
        if frame.HasField("cancel"):
            task_id = frame.cancel.task_id
            self._settle(frame.session, pb.Receipt(task_id=task_id, status=pb.Receipt.STATUS_LATE))
            listener.receive_cancel(task_id)
        if frame.HasField("heartbeat"):
            for other in self._listeners.values():
                other.receive_durable(frame.heartbeat.durable)
        if frame.HasField("envelope"):
            await self._receive_task(listener, frame, size)
        if frame.HasField("finished"):
            for other in self._listeners.values():
                other.receive_durable(frame.finished.durable)
            return frame.finished.reason or "the run is over"
        return ""

    def _settle(self, session: int, receipt: pb.Receipt) -> None:
        sending = self._sent.get((session, receipt.task_id))
        if sending and not sending.receipt.done():
            sending.receipt.set_result(receipt)

    async def _receive_task(self, listener: Listener, frame: pb.Frame, size: int) -> None:
        envelope = frame.envelope
        attempt = Attempt(envelope.round, envelope.phase, "down", listener.client, envelope.attempt)
        attempt.add_first(size, list_inline(frame), count_other_fields(frame))
        if announces_chunks(frame):
            receiver = Receiver(Assembler(envelope, self._max_bytes), attempt, self._pool)
            self._download = listener, envelope, receiver, time.monotonic()
            return
        buffers = assemble_frame(frame, self._max_bytes)
        listener.book(attempt.close())
        listener.receive_task(Task(read_envelope(envelope), buffers))

    async def _receive_chunk(self, part: int, data: memoryview, size: int) -> None:
        if self._download is None:
            raise WireError("got a chunk that no message announced")
        listener, envelope, receiver, since = self._download
        receiver.count(part, data, size)
        await receiver.add(part, data)
        if receiver.is_complete:
            buffers = await receiver.finish()
            self._download = None
            listener.book(receiver.attempt.close())
            listener.receive_task(Task(read_envelope(envelope), buffers, time.monotonic() - since))

    # Sending

    async def send_result(
        self,
        session: int,
        kept: Path | bytes,
        attempt_number: int,
        released: SignedRows | None = None,
        timing: ClientTiming = NO_TIMING,
    ) -> Receipt:
        """Sends a kept answer: a small one in one frame, a larger one chunk by chunk from its file.

        Args:
            released: Privacy rows that the server does not hold yet.
            timing: What answering took.
        """
        answer, payload = load_payload(kept)
        body = serialise_body(payload)
        rows = pb.PrivacyRows(**vars(released)) if released else None
        others = pb.Frame(privacy=rows, timing=self._build_timing(timing)).SerializeToString()
        envelope = build_envelope(answer, attempt=attempt_number, with_parts=False)
        head = serialise_frame(session, envelope, body, others)
        attempt = Attempt(answer.round, answer.phase, "up", self._listeners[session].client, attempt_number)
        attempt.add_first(len(head), body.inline, len(others))
        large = None if fits_frame(payload) else payload
        return await self._send(session, answer.task_id, head, attempt, large)

    def _build_timing(self, timing: ClientTiming) -> pb.Timing:
        return build_timing(replace(timing, resent=self._count_resent()))

    async def send_failure(
        self, session: int, question: Envelope, failure: Failure, timing: ClientTiming = NO_TIMING
    ) -> Receipt:
        """Sends the reason why there is no answer."""
        code = pb.Failure.CODE_ABSTAINED if failure.abstained else pb.Failure.CODE_ERROR
        code = FAILURE_CODES[failure.failed] if failure.failed else code
        envelope = pb.Envelope(
            task_id=question.task_id,
            round=question.round,
            phase=question.phase,
            step=question.step,
            question=question.digest,
            failure=pb.Failure(code=code, reason=clean_text(failure.reason)),  # a server takes no longer one
            epoch=question.epoch,
        )
        others = pb.Frame(timing=self._build_timing(timing)).SerializeToString()
        head = serialise_frame(session, envelope, EMPTY_BODY, others)
        attempt = Attempt(question.round, question.phase, "up", self._listeners[session].client)
        attempt.add_first(len(head), (), len(others))
        return await self._send(session, question.task_id, head, attempt, None, is_answer=failure.abstained)

    async def _send(
        self,
        session: int,
        task_id: str,
        head: bytes,
        attempt: Attempt,
        large: Payload | None,
        *,
        is_answer: bool = True,
    ) -> Receipt:
        """Sends a result; its bytes count as completed only when it was accepted, and is no error."""
        sending = self._sent[session, task_id] = _Sending()
        accepted = False
        try:
            if large is None:
                await self._write(head)
            else:
                await self._send_large(head, large, attempt, sending)
            receipt = await sending.receipt
            accepted = receipt.status == pb.Receipt.STATUS_ACCEPTED
            if receipt.status == pb.Receipt.STATUS_REFUSED:
                raise WireError(receipt.reason)
            return Receipt(receipt.durable, receipt.privacy_rows)
        finally:
            self._sent.pop((session, task_id), None)
            self._listeners[session].book(attempt.close(aborted=not (accepted and is_answer)))

    async def _send_large(self, head: bytes, payload: Payload, attempt: Attempt, sending: _Sending) -> None:
        """Sends the headers, and the chunks once the server has room for them, unless it does not want them."""
        async with self._sending_large:
            await self._write(head)
            said: list[asyncio.Future[Any]] = [sending.granted, sending.receipt]
            await asyncio.wait(said, return_when=asyncio.FIRST_COMPLETED)
            for index, size, data in serialise_chunks(payload):
                if sending.receipt.done():
                    return
                attempt.add(Kind(payload.parts[index].kind), len(data), size)
                await self._write(data)


def _build_member(applicant: Applicant, greeting: Greeting) -> pb.Member:
    proof = applicant.prove(greeting.run_id, greeting.challenge)
    return pb.Member(
        client_id=applicant.client,
        instance=applicant.instance,
        public_key=proof.public_key,
        signature=proof.signature,
        token_proof=proof.token_proof,
    )


def _read_welcome(answer: pb.JoinResponse) -> Welcome:
    return Welcome(
        token=answer.token,
        run_id=answer.run_id,
        config=answer.config,
        dataset_digest=answer.dataset_digest,
        partition_sha256=answer.partition_sha256,
        method_digest=answer.method_digest,
        package_version=answer.package_version,
        durable=answer.durable,
        admissions=tuple(_read_admission(admission) for admission in answer.admissions),
    )


def _read_admission(admission: pb.Admission) -> Admission:
    spent: dict[str, History] = {}
    for entry in admission.privacy_spent:
        try:
            cost = parse_history([(entry.noise_multiplier, entry.sample_rate, entry.steps)])
        except ValueError as error:
            raise WireError(f"what the server says that this client spent cannot be read: {error}") from None
        spent[entry.adjacency] = spent.get(entry.adjacency, ()) + cost
    return Admission(admission.session, admission.privacy_rows, admission.privacy_head, spent)
