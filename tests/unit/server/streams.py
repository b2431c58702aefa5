"""A server's desk and the client's ends of its streams, with queues in place of gRPC, for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import torch

from fedrpc.client.transport import Task as Delivered
from fedrpc.config import LimitsConfig
from fedrpc.metrics.timing import TIMING_FILE, TimingFile
from fedrpc.privacy.heads import HeadsFile
from fedrpc.privacy.ledger import PrivacyFile
from fedrpc.server.connection import Connection
from fedrpc.server.desk import Desk
from fedrpc.server.mailbox import Mailbox, Task
from fedrpc.server.roster import Roster
from fedrpc.server.rounds import ServerContext
from fedrpc.server.spool import Spool
from fedrpc.server.timing import Timekeeper
from fedrpc.wire import tcpinfo
from fedrpc.wire.codec import encode
from fedrpc.wire.envelope import Envelope
from fedrpc.wire.frames import SMALL_BYTES, count_message_bytes, parse
from fedrpc.wire.ledger import Attempt, LedgerFile
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.altered import reseal
from tests.chain import Chain
from tests.fakes import CPU, frames_of, received, task_of
from tests.unit.server.clock import Clock
from tests.unit.wire.messages import One

WAIT_S = 10.0
CONFIG_HASH = "0123456789abcdef"
STATUS = pb.Receipt.Status
SMALL = One(torch.arange(3.0))
LARGE = One(torch.arange(2.0 * SMALL_BYTES))  # 2 MiB: two chunks


class Office:
    """All that the streams of a server share."""

    def __init__(self, folder: Path, num_clients: int, **limits: Any) -> None:
        told = LimitsConfig(**limits)
        self.roster = Roster(num_clients, told.grace_s)
        self.mailbox = Mailbox(self.roster, told, parallel=0)
        self.io, self.spool = ThreadPoolExecutor(1, "io"), Spool(folder / "spool")
        self.book, self.privacy = LedgerFile(folder), PrivacyFile(folder / "privacy.jsonl")
        self.heads = HeadsFile(folder / "heads.jsonl", "run")
        self.chains = {client: Chain(client) for client in range(num_clients)}
        self.timing = TimingFile(folder / TIMING_FILE)
        server = ServerContext(
            cast(Any, None),
            "run",
            self.mailbox,
            self.spool,
            self.io,
            self.io,
            CPU,
            lambda *_: None,
            Timekeeper(self.timing),
        )
        permits = [asyncio.Semaphore(told.transfers) for _ in range(2)]
        self.desk = Desk(
            server, self.roster, self.book, self.privacy, self.heads, told, lambda: 0, *permits, config_hash=CONFIG_HASH
        )
        self.streams: list[ClientEnd] = []

    async def connect(self, *clients: int) -> ClientEnd:
        """A process joins for these clients, and its stream takes their sessions."""
        stream = self.open(*clients)
        stream.send(pb.Frame(session=stream.number(), attach=pb.Attach(token=stream.token, config_hash=CONFIG_HASH)))
        await until(lambda: stream.connection.num_sessions == len(clients))
        return stream

    def open(self, *clients: int) -> ClientEnd:
        """A process joins for these clients and opens a stream, over which it has said nothing yet."""
        token, sessions, replaced = self.roster.join([(client, f"instance-{client}") for client in clients])
        for old in replaced:
            self.mailbox.replace_session(old)
        for client in clients:
            self.heads.register(client, self.chains[client].signer.public_key, 0)
        stream = ClientEnd(self.desk, token, {s.client: s.number for s in sessions}, self.chains)
        self.streams.append(stream)
        return stream

    def post(self, client: int, message: Any = SMALL, step: int = 0) -> Task:
        """Posts a task."""
        task = task_of(client, message, step=step)
        self.mailbox.post([task])
        return task

    def count_booked(self) -> dict[str, int]:
        """The bytes in the ledger, by direction."""
        return self.book.message_bytes

    def count_seen(self) -> dict[str, int]:
        """The bytes of the frames that crossed the streams, by direction."""
        return {
            "down": sum(count_message_bytes(len(data)) for stream in self.streams for data in stream.written),
            "up": sum(count_message_bytes(len(data)) for stream in self.streams for data in stream.was_read),
        }


class ClientEnd:
    """The client's end of one stream.

    Args:
        sessions: The session numbers by client.
        chains: The privacy rows by client.
    """

    def __init__(self, desk: Desk, token: bytes, sessions: dict[int, int], chains: dict[int, Chain]) -> None:
        self.token, self.sessions, self.chains = token, sessions, chains
        self._up: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._down: asyncio.Queue[bytes] = asyncio.Queue()
        self.was_read: list[bytes] = []
        self.written: list[bytes] = []
        self.reading = asyncio.Event()  # cleared, the client reads nothing
        self.reading.set()
        self.counted: tuple[int, int] | None = None  # bytes (sent, received) by the kernel's count, if it tells
        self.connection = Connection(desk, self._read, self._write, self._count)
        self.running = asyncio.ensure_future(self.connection.run())

    def _count(self) -> tcpinfo.Connection | None:
        return tcpinfo.Connection(0, 0, "", 0, *self.counted) if self.counted else None

    async def _read(self) -> bytes | None:
        data = await self._up.get()
        if data is not None:
            self.was_read.append(data)
        return data

    async def _write(self, data: bytes) -> None:
        self.written.append(data)
        await self.reading.wait()
        self._down.put_nowait(data)

    def number(self, client: int | None = None) -> int:
        """A client's session number, or the first client's."""
        return next(iter(self.sessions.values())) if client is None else self.sessions[client]

    def send(self, *frames: pb.Frame | bytes) -> None:
        """Sends frames."""
        for frame in frames:
            self._up.put_nowait(frame if isinstance(frame, bytes) else reseal(frame))

    def read_one(self) -> None:
        """Reads the frame that waits for it, and then no more."""
        self.reading.set()
        self.reading.clear()

    async def _receive(self) -> bytes:
        """The next frame; raises what broke the stream, if it brings none."""
        waiting = asyncio.ensure_future(self._down.get())
        await asyncio.wait([waiting, self.running], timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await asyncio.wait_for(self.running, 0)
        return await waiting

    async def receive(self) -> pb.Frame:
        """The next frame from the server."""
        return parse(pb.Frame, await self._receive())

    async def receive_task(self) -> tuple[Delivered, pb.Frame]:
        """The next task, whole, and its first frame; a receipt that did not wait for the task comes before it."""
        frames = [await self._receive()]
        while not (first := parse(pb.Frame, frames[0])).HasField("envelope"):
            frames = [await self._receive()]
        missing = sum(part.size for part in first.envelope.parts) - sum(len(chunk.data) for chunk in first.chunks)
        while missing:
            frames.append(await self._receive())
            missing -= len(parse(pb.Frame, frames[-1]).chunks[0].data)
        return received(frames, Attempt(0, "fit", "down", 0)), first

    def frames(
        self, task: Task, message: Any = SMALL, attempt: int = 0, timing: pb.Timing | None = None
    ) -> list[bytes]:
        """The frames of a result, with its privacy rows in the first."""
        payload, question = encode(message), task.question.payload.digest
        envelope = Envelope(
            task.task_id, task.round, task.phase, task.step, task.epoch, payload.parts, payload.digest, question
        )
        head, *chunks = frames_of(envelope, payload, attempt, self.number(task.client))
        first = pb.Frame.FromString(head)
        first.privacy.CopyFrom(self.chains[task.client].release(first.envelope))
        first.MergeFrom(pb.Frame(timing=timing))
        return [reseal(first), *chunks]

    async def upload(self, task: Task, message: Any = LARGE) -> list[bytes]:
        """Sends the headers of a large result and waits for the grant; returns the chunks' frames."""
        head, *chunks = self.frames(task, message)
        self.send(head)
        assert (await self.receive()).grant.task_id == task.task_id
        return chunks

    async def receive_receipt(self) -> tuple[str, str]:
        """The next frame's receipt: its status and its task."""
        receipt = (await self.receive()).receipt
        return STATUS.Name(receipt.status).removeprefix("STATUS_"), receipt.task_id

    @property
    def num_waiting(self) -> int:
        """Frames from the server that were not received yet."""
        return self._down.qsize()

    def close(self) -> None:
        """Says that nothing more comes."""
        self._up.put_nowait(None)

    async def hang_up(self) -> None:
        """Ends the stream."""
        self.close()
        await self.ended()

    async def ended(self) -> None:
        """Waits until the server has ended the stream; raises what broke it."""
        await asyncio.wait_for(self.running, WAIT_S)


@asynccontextmanager
async def office(folder: Path, num_clients: int = 2, **limits: Any) -> AsyncIterator[Office]:
    """An office that is open for a while."""
    found = Office(folder, num_clients, **limits)
    try:
        yield found
    finally:
        for stream in found.streams:
            stream.running.cancel()
        await asyncio.gather(*(stream.running for stream in found.streams), return_exceptions=True)
        found.io.shutdown()
        found.book.close()
        found.spool.close()
        found.timing.close()
        found.privacy.close()
        found.heads.close()


async def until(holds: Any) -> None:
    """Waits until something holds."""
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0)


def pass_time(clock: Clock, seconds: float, *streams: ClientEnd) -> None:
    """Lets time pass, while the server looks at these streams every second."""
    while seconds > 0:
        clock.advance(min(1.0, seconds))
        seconds -= 1
        for stream in streams:
            stream.connection.check_idle(clock.monotonic())


async def linger() -> None:
    """Waits longer than a receipt does for company."""
    await asyncio.sleep(0.03)


class Gate:
    """Occupies a thread pool of one thread until it is opened."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._event = threading.Event()
        pool.submit(self._event.wait, WAIT_S)

    def open(self) -> None:
        """Lets the pool go on."""
        self._event.set()
