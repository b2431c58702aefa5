"""A whole federation in memory: real methods, codec, frames, stores and client contexts, and no socket.

`run_in_memory(problem_of("fedavg"), rounds=2)` plays any method, set-up and finalize included. `LinkedClients` sits at
the other end of the server's real mailbox instead, for tests of the server itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fedrpc import config as configuration
from fedrpc.client.answer import Answerer
from fedrpc.client.store import ClientStore
from fedrpc.client.transport import Task as Delivered
from fedrpc.errors import Abstained, Diverged
from fedrpc.methods.method import METHODS, Method
from fedrpc.methods.phases import ClientId
from fedrpc.methods.runtime import SETUP_ROUND
from fedrpc.metrics.evaluate import Evaluation, evaluate
from fedrpc.models.base import Model
from fedrpc.models.state import load
from fedrpc.privacy.summary import summarise
from fedrpc.privacy.unaccounted import find_unaccounted
from fedrpc.problem import Problem
from fedrpc.seeds import derive, seed_torch
from fedrpc.server.mailbox import Delivery, Mailbox, Missing, Task
from fedrpc.server.question import Question
from fedrpc.server.roster import Roster, Session
from fedrpc.server.rounds import ServerContext, ServerRound, make_task_id
from fedrpc.server.selection import select_cohort
from fedrpc.server.spool import Spool
from fedrpc.server.summary import build_shapes, collect_reported, hash_model, list_reported, predict_cost
from fedrpc.wire.codec import Payload
from fedrpc.wire.envelope import Cancel, Envelope, Finished, build_envelope, read_envelope
from fedrpc.wire.frames import (
    Assembler,
    fits_frame,
    load_payload,
    parse,
    read_chunk,
    serialise_body,
    serialise_chunks,
    serialise_frame,
)
from fedrpc.wire.ledger import Attempt, Rows, classify_chunk, compute_totals, count_other_fields, list_inline, merge
from fedrpc.wire.message import Tensors
from fedrpc.wire.v2 import coordinator_pb2 as pb

CPU = torch.device("cpu")
RUN_ID = "in-memory"
_MAX_BYTES = 1 << 30
# Few of the embedded data: with a tiny network a round takes a fraction of a second.
SMALL: dict[str, Any] = {
    "dataset": "fmnist-mini",
    "partition": "dirichlet:1.0",
    "clients": 4,
    "train_size": 60,
    "seed": 7,
    "train": {"epochs": 1, "batch_size": 8, "lr": 0.05},
}

Build = Callable[[], nn.Module]


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a coroutine test on a loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


# Problems


@contextlib.contextmanager
def registered(*methods: type[Method[Any, Any]]) -> Iterator[None]:
    """Files methods for a while, as a package of theirs would."""
    new = [cls for cls in methods if cls.name not in METHODS]
    try:
        for cls in methods:
            METHODS.register(cls.name)(cls)
        yield
    finally:
        for cls in new:
            METHODS._items.pop(cls.name, None)


class SmallProblem(Problem):
    """A problem whose network may be any module, registered or not."""

    def __init__(self, config: configuration.RunConfig, build: Build | None = None) -> None:
        self._build = build
        super().__init__(config)

    def _build_configured(self) -> nn.Module:
        return self._build() if self._build else super()._build_configured()


def tiny() -> nn.Module:
    """A small network with all that the real ones have: stages to cut at, features, BatchNorm and its counter."""
    first = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 12), nn.BatchNorm1d(12), nn.ReLU())
    return Model([first, nn.Sequential(nn.Linear(12, 8), nn.ReLU())], nn.Linear(8, 10))


def mlp() -> nn.Module:
    """A network without BatchNorm or dropout, for what must hold exactly."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), nn.Tanh(), nn.Linear(12, 10))


def problem_of(method: str | type[Method[Any, Any]], *, build: Build | None = tiny, **values: Any) -> SmallProblem:
    """A small problem for a method, registered or not.

    Args:
        build: Makes the network; None for the one that the configuration names.
        values: Options that differ from SMALL, tables merged.
    """
    cls = METHODS[method] if isinstance(method, str) else method
    with registered(cls):
        merged = configuration.merge({"method": cls.name}, SMALL, values)
        return SmallProblem(configuration.build(merged), build)


# Both ends of the wire


def frames_of(envelope: Envelope, payload: Payload, attempt: int = 0, session: int = 1) -> list[bytes]:
    """A message as it crosses the wire."""
    head = build_envelope(envelope, attempt=attempt, with_parts=False)
    chunks = () if fits_frame(payload) else serialise_chunks(payload)
    return [serialise_frame(session, head, serialise_body(payload)), *(data for _, _, data in chunks)]


def received(frames: Sequence[bytes], attempt: Attempt, path: Path | None = None) -> Delivered:
    """Puts a message together again, in memory or in a file, and books its frames."""
    first = parse(pb.Frame, frames[0])
    attempt.add_first(len(frames[0]), list_inline(first), count_other_fields(first))
    with path.open("wb") if path else contextlib.nullcontext() as file:
        assembler = Assembler(first.envelope, _MAX_BYTES, file)
        for chunk in first.chunks:
            assembler.add(chunk.part, chunk.data)
        for data in frames[1:]:
            part, view = _read_chunk(data)
            assembler.add(part, view)
            kind, size = classify_chunk(part, view.nbytes, first.envelope)
            attempt.add(kind, len(data), size)
        buffers = assembler.finish()
    return Delivered(read_envelope(first.envelope), buffers)


def _read_chunk(data: bytes) -> tuple[int, memoryview]:
    chunk = read_chunk(data)
    assert chunk, "a frame with nothing but a chunk"
    return chunk


class InMemoryClients:
    """Every client of a problem with its own store, answering as the real ones do.

    Args:
        folder: Where the stores are; the same folder again is the same clients after a restart.
        on_booked: Told of the rows of every message that comes whole, and of its task.
        device: Where they train.
    """

    def __init__(
        self,
        problem: Problem,
        folder: Path,
        on_booked: Callable[[Rows, str], None] = lambda *_: None,
        device: torch.device = CPU,
    ) -> None:
        self._problem, self._folder, self.on_booked, self._device = problem, folder, on_booked, device
        self._open: dict[ClientId, tuple[ClientStore, Answerer]] = {}
        self.rows: Rows = {}  # the server's ledger
        self.asked: list[tuple[int, str, int, ClientId]] = []  # (round, phase, step, client)

    def store(self, client: ClientId) -> ClientStore:
        """A client's store."""
        return self._client(client)[0]

    def _client(self, client: ClientId) -> tuple[ClientStore, Answerer]:
        if client not in self._open:
            store = ClientStore(self._folder / str(client))
            answerer = Answerer(self._problem, client, store, self._device)
            self._open[client] = store, answerer
        return self._open[client]

    def exchange(self, task: Task, into: Path) -> Path:
        """Delivers a task, lets the client answer, and leaves the result in a file, every byte booked."""
        payload = task.question.payload
        question = Envelope(
            task_id=task.task_id,
            round=task.round,
            phase=task.phase,
            step=task.step,
            parts=payload.parts,
            digest=payload.digest,
            epoch=task.epoch,
        )
        self.asked.append((task.round, task.phase, task.step, task.client))
        down = Attempt(task.round, task.phase, "down", task.client, task.attempt)
        delivered = received(frames_of(question, payload, task.attempt), down)
        self._book(task, down.close())
        envelope, answer = load_payload(self._client(task.client)[1].answer(delivered, threading.Event()))
        up = Attempt(task.round, task.phase, "up", task.client, self.store(task.client).next_attempt(task.task_id))
        received(frames_of(envelope, answer), up, into)
        self._book(task, up.close())
        return into

    def _book(self, task: Task, rows: Rows) -> None:
        merge(self.rows, rows)
        self.store(task.client).book(rows)
        self.on_booked(rows, task.task_id)

    def released(self) -> list[dict[str, Any]]:
        """Every client's privacy rows."""
        return [json.loads(row) for store, _ in self._open.values() for row in store.read_privacy_rows(0)]

    def fold(self, durable: int) -> None:
        """Tells every client how many durable points there are."""
        for store, _ in self._open.values():
            store.fold(durable)

    def close(self) -> None:
        """Closes the stores."""
        for store, _ in self._open.values():
            store.close()
        self._open.clear()


# A mailbox without a wait


Absent = Callable[[int, str, int, ClientId], bool]  # (round, phase, step, client) -> whether it does not answer


class InMemoryMailbox:
    """Stands in for the server's mailbox: what is posted is answered at once."""

    def __init__(self, clients: InMemoryClients, spool: Spool, absent: Absent) -> None:
        self._clients, self._spool, self._absent = clients, spool, absent
        self.durable = 0

    def post(self, tasks: Iterable[Task]) -> None:
        """Has every task answered, or says why not."""
        for task in tasks:
            task.outcome.set_result(self._outcome(task))

    def _outcome(self, task: Task) -> Path | Missing:
        if self._absent(task.round, task.phase, task.step, task.client):
            return Missing("not connected")
        try:
            return self._clients.exchange(task, self._spool.make_incoming_path(task.epoch, task.task_id))
        except Abstained as error:
            return Missing(str(error), abstained=True)
        except Diverged as error:
            return Missing(str(error))

    def withdraw(self, tasks: Iterable[Task], reason: str) -> None:
        """There is never anything left to withdraw."""
        assert all(task.done for task in tasks), reason


@dataclass(repr=False)  # asyncio writes out what a run returns, and there are many tensors in it
class Played:
    """What an in-memory run came to."""

    problem: Problem
    cohorts: list[list[ClientId]]
    states: list[Any]  # after set-up, after each round, and after finalize when there is one
    rows: Rows
    asked: list[tuple[int, str, int, ClientId]]
    records: list[dict[str, Any]] = field(default_factory=list)
    released: list[dict[str, Any]] = field(default_factory=list)  # every client's privacy rows
    participation: dict[int, dict[str, Any]] = field(default_factory=dict)  # by round, as the records have it

    def privacy(self) -> dict[str, Any]:
        """The privacy part of a summary."""
        told = self.problem.config.privacy
        unaccounted = find_unaccounted(self.rows.items(), self.released)
        return summarise(self.released, told.delta, told.noise, unaccounted)

    def reported(self) -> dict[str, Any]:
        """The part of a summary that has the method's own figures."""
        records = [{"round": index} | json.loads(json.dumps(record)) for index, record in enumerate(self.records)]
        return collect_reported(list_reported(self.problem.method, self.problem.params), records)

    @property
    def state(self) -> Any:
        """The last state."""
        return self.states[-1]

    @property
    def weights(self) -> Tensors:
        """The final model."""
        return self.problem.method.model(self.state)

    @property
    def sha256(self) -> str:
        """The final model's hash."""
        return hash_model(self.weights)

    def measured(self) -> dict[str, dict[str, int]]:
        """Tensor bytes by direction and kind, without zeros."""
        method = compute_totals(self.rows)["method"]
        return {
            side: {kind: sums["tensor"] for kind, sums in method[side]["by_kind"].items() if sums["tensor"]}
            for side in ("down", "up")
        }

    def predicted(self) -> dict[str, dict[str, int]]:
        """The method's formula, in the same form."""
        cost = predict_cost(self.problem, build_shapes(self.problem, self.weights, self.cohorts))
        return {
            side: {kind.label: size for kind, size in sorted(sizes.items()) if size}
            for side, sizes in (("down", cost.down), ("up", cost.up))
        }

    def evaluate(self) -> Evaluation:
        """The final model on the external test set."""
        model = self.problem.copy_network()
        load(model, self.weights)
        return evaluate(
            model, self.problem.load_external_test().batches(256), num_classes=self.problem.dataset.num_classes
        )


class InMemoryFederation(contextlib.AbstractContextManager["InMemoryFederation"]):
    """One run's server half and all its clients. What a client half raises is raised here, where a test can see it.

    Args:
        folder: Keeps the clients' stores; None for a folder that goes with the federation.
        absent: Who does not answer what.
        device: Where both halves compute.
    """

    def __init__(
        self,
        problem: Problem,
        folder: Path | None = None,
        *,
        absent: Absent = lambda *_: False,
        quorum: float = 0.5,
        device: torch.device = CPU,
    ) -> None:
        self.problem, self._quorum = problem, quorum
        self.aggregation = {layer.name: layer.init(problem.env) for layer in problem.aggregators}
        self._temporary = tempfile.TemporaryDirectory()
        here = Path(self._temporary.name)
        self.clients = InMemoryClients(problem, folder or here / "clients", device=device)
        self._executor = ThreadPoolExecutor(1)
        spool = Spool(here / "spool")
        self.mailbox = InMemoryMailbox(self.clients, spool, absent)
        self.desk = ServerContext(
            problem,
            RUN_ID,
            cast(Mailbox, self.mailbox),
            spool,
            work=self._executor,
            io=self._executor,
            device=device,
            progress=lambda *_: None,
        )

    def __exit__(self, *_: object) -> None:
        self.clients.close()
        self._executor.shutdown()
        self._temporary.cleanup()

    def cohort(self, index: int) -> list[ClientId]:
        """Who is asked in a round, as the coordinator draws it."""
        return select_cohort(self.problem.config, self.problem.env, index)

    def stage(self, index: int) -> ServerRound:
        """A round for the sampled cohort, or set-up for everybody."""
        everybody = range(self.problem.config.clients)
        self._seed_torch(index)
        cohort = everybody if index == SETUP_ROUND else self.cohort(index)
        aggregation = self.aggregation
        return ServerRound(self.desk, index, cohort, self._quorum, aggregation=aggregation, steps={}, save=self._save)

    def final_stage(self, index: int) -> ServerRound:
        """Finalize, after the last round."""
        self._seed_torch(index)
        everybody = range(self.problem.config.clients)
        return ServerRound(self.desk, index, everybody, self._quorum, aggregation=self.aggregation)

    def _seed_torch(self, index: int) -> None:
        seed_torch(derive(self.problem.config.seed, "torch", "server", index, self.mailbox.durable), self.desk.device)

    async def _save(self, rnd: ServerRound, state: Any) -> None:
        self.reach_durable_point()
        self._seed_torch(rnd.index)

    def reach_durable_point(self) -> None:
        """What a checkpoint means to clients: they forget what only a replay from before it would need."""
        self.mailbox.durable += 1
        self.clients.fold(self.mailbox.durable)

    def init(self) -> Any:
        """The state before the first round."""
        self._seed_torch(SETUP_ROUND - 1)
        return self.problem.method.init(self.problem.env)

    async def play(self, rounds: int, between: Callable[[Any], Any] = lambda state: state) -> Played:
        """Set-up, rounds and finalize.

        Args:
            between: What happens to a state when it is checkpointed; the run goes on with what it returns.
        """
        method = self.problem.method
        cohorts = [self.cohort(index) for index in range(rounds)]
        played = Played(self.problem, cohorts, [], self.clients.rows, self.clients.asked)
        state = self.init()
        if type(method).overrides("setup"):
            rnd = self.stage(SETUP_ROUND)
            state = await method.setup(state, rnd)
            played.participation[SETUP_ROUND] = rnd.describe_participation()
        played.states.append(state := between(state))
        self.reach_durable_point()
        for index in range(rounds):
            rnd = self.stage(index)
            played.states.append(state := between(await method.round(state, rnd)))
            self.aggregation = {name: held and between(held) for name, held in rnd.aggregation.items()}
            played.records.append(rnd.recorded)
            played.participation[index] = rnd.describe_participation()
            self.reach_durable_point()
        if type(method).overrides("finalize"):
            rnd = self.final_stage(rounds)
            played.states.append(await method.finalize(state, rnd))
            played.participation[rounds] = rnd.describe_participation()
        played.released = self.clients.released()
        return played


def run_in_memory(
    problem: Problem,
    rounds: int = 2,
    *,
    folder: Path | None = None,
    absent: Absent = lambda *_: False,
    quorum: float = 0.5,
    between: Callable[[Any], Any] = lambda state: state,
    device: torch.device = CPU,
) -> Played:
    """Plays a whole run of any method and returns what it came to."""
    with InMemoryFederation(problem, folder, absent=absent, quorum=quorum, device=device) as federation:
        return asyncio.run(federation.play(rounds, between))


# Clients behind the server's real mailbox


class FakeLink:
    """The stream of one process, as the mailbox sees it; implements `roster.Link`.

    Args:
        on_task: Told of every task that is sent.
    """

    def __init__(self, on_task: Callable[[Delivery], None] = lambda _: None) -> None:
        self._on_task = on_task
        self.sessions: dict[ClientId, Session] = {}
        self.sent: list[Delivery] = []
        self.cancelled: list[tuple[Session, Cancel]] = []
        self.finished: list[Finished] = []

    @property
    def num_sessions(self) -> int:
        """How many clients' sessions the stream serves."""
        return len(self.sessions)

    def attach(self, token: bytes, roster: Roster, mailbox: Mailbox) -> None:
        """Takes the sessions of a Join, as the server does when the stream's client asks for it."""
        sessions = roster.attach(token, self)
        self.sessions |= {session.client: session for session in sessions}
        mailbox.attach(sessions, self)

    def drop_session(self, session: Session) -> None:
        """Gives up a session that the client has opened anew."""
        self.sessions.pop(session.client, None)

    def detach(self, roster: Roster, mailbox: Mailbox) -> None:
        """Ends the stream, as the server does when it breaks."""
        mailbox.detach(self)
        for session in self.sessions.values():
            if session.link is self:
                roster.detach(session)

    def send_task(self, delivery: Delivery) -> None:
        """Sends a task."""
        self.sent.append(delivery)
        self._on_task(delivery)

    def send_cancel(self, session: Session, cancel: Cancel) -> None:
        """Tells a client that nobody waits for an answer any more."""
        self.cancelled.append((session, cancel))

    def send_finished(self, finished: Finished) -> None:
        """Tells all clients of the stream that the run is over."""
        self.finished.append(finished)


class LinkedClients:
    """Keeps one stream open for each client and answers what comes through `InMemoryClients`.

    Args:
        before: Awaited before a client answers a task, so that a test decides who is first, last or never.
    """

    def __init__(
        self,
        roster: Roster,
        mailbox: Mailbox,
        spool: Spool,
        clients: InMemoryClients,
        before: Callable[[Task], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._roster, self._mailbox, self._spool, self._clients = roster, mailbox, spool, clients
        self._before = before
        self._running: list[asyncio.Task[None]] = []

    def join(self, *members: ClientId) -> None:
        """Opens one stream for these clients, whose tasks are answered from now on."""
        token, _, replaced = self._roster.join([(client, f"instance-{client}") for client in members])
        for old in replaced:
            self._mailbox.replace_session(old)
        FakeLink(self._begin).attach(token, self._roster, self._mailbox)

    def _begin(self, delivery: Delivery) -> None:
        self._running.append(asyncio.get_running_loop().create_task(self._serve(delivery)))

    async def _serve(self, delivery: Delivery) -> None:
        self._mailbox.mark_delivered(delivery)
        await self._answer(delivery.task)

    async def _answer(self, task: Task) -> None:
        if self._before:
            await self._before(task)
        incoming = self._spool.make_incoming_path(task.epoch, task.task_id)
        try:
            self._clients.exchange(task, incoming)
        except Exception as error:
            abstained = isinstance(error, Abstained)
            why = str(error) if abstained else f"{type(error).__name__}: {error}"
            self._mailbox.accept_failure(task, why, abstained=abstained)
            return
        if not task.done:
            self._mailbox.accept_reply(task, self._spool.keep(incoming, task.epoch, task.task_id))

    async def close(self) -> None:
        """Ends all answers."""
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


def task_of(client: ClientId, message: Any, *, round_index: int = 0, phase: str = "fit", step: int = 0) -> Task:
    """A task of its own, as `ask` makes it."""
    name = make_task_id(RUN_ID, round_index, phase, step, client)
    outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    return Task(name, client, 0, round_index, phase, step, Question(message, shared=False), outcome)
