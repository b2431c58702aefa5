"""The client's end of a stream: what arrives is whole, what is sent is booked, and a break keeps nobody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
import torch

from fedrpc.client import transport
from fedrpc.client.transport import Failure, Receipt, SignedRows, Stream, Task
from fedrpc.errors import Diverged, FedrpcError, MethodFailed, Unavailable, WireError
from fedrpc.wire.codec import decode, encode
from fedrpc.wire.envelope import ClientTiming, Envelope, read_timing
from fedrpc.wire.frames import SMALL_BYTES, count_message_bytes, read_chunk, seal_frame, serialise_file
from fedrpc.wire.ledger import Rows, merge
from fedrpc.wire.sealing import SEAL_BYTES, seal
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.altered import alter, list_paths, reseal, serialise_altered
from tests.fakes import asynchronous, frames_of
from tests.unit.server.clock import Clock
from tests.unit.wire.messages import One, same

SMALL, LARGE = One(torch.arange(3.0)), One(torch.arange(2.0 * SMALL_BYTES))  # the large one has two chunks
WAIT_S = 10.0


class Call:
    """Stands in for the gRPC call."""

    def __init__(self) -> None:
        self._down: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: list[bytes] = []
        self.cancelled = False

    async def read(self) -> Any:
        return await self._down.get()

    async def write(self, data: bytes) -> None:
        await asyncio.sleep(0)
        if self.cancelled:
            raise asyncio.InvalidStateError
        self.sent.append(data)

    def cancel(self) -> None:
        self.cancelled = True

    def say(self, *frames: pb.Frame | bytes) -> None:
        """The server sends frames."""
        for frame in frames:
            self._down.put_nowait(frame if isinstance(frame, bytes) else reseal(frame))

    def hang_up(self) -> None:
        """The server ends the stream."""
        self._down.put_nowait(grpc.aio.EOF)

    @property
    def frames(self) -> list[pb.Frame]:
        """What was sent, without heartbeats and the attach."""
        found = [pb.Frame.FromString(data) for data in self.sent]
        return [frame for frame in found if not frame.HasField("heartbeat") and not frame.HasField("attach")]


class Recorder:
    """A client that notes what its stream tells it; implements `transport.Listener`."""

    def __init__(self, client: int) -> None:
        self.client = client
        self.tasks: list[Task] = []
        self.cancelled: list[str] = []
        self.durable = 0
        self.rows: Rows = {}

    def receive_task(self, task: Task) -> None:
        self.tasks.append(task)

    def receive_cancel(self, task_id: str) -> None:
        self.cancelled.append(task_id)

    def receive_durable(self, durable: int) -> None:
        self.durable = durable

    def book(self, rows: Rows) -> None:
        merge(self.rows, rows)

    def booked(self, direction: str, *, aborted: bool = False) -> int:
        """The bytes that were booked."""
        return sum(
            sums.message_bytes
            for key, sums in self.rows.items()
            if (key.direction, key.aborted) == (direction, aborted)
        )


class Line:
    """A stream of the clients 0 (session 1) and 1 (session 2)."""

    def __init__(self, heartbeat_s: float = 1000.0) -> None:
        self.call, self.pool = Call(), ThreadPoolExecutor(1)
        self.num_moved, self.step = 0, 0  # bytes by the kernel's count, and how many more each time that it is asked

        def count() -> int:
            self.num_moved += self.step
            return self.num_moved

        self.stream = Stream(self.call, 1 << 30, heartbeat_s, self.pool, lambda error: FedrpcError(str(error)), count)
        self.one, self.two = Recorder(0), Recorder(1)
        self.running: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def begin(self) -> None:
        await self.stream.attach(b"token", "config", {1: self.one, 2: self.two})
        self.running = asyncio.ensure_future(self.stream.run())

    async def ended(self) -> str:
        return await asyncio.wait_for(self.running, WAIT_S)

    def submit(
        self,
        message: Any,
        task_id: str = "t",
        rows: Sequence[str] = (),
        timing: ClientTiming = transport.NO_TIMING,
    ) -> asyncio.Task[Receipt]:
        """Sends a result of client 0."""
        payload = encode(message)
        kept = serialise_file(Envelope(task_id, phase="fit", parts=payload.parts, digest=payload.digest), payload)
        released = SignedRows(5, rows, b"signed") if rows else None
        return asyncio.create_task(self.stream.send_result(1, kept, 0, released, timing))

    def acknowledge(self, status: str = "ACCEPTED", task_id: str = "t", **values: Any) -> None:
        receipt = pb.Receipt(task_id=task_id, status=pb.Receipt.Status.Value(f"STATUS_{status}"), **values)
        self.call.say(pb.Frame(session=1, receipt=receipt))


@asynccontextmanager
async def line(heartbeat_s: float = 1000.0) -> AsyncIterator[Line]:
    found = Line(heartbeat_s)
    await found.begin()
    try:
        yield found
    finally:
        found.running.cancel()
        await asyncio.gather(found.running, return_exceptions=True)
        found.pool.shutdown()


async def until(holds: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0)


def task_frames(message: Any, session: int = 1) -> list[bytes]:
    payload = encode(message)
    envelope = Envelope("t", phase="fit", parts=payload.parts, digest=payload.digest, durable=3)
    return frames_of(envelope, payload, session=session)


def count(frames: Sequence[bytes]) -> int:
    """The bytes of frames that are their messages': seals, and what a result took, belong to the session."""
    return sum(count_message_bytes(len(data)) - count_others(data) for data in frames)


def count_others(data: bytes) -> int:
    if read_chunk(data):
        return 0
    frame = pb.Frame.FromString(data)
    timing = len(pb.Frame(timing=frame.timing).SerializeToString()) if frame.HasField("timing") else 0
    return timing + SEAL_BYTES


# Tasks


@asynchronous
async def test_the_first_frame_shows_the_token_and_with_what_the_process_trains():
    async with line() as wire:
        wanted = pb.Frame(session=1, attach=pb.Attach(token=b"token", config_hash="config"))
        assert wire.call.sent[0] == seal_frame(wanted)


@pytest.mark.parametrize("message", [SMALL, LARGE], ids=["small", "large"])
@asynchronous
async def test_a_task_reaches_its_client_whole_and_booked(message):
    async with line() as wire:
        frames = task_frames(message, session=2)
        wire.call.say(*frames)
        await until(lambda: wire.two.tasks)
        [task] = wire.two.tasks
        assert (task.envelope.task_id, task.envelope.durable) == ("t", 3)
        assert same(decode(One, task.envelope.parts, task.buffers), message)
        assert wire.two.booked("down") == count(frames)
        assert (wire.one.tasks, wire.one.rows) == ([], {})


@asynchronous
async def test_small_frames_may_come_between_the_chunks_of_a_task():
    async with line() as wire:
        head, *chunks = task_frames(LARGE)
        [small] = task_frames(SMALL, session=2)
        wire.call.say(head, chunks[0], small, chunks[1])
        await until(lambda: wire.one.tasks)
        assert len(wire.two.tasks) == 1


@asynchronous
async def test_a_cancel_a_heartbeat_and_the_end_reach_the_clients():
    async with line() as wire:
        wire.call.say(pb.Frame(session=2, cancel=pb.Cancel(task_id="t", reason="why")))
        wire.call.say(pb.Frame(session=1, heartbeat=pb.Heartbeat(durable=4)))
        await until(lambda: wire.two.durable == 4)
        assert (wire.one.cancelled, wire.two.cancelled, wire.one.durable) == ([], ["t"], 4)
        wire.call.say(pb.Frame(session=1, finished=pb.Finished(reason="complete", durable=5)))
        assert await wire.ended() == "complete"
        assert (wire.one.durable, wire.two.durable, wire.call.cancelled) == (5, 5, True)


def damaged() -> list[bytes]:
    head, *chunks = task_frames(LARGE)
    return [head, chunks[0][:-1] + b"\1", chunks[1]]


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b"\xff\xff"], "a frame was changed on its way"),
        ([seal(b"\xff\xff")], "not a Frame"),
        (task_frames(SMALL, session=9), "not of this stream"),
        (task_frames(LARGE)[1:], "no message announced"),
        (damaged(), "corrupted"),
    ],
    ids=["garbage", "sealed garbage", "session", "chunk", "damaged"],
)
@asynchronous
async def test_what_breaks_the_contract_ends_the_stream(frames, why):
    async with line() as wire:
        wire.call.say(*frames)
        with pytest.raises(WireError, match=why):
            await wire.ended()
        assert wire.call.cancelled
        assert wire.one.tasks == []


@pytest.mark.parametrize("path", list_paths(pb.Frame))
@pytest.mark.parametrize("message", [SMALL, LARGE], ids=["small", "large"])
@asynchronous
async def test_a_task_that_was_changed_on_its_way_is_never_taken(message, path):
    """Whatever field it is: the stream ends, and the server sends the task again over the next one."""
    head, *chunks = task_frames(message)
    for altered in alter(pb.Frame.FromString(reseal(pb.Frame.FromString(head))), path):
        async with line() as wire:
            wire.call.say(serialise_altered(altered), *chunks)
            with pytest.raises(WireError):
                await wire.ended()
            assert wire.one.tasks == wire.two.tasks == []
            assert wire.one.cancelled == wire.two.cancelled == []


# Results


@pytest.mark.parametrize(
    ("status", "accepted"), [("ACCEPTED", True), ("DUPLICATE", False), ("LATE", False)], ids=lambda value: str(value)
)
@asynchronous
async def test_a_small_result_is_one_frame_and_counts_as_completed_when_it_was_accepted(status, accepted):
    async with line() as wire:
        sending = wire.submit(SMALL, rows=["{}"])
        await until(lambda: wire.call.frames)
        [frame] = wire.call.frames
        assert (frame.session, frame.envelope.task_id, len(frame.chunks)) == (1, "t", 1)
        assert frame.privacy == pb.PrivacyRows(first=5, rows=["{}"], signature=b"signed")
        assert wire.one.rows == {}, "not before the server has said what became of it"
        wire.acknowledge(status, durable=7, privacy_rows=6)
        assert await sending == Receipt(durable=7, privacy_rows=6)
        privacy = len(pb.Frame(privacy=frame.privacy).SerializeToString())
        assert wire.one.booked("up", aborted=not accepted) == count(wire.call.sent[1:]) - privacy
        assert wire.one.booked("up", aborted=accepted) == 0


@asynchronous
async def test_a_result_has_as_many_bytes_whatever_it_took():
    sizes = []
    for timing in (transport.NO_TIMING, ClientTiming(0.25, 3.0, 1e6, 1e7, 1 << 40)):
        async with line() as wire:
            sending = wire.submit(SMALL, timing=timing)
            await until(lambda: wire.call.frames)
            [frame] = wire.call.frames
            assert read_timing(frame.timing) == timing
            wire.acknowledge()
            await sending
            sizes.append(frame.ByteSize())
    assert sizes[0] == sizes[1]


@asynchronous
async def test_a_refused_result_raises_the_reason():
    async with line() as wire:
        sending = wire.submit(SMALL)
        await until(lambda: wire.call.frames)
        wire.acknowledge("REFUSED", reason="damaged")
        with pytest.raises(WireError, match="damaged"):
            await sending
        assert wire.one.booked("up", aborted=True) == count(wire.call.sent[1:])


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (Failure("no"), pb.Failure.CODE_ERROR),
        (Failure("no", abstained=True), pb.Failure.CODE_ABSTAINED),
        (Failure("no", failed=MethodFailed), pb.Failure.CODE_MISTAKE),
        (Failure("no", failed=Diverged), pb.Failure.CODE_DIVERGED),
    ],
)
@asynchronous
async def test_a_failure_says_why(failure, code):
    async with line() as wire:
        question = Envelope("t", digest=b"asked", epoch=2)
        sending = asyncio.create_task(wire.stream.send_failure(1, question, failure))
        await until(lambda: wire.call.frames)
        [frame] = wire.call.frames
        assert frame.envelope.failure == pb.Failure(code=code, reason="no")
        assert (frame.envelope.question, frame.envelope.epoch) == (b"asked", 2)
        wire.acknowledge()
        await sending
        assert (wire.one.booked("up", aborted=True) == 0) == failure.abstained


@asynchronous
async def test_an_error_is_booked_apart_from_the_answer_that_may_follow():
    async with line() as wire:
        sending = asyncio.create_task(wire.stream.send_failure(1, Envelope("t"), Failure("the disk is full")))
        await until(lambda: wire.call.frames)
        wire.acknowledge()
        await sending
        assert wire.one.booked("up") == 0
        assert wire.one.booked("up", aborted=True) == count(wire.call.sent[1:])


@asynchronous
async def test_the_chunks_of_a_large_result_wait_for_their_grant():
    async with line() as wire:
        sending = wire.submit(LARGE)
        await until(lambda: wire.call.frames)
        wire.call.say(
            pb.Frame(session=2, grant=pb.Grant(task_id="t")), pb.Frame(session=1, grant=pb.Grant(task_id="x"))
        )
        await asyncio.sleep(0.02)
        assert [len(frame.chunks) for frame in wire.call.frames] == [0], "these grants are for others"
        wire.call.say(pb.Frame(session=1, grant=pb.Grant(task_id="t")))
        await until(lambda: len(wire.call.frames) == 3)
        wire.acknowledge()
        await sending
        assert wire.one.booked("up") == count(wire.call.sent[1:])


@pytest.mark.parametrize("said", ["LATE", "cancel"])
@asynchronous
async def test_a_large_result_that_nobody_wants_is_not_sent(said):
    async with line() as wire:
        sending = wire.submit(LARGE)
        await until(lambda: wire.call.frames)
        if said == "cancel":
            wire.call.say(pb.Frame(session=1, cancel=pb.Cancel(task_id="t")))
        else:
            wire.acknowledge(said)
        await sending
        assert len(wire.call.frames) == 1
        assert wire.one.booked("up", aborted=True) == count(wire.call.sent[1:])


@asynchronous
async def test_one_large_result_follows_another_and_small_ones_go_between():
    async with line() as wire:
        first, second = wire.submit(LARGE, "a"), wire.submit(LARGE, "b")
        await until(lambda: wire.call.frames)
        small = wire.submit(SMALL, "c")
        await until(lambda: len(wire.call.frames) == 2)
        assert [frame.envelope.task_id for frame in wire.call.frames] == ["a", "c"]
        for task_id in ("a", "b"):
            wire.call.say(pb.Frame(session=1, grant=pb.Grant(task_id=task_id)))
            await until(lambda task_id=task_id: task_id in {frame.envelope.task_id for frame in wire.call.frames})
            wire.call.say(pb.Frame(session=1, grant=pb.Grant(task_id=task_id)))
        await until(lambda: len(wire.call.frames) == 7)
        assert [frame.envelope.task_id for frame in wire.call.frames] == ["a", "c", "", "", "b", "", ""]
        for task_id in ("a", "b", "c"):
            wire.acknowledge(task_id=task_id)
        await asyncio.gather(first, second, small)


# The stream's life


@asynchronous
async def test_a_stream_that_breaks_fails_what_waits_and_books_what_came():
    async with line() as wire:
        head, chunk, _ = task_frames(LARGE)
        wire.call.say(head, chunk)
        small, large = wire.submit(SMALL, "a"), wire.submit(LARGE, "b")
        await until(lambda: len(wire.call.frames) == 2)
        wire.call.hang_up()
        with pytest.raises(Unavailable, match="closed the stream"):
            await wire.ended()
        for sending in (small, large):
            with pytest.raises(Unavailable):
                await asyncio.wait_for(sending, WAIT_S)
        assert wire.one.booked("down", aborted=True) == count([head, chunk])
        assert wire.one.booked("up", aborted=True) == count(wire.call.sent[1:])
        with pytest.raises(Unavailable):
            await asyncio.wait_for(wire.submit(SMALL), WAIT_S)


@asynchronous
async def test_a_client_sends_heartbeats_and_gives_up_a_server_that_misses_three(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(transport, "time", clock)

    def num_beats() -> int:
        return sum(pb.Frame.FromString(data).HasField("heartbeat") for data in wire.call.sent)

    async with line(heartbeat_s=0.01) as wire:
        clock.advance(0.029)
        await until(lambda: num_beats() == 2)
        wire.call.say(pb.Frame(session=1, heartbeat=pb.Heartbeat(durable=1)))
        await until(lambda: wire.one.durable == 1)
        clock.advance(0.029)
        beats = num_beats()
        await until(lambda: num_beats() == beats + 2)
        assert not wire.running.done()
        clock.advance(0.002)
        with pytest.raises(Unavailable, match="silent"):
            await wire.ended()


@asynchronous
async def test_a_server_is_not_silent_while_a_frame_is_on_its_way(monkeypatch):
    """A frame of 1 MiB takes minutes on a slow link; bytes that hardly move are no sign of life."""
    clock = Clock()
    monkeypatch.setattr(transport, "time", clock)
    async with line(heartbeat_s=0.01) as wire:
        wire.step = 10  # 1000 bytes a second
        for _ in range(5):
            counted = wire.num_moved
            await until(lambda counted=counted: wire.num_moved > counted + 10)
            clock.advance(0.029)
        assert not wire.running.done()
        wire.step = 9
        counted = wire.num_moved
        await until(lambda: wire.num_moved > counted)
        clock.advance(0.031)
        with pytest.raises(Unavailable, match="silent"):
            await wire.ended()
