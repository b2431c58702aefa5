"""A million malformed messages: mutated Joins, frames, headers, chunks and privacy rows, many over each stream.

Nearly all go to the server's own objects, with queues in place of gRPC, for their number; a share goes to a real server
over a socket. `FEDRPC_BENCH_SEED=N` draws others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import structlog

from fedrpc.errors import FedrpcError
from fedrpc.process import give_back_memory
from fedrpc.server.mailbox import Task
from fedrpc.wire.sealing import seal
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.altered import reseal
from tests.bench.fuzzing import draw_frame, draw_join
from tests.bench.measures import MIB, status
from tests.bench.results import Figures
from tests.chain import Chain
from tests.e2e.programs import Gates, Program, Programs, settings
from tests.e2e.rawclient import RawClient, RawStream
from tests.e2e.rundir import RunDir
from tests.fakes import asynchronous, problem_of
from tests.unit.client.test_app import Hub
from tests.unit.server.streams import CONFIG_HASH, LARGE, SMALL, ClientEnd, office

pytestmark = [pytest.mark.timeout(4 * 3600), pytest.mark.aside]

SEED = int(os.environ.get("FEDRPC_BENCH_SEED", "17"))
NUM_FRAMES, NUM_JOINS, NUM_OVER_SOCKET = 880_000, 100_000, 20_000
BATCH, HANG_S, TASK_S = 200, 30.0, 1.0
INSTANCE = "an-instance-that-both-use"
NOBODY = "127.0.0.1:1"
LEVEL = 1.1  # memory at the end over memory after a tenth of the messages


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every refusal is a line in the log."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


class Memory:
    """A process's memory after a tenth of the messages, and at the end."""

    def __init__(self, total: int, pid: int) -> None:
        self._tenth, self._pid, self._early = total // 10, pid, 0

    def note(self, done: int) -> None:
        """Notes it once a tenth is done."""
        if not self._early and done >= self._tenth:
            self._early = self._measure()

    def _measure(self) -> int:
        gc.collect()
        if self._pid == os.getpid():
            give_back_memory()  # as the server does by itself every minute
        return status(self._pid, "RssAnon")

    def add_to(self, figures: Figures, key: str, done: int, **beside: float | str) -> None:
        """Checks that it is level, and adds it to the figures."""
        late = self._measure()
        figures.add(key, late / self._early, MiB=late / MIB, messages=done, goal=f"at most {LEVEL}", **beside)
        assert late / self._early <= LEVEL, "memory grows with the number of malformed messages"


def make_joins(raw: RawClient, greeting: pb.GreetResponse) -> list[bytes]:
    """Joins of one client and of several, as a client would make them after a greeting."""
    several = raw.request(greeting, 1, members=[raw.member(1), raw.member(2)])
    return [seal(request.SerializeToString()) for request in (raw.request(greeting, 0), several)]


def make_frames(stream: ClientEnd, small: Task, large: Task) -> list[bytes]:
    """All that a client says on the way to its answers to two tasks."""
    for task in (small, large):
        task.question.prepare()
    number = stream.number()
    return [
        reseal(pb.Frame(session=number, heartbeat=pb.Heartbeat())),
        reseal(pb.Frame(session=number, attach=pb.Attach(token=stream.token, config_hash=CONFIG_HASH))),
        *stream.frames(small, SMALL),
        *(frame for frame in stream.frames(large, LARGE) if len(frame) < 10_000),
        pb.Frame(chunks=[pb.Chunk(part=0, data=b"\1" * 1000)]).SerializeToString(),
    ]


@asynchronous
async def test_fuzz_frames(tmp_path: Path, figures: Figures, small: bool) -> None:
    total = 20_000 if small else NUM_FRAMES
    rng, memory, done, streams = random.Random(SEED), Memory(total, os.getpid()), 0, 0
    slowest, tasks = 0.0, list[Task]()
    async with office(tmp_path, 1) as desk:
        while done < total:
            streams += 1
            stream = await desk.connect(0)
            if all(task.done for task in tasks):  # a lie may pass as a failure
                tasks = [desk.post(0, message, step=2 * streams + at) for at, message in enumerate((SMALL, LARGE))]
            real = make_frames(stream, *tasks)
            while done < total and not stream.running.done():
                stream.send(*(draw_frame(real, stream.number(), rng) for _ in range(BATCH)))
                began = time.monotonic()
                await settle(stream)
                slowest = max(slowest, time.monotonic() - began)
                done += len(stream.was_read)
                stream.was_read.clear()
                stream.written.clear()
                memory.note(done)
            error = await end(stream)
            assert error is None or isinstance(error, FedrpcError), f"seed {SEED}, message {done}: {error!r}"
            desk.streams.clear()
        memory.add_to(figures, "memory", done, streams=streams, slowest_batch_s=slowest, batch=BATCH, seed=SEED)


async def settle(stream: ClientEnd) -> None:
    """Waits until the server has read everything, or ended the stream."""
    async with asyncio.timeout(HANG_S):
        while not stream.running.done() and (stream._up.qsize() or not stream.connection._is_reading):
            while stream.num_waiting:
                stream._down.get_nowait()
            await asyncio.sleep(0)


async def end(stream: ClientEnd) -> BaseException | None:
    """Ends a stream, and returns what broke it."""
    stream._up.put_nowait(None)
    async with asyncio.timeout(HANG_S):
        [error] = await asyncio.gather(stream.running, return_exceptions=True)
    return error


@asynchronous
async def test_fuzz_joins(tmp_path: Path, figures: Figures, small: bool) -> None:
    total = 5_000 if small else NUM_JOINS
    rng, memory, accepted = random.Random(SEED), Memory(total, os.getpid()), 0
    hub, raw, real = Hub(tmp_path, problem_of("fedavg", clients=3)), RawClient(NOBODY), list[bytes]()
    for number in range(total):
        context = SimpleNamespace(auth_context=dict, peer=lambda n=number: f"ipv4:127.0.0.1:{1024 + n % 60_000}")
        if number % BATCH == 0:
            greeting = await hub._servicer.greet(seal(b""), context)
            real = make_joins(raw, pb.GreetResponse.FromString(greeting))
        try:
            await asyncio.wait_for(hub._servicer.join(draw_join(real, rng), context), HANG_S)
            accepted += 1
        except FedrpcError:
            pass
        memory.note(number)
    raw.channel.close()
    await hub.close()
    assert accepted < total / 2
    memory.add_to(figures, "memory", total, accepted=accepted, seed=SEED)


def test_fuzz_over_a_socket(tmp_path: Path, programs: Programs, gates: Gates, figures: Figures, small: bool) -> None:
    """A client of a run sends malformed frames to a real server; the run then ends with the others' model."""
    total, rng, out = 500 if small else NUM_OVER_SOCKET, random.Random(SEED), RunDir(tmp_path / "run")
    gates.shut("client-0-0")
    words = settings(method="loaded", params__gates=str(gates.folder), limits__deliveries=10**6)
    server = programs.server(out.path, *words)
    for client in (0, 1):
        programs.client(server.address(), client, tmp_path / "state").wait_for_join()
    memory, done, attacker = Memory(total, server.pid), 0, Attacker(server, out, rng)
    while done < total:
        done += attacker.send_until_refused(total - done)
        memory.note(done)
    memory.add_to(figures, "memory", done, seed=SEED)
    attacker.leave_key(tmp_path / "state" / "2")
    gates.open_all()
    programs.client(server.address(), 2, tmp_path / "state")
    server.wait_for_success()


class Attacker:
    """Client 2 of a run, over a socket."""

    def __init__(self, server: Program, out: RunDir, rng: random.Random) -> None:
        self._server, self._rng = server, rng
        self._chain = Chain(2, (out.path / "run_id").read_text())
        self._task = pb.Envelope()

    def leave_key(self, folder: Path) -> None:
        """Leaves its key to the real client 2, which would be refused with another one."""
        folder.mkdir()
        (folder / "signing.key").write_bytes(self._chain.secret)
        (folder / "instance").write_text(INSTANCE)

    def send_until_refused(self, most: int) -> int:
        """Joins, and sends malformed frames until the server ends the stream; returns how many."""
        assert self._server.code is None, f"seed {SEED}: {self._server.err}"
        sent = 0
        with RawClient(self._server.address(), signer=self._chain.signer) as raw:
            try:
                join = raw.join(2, INSTANCE)
                stream, session = raw.attach(join), join.admissions[0].session
                with contextlib.suppress(TimeoutError):  # a lie that passed as a failure has ended its task
                    self._task = stream.receive_until("envelope", TASK_S).envelope
                real = make_raw_frames(session, self._task, self._chain)
                for sent in range(1, most + 1):
                    stream.send(draw_frame(real, session, self._rng))
                    if sent % BATCH == 0:
                        check_echo(stream, session)
            except (grpc.RpcError, EOFError):
                pass  # it was refused
        time.sleep(0.5)  # the server lets a client join twice a second
        return sent


def make_raw_frames(session: int, task: pb.Envelope, chain: Chain) -> list[bytes]:
    """What a client says on the way to its answer."""
    part = pb.Part(name="load", kind=pb.KIND_ACTIVATIONS, codec=pb.CODEC_RAW, size=4)
    part.tensors.add(path="w", dtype=pb.DTYPE_FLOAT32, shape=[1])
    where = {name: getattr(task, name) for name in ("task_id", "round", "phase", "step", "epoch")}
    envelope = pb.Envelope(**where, question=task.digest, parts=[part], digest=b"\1" * 32)
    chunk, rows = pb.Chunk(part=0, data=b"\0" * 4), chain.release(envelope)
    frames = [
        pb.Frame(session=session, heartbeat=pb.Heartbeat()),
        pb.Frame(session=session, envelope=envelope, chunks=[chunk], privacy=rows),
        pb.Frame(session=session, envelope=envelope, privacy=rows),
    ]
    return [reseal(frame) for frame in frames]


def check_echo(stream: RawStream, session: int) -> None:
    """Waits until the server has read everything so far."""
    stream.send(pb.Frame(session=session, heartbeat=pb.Heartbeat()))
    stream.receive_until("heartbeat", HANG_S)
