"""What a client costs the server when there are many of them: CPU a task, and the time from the last round to the exit.

In one process, fake clients speak to the real servicer, mailbox, rounds, ledger and coordinator without gRPC, so what
grows with N is the server's own work. In real processes `fedrpc run` plays the same with an echo instead of training.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import platform
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import fedrpc
from fedrpc.methods.fedavg import Global, Update
from fedrpc.privacy.ledger import GENESIS, PrivacyFile, hash_row, list_releases
from fedrpc.process import freeze_memory
from fedrpc.server.app import Servicer
from fedrpc.server.coordinator import Coordinator
from fedrpc.server.mailbox import Mailbox
from fedrpc.server.roster import Roster
from fedrpc.server.rounds import ServerContext
from fedrpc.server.spool import Spool
from fedrpc.wire.codec import Payload, decode, encode
from fedrpc.wire.frames import SCHEMA_DIGEST, Assembler, build_inline_chunks, parse
from fedrpc.wire.ledger import SESSION, Attempt, LedgerAnswer, LedgerFile, Rows, merge, to_json
from fedrpc.wire.tcpinfo import Meter
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.bench.measures import show
from tests.e2e.programs import Program, Programs, settings, wait_for
from tests.e2e.rundir import RunDir
from tests.fakes import CPU, SmallProblem, problem_of

pytestmark = pytest.mark.timeout(1800)

RESULTS = Path(__file__).parent / "results" / "many-clients.json"
COMMAND = "make bench ARGS='-k many_clients'"
ROUNDS = 3
PARALLEL = 2  # what `fedrpc run` takes on two cores
SIZES = (100, 300, 1000)
GROWTH_GOAL, EXIT_GOAL_S = 1.3, 5.0
REPEATS = 3
PROCESS_BYTES = 30 << 20  # of one client process, with room to spare


def describe_machine() -> dict[str, Any]:
    """The machine that the values are from."""
    with open("/proc/cpuinfo") as file:
        names = {line.partition(":")[2].strip() for line in file if line.startswith("model name")}
    return {
        "cpu": sorted(names),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": [round(value, 2) for value in os.getloadavg()],
    }


def save(name: str, values: dict[str, Any]) -> None:
    """Writes one part of the results file, and keeps the others."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(kept | {"command": COMMAND, name: values}, indent=1) + "\n")


# In one process


class Stopwatch:
    """Adds up the CPU time of the fake clients, which share a thread with the server."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Counts a block without an await."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - started


class Call:
    """Stands in for gRPC's context: keeps the frames that the server writes."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    async def write(self, frame: bytes) -> None:
        """Keeps a frame."""
        self.frames.append(frame)

    async def abort(self, code: Any, details: str) -> None:
        """The server refuses the call."""
        raise AssertionError(f"{code}: {details}")


async def _stream(frame: bytes) -> AsyncIterator[bytes]:
    yield frame


class FakeClient:
    """Joins, keeps a poll parked, echoes the weights that it gets, and keeps its own ledger and privacy chain."""

    def __init__(self, client: int, servicer: Servicer, clock: Stopwatch, updates: dict[bytes, Payload]) -> None:
        self._client, self._servicer, self._clock, self._updates = client, servicer, clock, updates
        self._rows: Rows = {}
        self._chain = 0, GENESIS
        self._submitting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Takes part until the run is over."""
        request = pb.JoinRequest(
            client_id=self._client,
            instance="fake",
            package_version=fedrpc.__version__,
            schema_digest=SCHEMA_DIGEST,
        )
        joined = parse(pb.JoinResponse, await self._servicer.join(request.SerializeToString(), Call()))
        poll = pb.PollRequest(session=joined.session).SerializeToString()
        while True:
            call = Call()
            await self._servicer.poll(poll, call)
            with self._clock.running():
                frame = parse(pb.Frame, call.frames[0])
                if frame.WhichOneof("body") == "idle" and frame.idle.finished:
                    return
                answer = self._answer(frame.envelope, len(call.frames[0]), joined.session)
            # As real clients do: the next poll is parked while the answer is on its way.
            task = asyncio.ensure_future(self._submit(answer))
            self._submitting.add(task)
            task.add_done_callback(self._submitting.discard)

    async def _submit(self, frame: bytes) -> None:
        response = parse(pb.SubmitResponse, await self._servicer.submit(_stream(frame), Call()))
        assert response.status == pb.SubmitResponse.STATUS_ACCEPTED

    def _answer(self, question: pb.Envelope, size: int, session: str) -> bytes:
        down = Attempt(question.round, question.phase, "down", self._client, question.attempt)
        down.add_envelope(question, size)
        merge(self._rows, down.close())
        payload, rows = self._payload(question), []
        where = {"client": self._client, "round": question.round, "phase": question.phase, "task": question.task_id}
        count, head = self._chain
        for number, release in enumerate(list_releases(payload.kinds, {}, where), count):
            rows.append(release.to_row(number, head))
            head = hash_row(head, rows[-1])
        envelope = pb.Envelope(
            session=session,
            task_id=question.task_id,
            round=question.round,
            phase=question.phase,
            step=question.step,
            epoch=question.epoch,
            parts=payload.parts,
            digest=payload.digest,
            question=question.digest,
            chunks=build_inline_chunks(payload),
            privacy=pb.PrivacyRows(first=count, rows=rows) if rows else None,
        )
        self._chain = count + len(rows), head
        frame = pb.Frame(envelope=envelope).SerializeToString()
        up = Attempt(question.round, question.phase, "up", self._client)
        up.add_envelope(envelope, len(frame))
        merge(self._rows, up.close())
        return frame

    def _payload(self, question: pb.Envelope) -> Payload:
        if question.phase == SESSION:
            rows = "\n".join(to_json(key, sums) for key, sums in self._rows.items() if key.phase != SESSION)
            return encode(LedgerAnswer(rows, 0, 0))
        if question.digest not in self._updates:  # all clients get the same weights, so they are encoded once
            assembler = Assembler(question, 1 << 20)
            for chunk in question.chunks:
                assembler.add(chunk)
            weights = decode(Global, question.parts, assembler.finish()).weights
            self._updates[question.digest] = encode(Update(weights, 6, torch.zeros(1, dtype=torch.float64)))
        return self._updates[question.digest]


def tiny() -> nn.Module:
    """A network of 2 kB, which travels in the envelope."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 10))


@dataclass
class Spent:
    """What a run in one process took.

    Args:
        rounds_ms: CPU of the server's thread for each client and round, without joining and without the end.
        join_ms: The same for joining.
        end_ms: CPU of the whole process for each client, from the last round to the end.
        end_s: The same by the clock, in all.
    """

    rounds_ms: float
    join_ms: float
    end_ms: float
    end_s: float

    def at_least(self, other: Spent) -> Spent:
        """The smaller of each value."""
        return Spent(*(min(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


class Played:
    """One run of N fake clients, with the moments at which its stages ended."""

    def __init__(self, folder: Path, num_clients: int) -> None:
        self._num_clients, self._clock = num_clients, Stopwatch()
        values = {"clients": num_clients, "rounds": ROUNDS, "parallel": PARALLEL, "train_size": None}
        self._problem: SmallProblem = problem_of("fedavg", build=tiny, partition="iid", **values)
        self._folder = folder
        self._marks: dict[str, tuple[float, float, float]] = {}

    def play(self) -> Spent:
        """Plays the run and returns what it took."""
        freeze_memory()  # as a server does
        asyncio.run(self._play())
        gc.unfreeze()
        n = self._num_clients
        (start, joined, last, end) = (self._marks[name] for name in ("start", "joined", "round", "end"))
        return Spent(
            1000 * (last[0] - joined[0]) / n / ROUNDS,
            1000 * (joined[0] - start[0]) / n,
            1000 * (end[1] - last[1]) / n,
            end[2] - last[2],
        )

    def _mark(self, name: str) -> None:
        fake = self._clock.seconds
        self._marks[name] = time.thread_time() - fake, time.process_time() - fake, time.monotonic()

    def _progress(self, name: str, values: dict[str, Any]) -> None:
        if name == "joined" and values["joined"] == values["of"]:
            self._mark("joined")
        elif name == "round_finished" and values["round"] == ROUNDS - 1:
            self._mark("round")

    async def _play(self) -> None:
        config, work = self._problem.config, ThreadPoolExecutor(1)
        with (
            ThreadPoolExecutor(2) as io,
            contextlib.closing(LedgerFile(self._folder)) as book,
            contextlib.closing(PrivacyFile(self._folder / "privacy.jsonl")) as privacy,
        ):
            roster = Roster(config.clients, config.limits.grace_s)
            mailbox = Mailbox(roster, config.limits, config.parallel)
            spool = Spool(self._folder / "spool")
            server = ServerContext(self._problem, "run", mailbox, spool, work, io, CPU, self._progress)
            coordinator = Coordinator(server, roster, self._folder, book, Meter(0, local=True))
            servicer = Servicer(server, roster, coordinator, book, privacy)
            updates: dict[bytes, Payload] = {}
            self._mark("start")
            async with asyncio.TaskGroup() as group:
                reaping = group.create_task(self._reap(mailbox))
                for client in range(config.clients):
                    group.create_task(FakeClient(client, servicer, self._clock, updates).run())
                summary = await coordinator.run()
                self._mark("end")
                mailbox.finish("the run is complete")
                reaping.cancel()
        work.shutdown()
        check = summary["ledger_check"]
        assert check["clients"] == config.clients
        assert check["compared"] > 0
        assert check["differing"] == check["only_server"] == check["only_client"] == check["missing"] == 0

    @staticmethod
    async def _reap(mailbox: Mailbox) -> None:
        while True:
            await asyncio.sleep(0.2)
            mailbox.reap()


def test_the_servers_own_work(tmp_path: Path) -> None:
    """The least of three runs of each size counts: the machine's other work only ever adds."""
    machine, spent = describe_machine(), {}
    for number in range(1 + REPEATS):
        for num_clients in SIZES if number else SIZES[:1]:  # first a run that pays for what happens only once
            folder = tmp_path / f"{number}-{num_clients}"
            folder.mkdir()
            took = Played(folder, num_clients).play()
            if number:
                spent[num_clients] = took.at_least(spent.get(num_clients, took))
    growth = spent[SIZES[-1]].rounds_ms / spent[SIZES[0]].rounds_ms
    rows = {
        f"{num_clients} clients": f"{took.rounds_ms:.2f} ms CPU a client and round, {took.join_ms:.2f} to join, "
        f"{took.end_ms:.2f} at the end ({took.end_s:.1f} s)"
        for num_clients, took in spent.items()
    }
    title = f"The server's own work, no gRPC, {ROUNDS} rounds ({COMMAND})"
    show(title, rows | {"growth": f"{growth:.2f} (wanted: {GROWTH_GOAL} or less)"})
    save(
        "one_process",
        {
            "when": f"{datetime.now():%Y-%m-%d}",
            "machine": machine,
            "rounds": ROUNDS,
            "parallel": PARALLEL,
            "by_clients": {n: {k: round(v, 3) for k, v in vars(took).items()} for n, took in spent.items()},
            "growth": round(growth, 3),
            "growth_goal": GROWTH_GOAL,
        },
    )


# In real processes


@dataclass
class Measured:
    """What `fedrpc run` took.

    Args:
        rounds_ms: CPU of the server process for each client and round, from the end of the first round to the last's.
        total_ms: CPU of the server process for each client, in the whole run.
        exit_s: Seconds from the last round to the exit of `fedrpc run`.
        server_exit_s: Of them, until the server's process had ended.
    """

    rounds_ms: float
    total_ms: float
    exit_s: float
    server_exit_s: float


def _read_time(row: dict[str, Any]) -> float:
    return datetime.fromisoformat(row["timestamp"]).timestamp()


def _find_server(run: Program) -> psutil.Process | None:
    """The child of `fedrpc run` that listens."""
    for child in psutil.Process(run.pid).children():
        with contextlib.suppress(psutil.Error):
            if any(found.status == psutil.CONN_LISTEN for found in child.net_connections("tcp")):
                return child
    return None


def _watch(run: Program, timeout_s: float) -> tuple[list[tuple[float, float]], float]:
    """CPU seconds of the server by time until it ends, and when `fedrpc run` ended."""
    server = wait_for("the server listens", lambda: _find_server(run))
    samples: list[tuple[float, float]] = []
    give_up = time.monotonic() + timeout_s
    while run.code is None:
        assert time.monotonic() < give_up, run.err
        with contextlib.suppress(psutil.Error):
            if server.status() != psutil.STATUS_ZOMBIE:
                spent = server.cpu_times()
                samples.append((time.time(), spent.user + spent.system))
        time.sleep(0.02)
    return samples, time.time()


def _measure(scripts: Programs, out: Path, num_clients: int) -> Measured:
    words = settings(
        method="echo",
        model="thin",
        clients=num_clients,
        rounds=ROUNDS + 1,
        train_size=6000,
        eval_every=1000,
        feature_eval_every=1000,
    )
    run = scripts.run(out, *words)
    samples, ended = _watch(run, 900)
    run.wait_for_success()
    assert RunDir(out).summary["ledger_check"]["clients"] == num_clients
    assert RunDir(out).summary["ledger_check"]["differing"] == 0
    # The last round evaluates, so it is the one before it that the CPU is read at.
    rows = [row for row in run.read_log("round_finished") if row["room"] == "coordinator"]
    moments = [_read_time(row) for row in rows]

    def spent_at(moment: float) -> float:
        return max(spent for at, spent in samples if at <= moment)

    (cpu,) = run.read_log("cpu")
    return Measured(
        1000 * (spent_at(moments[-2]) - spent_at(moments[0])) / num_clients / (ROUNDS - 1),
        1000 * cpu["total_s"] / num_clients,
        ended - moments[-1],
        samples[-1][0] - moments[-1],
    )


def test_real_processes(tmp_path: Path, scripts: Programs) -> None:
    machine, measured = describe_machine(), {}
    free = psutil.virtual_memory().available
    sizes = [n for n in SIZES if n * PROCESS_BYTES < free]
    for num_clients in sizes:
        measured[num_clients] = _measure(scripts, tmp_path / str(num_clients), num_clients)
    growth = measured[sizes[-1]].rounds_ms / measured[sizes[0]].rounds_ms
    rows = {
        f"{num_clients} clients": f"{took.rounds_ms:.2f} ms CPU a client and round, {took.total_ms:.2f} in all, "
        f"{took.exit_s:.1f} s from the last round to the exit ({took.server_exit_s:.1f} the server's)"
        for num_clients, took in measured.items()
    }
    rows |= {f"{n} clients": "left out: too little free memory" for n in SIZES if n not in sizes}
    title = f"fedrpc run with an echo for training ({COMMAND})"
    show(title, rows | {"growth": f"{growth:.2f} (wanted: {GROWTH_GOAL} or less)"})
    save(
        "real_processes",
        {
            "when": f"{datetime.now():%Y-%m-%d}",
            "machine": machine,
            "rounds": ROUNDS + 1,
            "by_clients": {n: {k: round(v, 3) for k, v in vars(took).items()} for n, took in measured.items()},
            "growth": round(growth, 3),
            "growth_goal": GROWTH_GOAL,
            "exit_goal_s_at_1000": EXIT_GOAL_S,
        },
    )
