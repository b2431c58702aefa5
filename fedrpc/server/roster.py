"""The sessions of clients: one for each client id, alive while its stream is open and for a short time after."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fedrpc import clock as time  # without the time in which this process stood still
from fedrpc.errors import Refused, WireError
from fedrpc.wire.envelope import Cancel, Finished

if TYPE_CHECKING:
    from fedrpc.server.mailbox import Delivery


class IdTaken(Refused):
    """Another live client uses this id."""


class OutOfRange(Refused):
    """The run has no such client id."""


class UnknownSession(Refused):
    """A session that this server did not open or has closed; the client must join again."""


class Link(Protocol):
    """The open stream of one process, as the mailbox sees it; each call only queues what is to be sent."""

    @property
    def num_sessions(self) -> int:
        """How many clients' sessions the stream serves."""

    def send_task(self, delivery: Delivery) -> None:
        """Sends a task."""

    def send_cancel(self, session: Session, cancel: Cancel) -> None:
        """Tells a client that nobody waits for an answer any more."""

    def drop_session(self, session: Session) -> None:
        """Gives up a session that the client has opened anew."""

    def send_finished(self, finished: Finished) -> None:
        """Tells all clients of the stream that the run is over."""


@dataclass(eq=False)
class Session:
    """A client that has joined.

    Args:
        number: Names the session in frames.
        last_seen: When its stream was last open, or when it joined.
        link: Its open stream.
        renews: Whether it ends the client's absence: it has a stream, or is the first since the client had one.
    """

    number: int
    client: int
    instance: str
    last_seen: float
    link: Link | None = None
    renews: bool = True

    def is_alive(self, now: float, grace_s: float) -> bool:
        """Whether the client has a stream, or had one within the last `grace_s` seconds."""
        return self.link is not None or now - self.last_seen <= grace_s


class Roster:
    """Opens, finds and closes sessions.

    Args:
        num_clients: Ids run from 0 to this, exclusive.
        grace_s: How long a session lives without a stream.
    """

    def __init__(self, num_clients: int, grace_s: float) -> None:
        self._num_clients, self._grace_s = num_clients, grace_s
        self._by_client: dict[int, Session] = {}
        self._joined: dict[bytes, list[Session]] = {}  # by token, until a stream takes them
        self._certificates: dict[bytes, bytes] = {}  # over which these tokens were given
        self._without_link: dict[Session, None] = {}
        self._gone_since: dict[int, float] = {}
        self._unlinked: set[int] = set()  # who has joined since it last had a stream
        self._joins: Counter[int] = Counter()
        self._devices: dict[int, str] = {}  # by client, as its process said last
        self._opened = time.monotonic()
        self._num_opened = 0
        self._changed = asyncio.Event()

    def join(
        self, members: Sequence[tuple[int, str]], certificate: bytes = b""
    ) -> tuple[bytes, list[Session], list[Session]]:
        """Opens a session for each (client id, instance), or for none.

        Args:
            certificate: Tells the process's certificate from others, b"" when it has shown none.

        Returns:
            The token with which a stream takes these sessions, the sessions, and those that they replace.

        Raises:
            OutOfRange: The run has no such client.
            IdTaken: Another live process runs this client.
        """
        self.check_join(members)
        now = time.monotonic()
        replaced = [self._by_client[client] for client, _ in members if client in self._by_client]
        for old in replaced:
            self.close(old)
            link, old.link = old.link, None  # what its stream still says for it is refused
            if link:
                link.drop_session(old)
        sessions = [self._open(client, instance, now) for client, instance in members]
        token = secrets.token_bytes(16)
        self._joined[token], self._certificates[token] = sessions, certificate
        self._changed.set()
        return token, sessions, replaced

    def check_join(self, members: Sequence[tuple[int, str]]) -> None:
        """Raises what `join` would raise."""
        now = time.monotonic()
        if len(dict(members)) < len(members):
            raise WireError("a Join names a client twice")
        for client, instance in members:
            if client >= self._num_clients:
                raise OutOfRange(f"client id {client} is out of range: the run has 0 to {self._num_clients - 1}")
            old = self._by_client.get(client)
            if old and old.instance != instance and old.is_alive(now, self._grace_s):
                raise IdTaken(f"client id {client} is used by another live client; stop that one or choose another id")

    def _open(self, client: int, instance: str, now: float) -> Session:
        self._num_opened += 1
        self._joins[client] += 1
        session = Session(self._num_opened, client, instance, now, renews=client not in self._unlinked)
        self._unlinked.add(client)
        self._by_client[client] = session
        self._without_link[session] = None
        return session

    def attach(self, token: bytes, link: Link, certificate: bytes = b"", device: str = "") -> list[Session]:
        """Gives the sessions of a Join to a stream; returns those that are still open.

        Args:
            device: What their process says that it trains on.

        Raises:
            UnknownSession: There is no such token.
            Refused: It was given over another certificate; who has that one can still use it.
        """
        if token not in self._joined:
            raise UnknownSession("unknown token; join again")
        if certificate != (wanted := self._certificates[token]):
            raise Refused(
                f"the token was given over another certificate: expected SHA-256 {wanted.hex()[:16] or 'of none'}, got "
                f"{certificate.hex()[:16] or 'none'}; join with the certificate of the stream"
            )
        sessions = [session for session in self._forget_token(token) if self.get(session.client) is session]
        for session in sessions:
            session.link, session.renews = link, True
            self._unlinked.discard(session.client)
            self._without_link.pop(session, None)
            self._devices[session.client] = device or "unknown"
        return sessions

    def count_devices(self) -> list[dict[str, str | int]]:
        """What clients said last that they train on, and how many said so; that is no fact."""
        return [{"said": said, "clients": count} for said, count in Counter(self._devices.values()).most_common()]

    def _forget_token(self, token: bytes) -> list[Session]:
        del self._certificates[token]
        return self._joined.pop(token)

    def detach(self, session: Session) -> None:
        """Notes that a session's stream has ended."""
        session.link, session.last_seen = None, time.monotonic()
        if self.get(session.client) is session:
            self._without_link[session] = None

    def get(self, client: int) -> Session | None:
        """Returns a client's open session, or None."""
        return self._by_client.get(client)

    def close(self, session: Session) -> None:
        """Ends a session."""
        self._without_link.pop(session, None)
        if self._by_client.get(session.client) is session:
            del self._by_client[session.client]
            if session.renews:
                self._gone_since[session.client] = time.monotonic()

    def find_lost(self) -> list[Session]:
        """Lists the sessions that are no longer alive; forgets tokens that nobody used."""
        now = time.monotonic()
        for token in [t for t, sessions in self._joined.items() if now - sessions[0].last_seen > self._grace_s]:
            self._forget_token(token)
        return [session for session in self._without_link if not session.is_alive(now, self._grace_s)]

    def measure_absence(self, client: int) -> float:
        """Returns the seconds since a client left (not since a task: many tasks for a dead client wait only once).

        A client that joins again and again, but never opens its stream, stays absent.
        """
        session = self._by_client.get(client)
        if session and session.renews:
            return 0.0
        return time.monotonic() - self._gone_since.get(client, self._opened)

    def has_rejoined(self, client: int) -> bool:
        """Whether a client has joined more than once."""
        return self._joins[client] > 1

    @property
    def num_clients(self) -> int:
        """How many clients the run has."""
        return self._num_clients

    @property
    def num_linked(self) -> int:
        """How many clients have a stream."""
        return len(self._by_client) - len(self._without_link)

    @property
    def all_linked(self) -> bool:
        """Whether every session has its stream."""
        return not self._without_link

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_client.values()))

    def __len__(self) -> int:
        return len(self._by_client)

    async def wait_for_all(self, timeout_s: float) -> list[int]:
        """Waits until every client has joined; returns the ids that are missing when time is up."""
        await self.wait_for(self._num_clients, timeout_s)
        return self.list_absent()

    def list_absent(self) -> list[int]:
        """The ids of the clients without a session."""
        return [client for client in range(self._num_clients) if client not in self._by_client]

    async def wait_for(self, number: int, timeout_s: float) -> bool:
        """Waits until so many clients have joined; returns whether they had before time was up."""
        give_up = time.monotonic() + timeout_s
        while len(self) < number and (left := give_up - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
            except TimeoutError:
                continue
        return len(self) >= number
