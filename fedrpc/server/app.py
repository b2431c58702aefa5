"""Serves Greet, Join and Connect, health and reflection: the only module of the server that knows gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

import fedrpc
from fedrpc import clock as time  # without the time in which this process stood still
from fedrpc import log
from fedrpc.errors import Altered, DiskFull, FedrpcError, Refused, Unavailable, WireError
from fedrpc.log import MAX_TEXT, clean_text
from fedrpc.privacy.heads import HeadsFile
from fedrpc.privacy.ledger import PrivacyFile
from fedrpc.server.allowance import Allowance
from fedrpc.server.connection import Connection
from fedrpc.server.coordinator import Coordinator
from fedrpc.server.desk import Desk
from fedrpc.server.gatekeeper import Applicant, Gatekeeper, read_certificate
from fedrpc.server.roster import IdTaken, OutOfRange, Roster, Session, UnknownSession
from fedrpc.server.rounds import ServerContext
from fedrpc.server.sockets import Peer, Sockets, parse_peer
from fedrpc.tls.credentials import ServerTls, server_credentials
from fedrpc.tls.endpoint import check_address, is_loopback
from fedrpc.wire.frames import MAX_JOINING, SCHEMA_DIGEST, SERVICE, count_field_bytes, parse
from fedrpc.wire.ledger import LedgerFile, Rows, merge
from fedrpc.wire.sealing import SEAL_BYTES, check_seal, seal
from fedrpc.wire.v2 import coordinator_pb2 as pb

# The status code of each error on the wire; the first match counts.
STATUS: list[tuple[type[Exception], grpc.StatusCode]] = [
    (UnknownSession, grpc.StatusCode.UNAUTHENTICATED),
    (OutOfRange, grpc.StatusCode.OUT_OF_RANGE),
    (IdTaken, grpc.StatusCode.ALREADY_EXISTS),
    (Refused, grpc.StatusCode.FAILED_PRECONDITION),
    (Altered, grpc.StatusCode.DATA_LOSS),
    (WireError, grpc.StatusCode.INVALID_ARGUMENT),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (FedrpcError, grpc.StatusCode.INTERNAL),
]

_ABORT_S = 5.0
# Calls over one connection: a process of 10,000 clients makes 41 at once, and as many when it comes again. Behind a
# proxy all clients may share a connection.
_SPARE_CALLS, _CALLS_S = 100, 5.0
_SPARE_STREAMS = 16
_HEALTH_CONNECTIONS = 32  # on a port of its own; a probe has one
_CALLS_END_S = 2.0  # they are over when a server has stopped, but for a handler that is slow to clean up
# Joins of one client: over and over again over new connections, too.
_JOINS, _JOINS_S = 300, 2.0
OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind the same port
    ("grpc.http2.bdp_probe", 0),  # with it, gRPC buffers whole models for slow readers
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.http2.max_frame_size", 1 << 20),  # 9 bytes a MiB instead of 9 bytes in 16 KiB
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 20_000),
]


class TooOften(Unavailable):
    """Calls come faster than any client makes them; they are refused before anything is done for them."""


class Servicer:
    """Greet, Join and Connect.

    Args:
        coordinator: The run's coordinator.
        sockets: The server's connections.
        gatekeeper: Decides who may join.
    """

    def __init__(
        self,
        server: ServerContext,
        roster: Roster,
        coordinator: Coordinator,
        book: LedgerFile,
        privacy: PrivacyFile,
        heads: HeadsFile,
        sockets: Sockets,
        gatekeeper: Gatekeeper,
    ) -> None:
        self._server, self._roster, self._coordinator = server, roster, coordinator
        self._privacy, self._gatekeeper = privacy, gatekeeper
        self._num_greeting_bytes = len(self._build_greeting())
        limits = server.problem.config.limits
        self._desk = Desk(
            server,
            roster,
            book,
            privacy,
            heads,
            limits,
            round=lambda: coordinator.round,
            sending=asyncio.Semaphore(limits.transfers),
            receiving=asyncio.Semaphore(limits.transfers),
            config_hash=server.problem.config.hash,
        )
        self._sockets = sockets
        self._connections: dict[Connection, Peer] = {}
        self._peers: dict[int, Peer] = {}  # over whose connection a client last joined
        self._calls = Allowance(3 * server.problem.config.clients + _SPARE_CALLS, _CALLS_S)
        self._joins = Allowance(_JOINS, _JOINS_S)
        self._has_refused = False
        self._failure: DiskFull | None = None  # what ends the server, not only a stream
        self._log = log.get("server")

    def build_handlers(self) -> grpc.GenericRpcHandler:
        """Builds the handlers; bytes pass through unchanged, so that a broadcast is serialised once for all clients."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Greet": grpc.unary_unary_rpc_method_handler(_report_errors(self.greet, self._note)),
                "Join": grpc.unary_unary_rpc_method_handler(_report_errors(self.join, self._note)),
                "Connect": grpc.stream_stream_rpc_method_handler(self.connect),  # frames go by read and write
            },
        )

    async def greet(self, data: bytes, context: Any) -> bytes:
        """Gives the clients of a process what they have to sign when they join."""
        self._count_call(context)
        check_seal(data, "a Greet")
        parse(pb.GreetRequest, data)
        return self._build_greeting()

    def _build_greeting(self) -> bytes:
        challenge = self._gatekeeper.make_challenge()
        return seal(pb.GreetResponse(challenge=challenge, run_id=self._server.run_id).SerializeToString())

    async def join(self, data: bytes, context: Any) -> bytes:
        """Opens a session for each client of a process, or refuses with the reason."""
        peer = self._count_call(context)
        check_seal(data, "a Join")
        request = parse(pb.JoinRequest, data)
        if request.schema_digest != SCHEMA_DIGEST:
            raise Refused(
                f"the wire schema differs: server {fedrpc.__version__} has schema {SCHEMA_DIGEST.hex()[:12]}, client "
                f"{clean_text(request.package_version) or '?'} has {request.schema_digest.hex()[:12] or 'none'}; "
                "install the same fedrpc on both sides"
            )
        if not request.members:
            raise WireError("a Join without a client")
        if len(request.members) > MAX_JOINING:
            raise WireError(f"a Join names {len(request.members)} clients, expected {MAX_JOINING} at most")
        for member in request.members:
            if len(member.instance) > MAX_TEXT:
                raise WireError(f"an instance has {len(member.instance)} characters, expected {MAX_TEXT} at most")
        names = [(member.client_id, member.instance) for member in request.members]
        self._roster.check_join(names)  # first, so that a join that is refused takes nothing from the client's own
        applicants = [
            Applicant(member.client_id, member.instance, member.public_key, member.signature, member.token_proof)
            for member in request.members
        ]
        certificate = read_certificate(context.auth_context())
        self._gatekeeper.check(applicants, request.challenge, certificate)
        for client, _ in names:
            self._take(self._joins, client, f"joins of client {client}", _JOINS_S)
        rows = {client: self._privacy.get_head(client)[0] for client, _ in names}
        self._gatekeeper.admit(applicants, request.challenge, certificate, rows)
        token, sessions, replaced = self._roster.join(names, certificate.digest)
        self._peers |= {session.client: peer for session in sessions}
        for old in replaced:
            self._server.mailbox.replace_session(old)
        if request.package_version != fedrpc.__version__:
            self._log.warning("version_skew", client=sessions[0].client, theirs=clean_text(request.package_version))
        problem = self._server.problem
        response = pb.JoinResponse(
            token=token,
            run_id=self._server.run_id,
            config=problem.config.dump_for_join(),
            dataset_digest=problem.dataset.digest,
            partition_sha256=problem.partition.sha256,
            method_digest=problem.schema_digest(),
            package_version=fedrpc.__version__,
            durable=self._server.mailbox.durable,
            admissions=[self._build_admission(session) for session in sessions],
        )
        answer = seal(response.SerializeToString())
        self._book_join(sessions, request, len(data), response, len(answer))
        self._server.progress("joined", {"joined": len(self._roster), "of": problem.config.clients})
        return answer

    def _build_admission(self, session: Session) -> pb.Admission:
        rows, head = self._privacy.get_head(session.client)
        spent = self._privacy.get_histories(session.client).items()
        return pb.Admission(
            session=session.number,
            privacy_rows=rows,
            privacy_head=head,
            privacy_spent=[
                pb.Spent(noise_multiplier=noise, sample_rate=rate, steps=steps, adjacency=adjacency)
                for adjacency, history in spent
                for noise, rate, steps in history
            ],
        )

    def _book_join(
        self, sessions: list[Session], request: pb.JoinRequest, up: int, response: pb.JoinResponse, down: int
    ) -> None:
        """Books what is said of each client under that client, and what is said of all under the first.

        The Greet before it is booked with it: its bytes are always as many.
        """
        rows: Rows = {}
        own = zip(request.members, response.admissions, strict=True)
        sizes = [(count_field_bytes(member), count_field_bytes(admission)) for member, admission in own]
        for session, (ours, theirs) in list(zip(sessions, sizes, strict=True))[1:]:
            merge(rows, self._desk.count_field("up", session.client, ours))
            merge(rows, self._desk.count_field("down", session.client, theirs))
        first = sessions[0].client
        merge(rows, self._desk.count_session("up", first, SEAL_BYTES))
        merge(rows, self._desk.count_session("down", first, self._num_greeting_bytes))
        merge(rows, self._desk.count_session("up", first, up - sum(ours for ours, _ in sizes[1:])))
        merge(rows, self._desk.count_session("down", first, down - sum(theirs for _, theirs in sizes[1:])))
        self._desk.book.book(rows)

    async def connect(self, _: Any, context: Any) -> None:
        """Serves the stream of one process."""
        try:
            peer = self._count_call(context)
        except TooOften as often:
            await _abort(context, often)

        async def read() -> bytes | None:
            data = await context.read()
            return None if data is grpc.aio.EOF else data

        certificate = read_certificate(context.auth_context()).digest
        connection = Connection(self._desk, read, context.write, lambda: self._sockets.find(peer), certificate)
        self._connections[connection] = peer
        error: FedrpcError | None = None
        try:
            # By itself: gRPC would send it with the first frame, and once more with the status when that frame's write
            # is cancelled, which fails, so that the client would never hear of the end.
            await context.send_initial_metadata(())
            await connection.run()
        except FedrpcError as broken:
            error = broken
            self._note(broken)
        except grpc.aio.BaseError:
            raise  # its client is gone
        except Exception:
            self._log.error("stream_failed", exc_info=True)  # gRPC would tell the client alone
            raise
        finally:
            del self._connections[connection]
        if error:
            self._log.warning("stream_refused", error=str(error))
            if isinstance(error, Unavailable) and peer not in self._find_used():
                self._sockets.give_up(peer)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_S):  # it would wait for a client that reads nothing
                    await _abort(context, error)

    def _count_call(self, context: Any) -> Peer:
        """Counts a call over a connection; raises TooOften."""
        peer = parse_peer(context.peer())
        self._take(self._calls, peer, "calls over one connection", _CALLS_S)
        return peer

    def _take(self, allowance: Allowance, key: Hashable, what: str, per_s: float) -> None:
        if allowance.take(key, time.monotonic()):
            return
        error = TooOften(f"too many {what}: expected at most {per_s:g} a second; wait a while")
        if not self._has_refused:  # once: they may be thousands
            self._log.warning("calls_refused", error=str(error))
        self._has_refused = True
        raise error

    def _find_used(self) -> set[Peer]:
        """The peers over whose connections clients have their streams."""
        return {peer for connection, peer in self._connections.items() if connection.num_sessions}

    def end(self) -> None:
        """Ends all streams: gRPC prints a traceback for each that is open when the event loop ends."""
        for connection in list(self._connections):
            connection.end()

    def _note(self, error: FedrpcError) -> None:
        if isinstance(error, DiskFull):
            self._failure = self._failure or error

    def check_idle(self) -> None:
        """Ends streams on which nothing moves that should; raises DiskFull when a stream could not be served for it."""
        if self._failure:
            raise self._failure
        now = time.monotonic()
        for connection in list(self._connections):
            connection.check_idle(now)

    def check_sockets(self) -> None:
        """Ends connections that no client uses."""
        self._sockets.check(time.monotonic(), self._find_used() | set(self._peers.values()))


async def _abort(context: Any, error: Exception) -> None:
    code = next((code for cls, code in STATUS if isinstance(error, cls)), grpc.StatusCode.INTERNAL)
    await context.abort(code, clean_text(str(error)))


def _report_errors(
    call: Callable[[Any, Any], Awaitable[bytes]], note: Callable[[FedrpcError], None]
) -> Callable[[Any, Any], Awaitable[bytes]]:
    """Wraps a call so that its errors reach the client as a status; a bad client never takes the server down."""

    async def answer(request: Any, context: Any) -> bytes:
        try:
            return await call(request, context)
        except FedrpcError as error:
            if not isinstance(error, TooOften):
                log.get("server").warning("call_refused", error=str(error))
            note(error)
            await _abort(context, error)
        except Exception:
            log.get("server").error("call_failed", exc_info=True)  # gRPC would tell the client alone
            raise
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


async def _let_calls_end() -> None:
    """Waits for what grpc still has to do for calls that a stopped server has ended.

    grpc prints a traceback if the loop's end cancels a call's task between the end of its handler and its own.
    """
    calls = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == "_schedule_rpc_coro"]
    if calls:
        await asyncio.wait(calls, timeout=_CALLS_END_S)


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
        limits = [("grpc.max_allowed_incoming_connections", _HEALTH_CONNECTIONS)]
        self._own = grpc.aio.server(options=OPTIONS + limits)
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
            await _let_calls_end()


class GrpcServer:
    """The listening server with health and reflection.

    Args:
        address: host:port; port 0 picks a free one.
        health: The health service.
        num_clients: Of the run.
        max_connections: How many are accepted; further ones are closed at once.
        reflection: Whether to describe the services to whoever asks; by default only on loopback.
    """

    def __init__(
        self,
        address: str,
        tls: ServerTls | None,
        insecure: bool,
        health: Health,
        *,
        num_clients: int,
        max_connections: int,
        reflection: bool | None = None,
    ) -> None:
        creds = server_credentials(address, tls, insecure)
        limits = [
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.max_concurrent_streams", num_clients + _SPARE_STREAMS),
        ]
        self._server, self._health = grpc.aio.server(options=OPTIONS + limits), health
        self._has_reflection = is_loopback(address) if reflection is None else reflection
        self.port = _bind(self._server, address, creds, "--listen")
        self.address = f"{address.rpartition(':')[0]}:{self.port}"

    async def start(self, servicer: Servicer) -> None:
        """Starts serving."""
        self._server.add_generic_rpc_handlers((servicer.build_handlers(),))
        self._health.add_to(self._server)
        if self._has_reflection:
            names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        await self._server.start()
        await self._health.set_status(alive=True, ready=True)

    async def stop(self, grace_s: float) -> None:
        """Reports NOT_SERVING, lets calls end, and closes."""
        with contextlib.suppress(Exception):
            await self._health.set_status(alive=False, ready=False)
        await self._server.stop(grace_s)
        await _let_calls_end()
