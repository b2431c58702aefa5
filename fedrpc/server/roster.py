"""The sessions of connected clients: one for each client id, alive while a poll is parked or a transfer moves."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fedrpc.errors import Refused
from fedrpc.wire.envelope import Cancel


class IdTaken(Refused):
    """Another live client uses this id."""


class OutOfRange(Refused):
    """The run has no such client id."""


class UnknownSession(Refused):
    """A session that this server did not open or has closed; the client must join again."""


@dataclass
class Session:
    """A connected client."""

    token: str
    client: int
    instance: str
    last_seen: float
    parked: asyncio.Future[Any] | None = None
    streams: int = 0  # transfers under way, in either direction
    notices: list[Cancel] = field(default_factory=list)  # for the next poll

    def is_alive(self, now: float, grace_s: float) -> bool:
        """Whether the client polls, transfers, or did so within the last `grace_s` seconds."""
        return self.parked is not None or self.streams > 0 or now - self.last_seen <= grace_s


class Roster:
    """Opens, finds and closes sessions.

    Args:
        num_clients: Ids run from 0 to this, exclusive.
        grace_s: How long a session lives without a poll or a transfer.
    """

    def __init__(self, num_clients: int, grace_s: float) -> None:
        self._num_clients, self._grace_s = num_clients, grace_s
        self._by_client: dict[int, Session] = {}
        self._by_token: dict[str, Session] = {}
        self._gone_since: dict[int, float] = {}
        self._opened = time.monotonic()
        self._changed = asyncio.Event()

    def join(self, client: int, instance: str) -> tuple[Session, Session | None]:
        """Opens a session; returns it and the one that it replaces. Raises OutOfRange or IdTaken."""
        now = time.monotonic()
        if client >= self._num_clients:
            raise OutOfRange(f"client id {client} is out of range: the run has 0 to {self._num_clients - 1}")
        old = self._by_client.get(client)
        if old and old.instance != instance and old.is_alive(now, self._grace_s):
            raise IdTaken(f"client id {client} is used by another live client; stop that one or choose another id")
        if old:
            self.close(old)
        session = Session(secrets.token_hex(16), client, instance, now)
        self._by_client[client] = self._by_token[session.token] = session
        self._changed.set()
        return session, old

    def find(self, token: str) -> Session:
        """Finds the session of a token; raises UnknownSession."""
        session = self._by_token.get(token)
        if session is None:
            raise UnknownSession("unknown session; join again")
        session.last_seen = time.monotonic()
        return session

    def get(self, client: int) -> Session | None:
        """Returns a client's open session, or None."""
        return self._by_client.get(client)

    def close(self, session: Session) -> None:
        """Ends a session."""
        self._by_token.pop(session.token, None)
        if self._by_client.get(session.client) is session:
            del self._by_client[session.client]
            self._gone_since[session.client] = time.monotonic()

    def find_lost(self) -> list[Session]:
        """Lists the sessions that are no longer alive."""
        now = time.monotonic()
        return [s for s in self if not s.is_alive(now, self._grace_s)]

    def measure_absence(self, client: int) -> float:
        """Returns the seconds since a client left (not since a task: many tasks for a dead client wait only once)."""
        if client in self._by_client:
            return 0.0
        return time.monotonic() - self._gone_since.get(client, self._opened)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_client.values()))

    def __len__(self) -> int:
        return len(self._by_client)

    async def wait_for_all(self, timeout_s: float) -> list[int]:
        """Waits until every client has joined; returns the ids that are missing when time is up."""
        give_up = time.monotonic() + timeout_s
        while len(self) < self._num_clients and (left := give_up - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
            except TimeoutError:
                continue
        return [client for client in range(self._num_clients) if client not in self._by_client]
