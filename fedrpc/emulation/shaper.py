"""Forwards TCP connections at the pace of a link, in user space and without privileges; no byte is changed.

Each client connects to a port of its own here instead of to the server. A piece that is read in one direction waits
until the link has sent it at its rate, and then travels for half a round trip. No more is read before that: what the
link cannot take yet stays with the sender, whose writes wait as on a real link. What is on its way is bounded by the
rate times the delay.

It is a model of the link and of TCP's answer to it, not of packets: see `link.py` for what loss does. TCP's slow start
is not modelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

import numpy as np

from fedrpc.emulation.link import MSS_BYTES, Link
from fedrpc.seeds import derive

_PIECE_S = 0.02  # a piece is what the link sends in this time: shorter ones cost more CPU, ...
_MAX_PIECE_BYTES = 256 << 10  # ... and larger ones memory
_LEAST_BUFFER = 32 << 10  # of a socket
_MAX_BUFFER = 1 << 20
_MAX_TRAVELLING = 32 << 20  # in one direction of a connection


class Blackouts:
    """When a link is away: for the same time each, after gaps of random length.

    Args:
        began: When the link's life began; it begins with a gap.
    """

    def __init__(self, link: Link, rng: np.random.Generator, began: float) -> None:
        self._link, self._rng = link, rng
        self._start = began + self._draw_gap()

    def _draw_gap(self) -> float:
        return float(self._rng.exponential(self._link.every)) if self._link.blackout else math.inf

    def delay(self, moment: float) -> float:
        """When something that is due at a moment can happen; moments must not go back."""
        while moment >= self._start + self._link.blackout:
            self._start += self._link.blackout + self._draw_gap()
        return self._start + self._link.blackout if moment >= self._start else moment


class Lane:
    """One direction of a client's link, which all its connections share.

    Args:
        rng: Draws jitter and lost packets.
        blackouts: Of its own, though they are at the same times as the other direction's.
    """

    def __init__(self, link: Link, direction: str, rng: np.random.Generator, blackouts: Blackouts) -> None:
        self._link, self._rng, self._blackouts = link, rng, blackouts
        self._rate = link.get_rate(direction) / 8  # bytes a second
        self._free_at = -math.inf  # when all that was taken is sent

    @property
    def piece_bytes(self) -> int:
        """How much to read at a time."""
        return int(min(_MAX_PIECE_BYTES, max(MSS_BYTES, self._rate * _PIECE_S)))

    @property
    def buffer_bytes(self) -> int:
        """How large a socket's buffer should be: what travels within a round trip, and a few pieces."""
        return int(min(_MAX_BUFFER, max(_LEAST_BUFFER, self._rate * (self._link.rtt + 4 * _PIECE_S))))

    @property
    def travelling_bytes(self) -> int:
        """How much can be on its way: what the link sends within the longest time that a piece travels, and more."""
        return int(min(_MAX_TRAVELLING, 2 * self._rate * (2 * self._link.rtt + _PIECE_S) + _MAX_PIECE_BYTES))

    def send(self, size: int, ready_at: float) -> tuple[float, float]:
        """Sends a piece: returns when it has left, so that the next one can be read, and when it arrives.

        Args:
            ready_at: Since when it waits.
        """
        start = self._blackouts.delay(max(self._free_at, ready_at))
        self._free_at = start + size / self._rate
        return self._free_at, self._free_at + self._draw_travel(size)

    def _draw_travel(self, size: int) -> float:
        link = self._link
        travel = (link.rtt + link.jitter * float(self._rng.uniform(-1, 1))) / 2 if link.jitter else link.rtt / 2
        if link.loss:
            arrives_whole = (1 - link.loss) ** math.ceil(size / MSS_BYTES)
            travel += link.rtt if self._rng.random() > arrives_whole else 0.0
        return travel


class _Way:
    """The pieces that travel, in order, each with the moment of its arrival.

    Args:
        max_bytes: How much may travel before who puts in more has to wait: a receiver may be slower than the link.
    """

    def __init__(self, max_bytes: int) -> None:
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._max_bytes, self._size_bytes = max_bytes, 0
        self._changed = asyncio.Event()

    async def put(self, arrives: float, data: bytes) -> None:
        while self._size_bytes > self._max_bytes:
            self._changed.clear()
            await self._changed.wait()
        self._pieces.append((arrives, data))
        self._size_bytes += len(data)
        self._changed.set()

    async def get(self) -> bytes:
        """Waits for the next piece to arrive; an empty one is the end."""
        while not self._pieces:
            self._changed.clear()
            await self._changed.wait()
        arrives, data = self._pieces[0]
        await _sleep_until(arrives)
        return data

    def pop(self) -> None:
        """Forgets the piece that was got."""
        _, data = self._pieces.popleft()
        self._size_bytes -= len(data)
        self._changed.set()


async def forward(reader: socket.socket, writer: socket.socket, lane: Lane) -> None:
    """Forwards one direction of a connection until its end, and passes that on.

    Raises:
        OSError: A side has broken the connection.
    """
    loop, way = asyncio.get_running_loop(), _Way(lane.travelling_bytes)

    async def deliver() -> None:
        while data := await way.get():
            await loop.sock_sendall(writer, data)
            way.pop()
        writer.shutdown(socket.SHUT_WR)

    async def take() -> None:
        left, arrives = time.monotonic(), 0.0
        while True:
            try:  # what is there already has waited for the link, however late this process comes to read it
                data, ready_at = reader.recv(lane.piece_bytes), left
            except BlockingIOError:
                data, ready_at = await loop.sock_recv(reader, lane.piece_bytes), time.monotonic()
            left, at = lane.send(len(data), ready_at)
            arrives = max(arrives, at)  # order is kept
            await way.put(arrives, data)
            if not data:
                return
            await _sleep_until(left)

    await _run_both(take(), deliver())


async def _sleep_until(moment: float) -> None:
    if (left := moment - time.monotonic()) > 0:
        await asyncio.sleep(left)


async def _run_both(*parts: Coroutine[Any, Any, None]) -> None:
    """Runs until both have ended, or one has failed."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Shaper:
    """One client's way to the server.

    Args:
        link: What it is like.
        seed: The run's.
    """

    def __init__(self, link: Link, seed: int = 0, client: int = 0) -> None:
        def rng(purpose: str) -> np.random.Generator:
            return derive(seed, "shaper", purpose, client)

        began, self._link = time.monotonic(), link
        self._down, self._up = (
            Lane(link, direction, rng(direction), Blackouts(link, rng("blackouts"), began))
            for direction in ("down", "up")
        )
        self._server = ("", 0)
        self._listener = _make_socket(self._up.buffer_bytes)
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def open(self, server: str, at: str = "127.0.0.1") -> str:
        """Begins to accept connections for a server, HOST:PORT; returns the address to connect to instead.

        Args:
            at: The address to accept them at.
        """
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener.bind((at, 0))
        self._listener.listen(16)
        self._accepting = asyncio.ensure_future(self._accept())
        return f"{at}:{self._listener.getsockname()[1]}"

    async def close(self) -> None:
        """Ends all connections."""
        tasks = [*self._connections, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(self._listener)
            near.setblocking(False)
            task = asyncio.ensure_future(self._serve(near))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, near: socket.socket) -> None:
        # When one side is gone, closing both tells the other.
        with near, _make_socket(self._down.buffer_bytes) as far, contextlib.suppress(OSError):
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.sleep(self._link.rtt)  # TCP's handshake
            await asyncio.get_running_loop().sock_connect(far, self._server)
            await _run_both(forward(far, near, self._down), forward(near, far, self._up))


def _make_socket(receive_bytes: int) -> socket.socket:
    """A socket that takes in only so much before it is read: more would leave a sender as if the link were faster."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    # As on a network: with loopback's packets of 64 KiB, a sender's kernel would keep megabytes that it has not sent.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, MSS_BYTES)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
