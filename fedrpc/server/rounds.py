"""A round as the method's server half sees it.

`ask` turns a typed question into one task for each client and yields the checked answers; `mean` asks, and has the
run's aggregators make one update of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import hashlib
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from fedrpc import log
from fedrpc.aggregation.aggregator import combining_layer
from fedrpc.errors import Cancelled, QuorumError, WireError
from fedrpc.methods.phases import Check, ClientId, Down, Phase, Reply, Up
from fedrpc.methods.runtime import Aggregate
from fedrpc.problem import Problem
from fedrpc.process import keeping_freed_memory
from fedrpc.seeds import derive
from fedrpc.server.mailbox import Mailbox, Missing, Question, Task
from fedrpc.server.spool import Spool, Spooled, read_reply
from fedrpc.training.loop import compute_learning_rate
from fedrpc.wire.codec import decode_parts
from fedrpc.wire.kinds import DTYPES
from fedrpc.wire.message import Tensors, averaged_fields, unflatten
from fedrpc.wire.v1 import coordinator_pb2 as pb

T = TypeVar("T")
Progress = Callable[[str, dict[str, Any]], None]
_TELL_EVERY_S = 0.1
_SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Desk:
    """What all rounds of a server share.

    Args:
        work: One thread for the method's heavy work, so that its random draws have one order.
        io: Threads for encoding, decoding and disks.
    """

    problem: Problem
    run_id: str
    mailbox: Mailbox
    spool: Spool
    work: Executor
    io: Executor
    device: torch.device
    progress: Progress

    async def off_loop(self, function: Callable[..., T], *args: Any) -> T:
        """Runs the server's own heavy work in an io thread."""
        return await asyncio.get_running_loop().run_in_executor(self.io, function, *args)


def task_id(run_id: str, round_index: int, phase: str, step: int, client: int) -> str:
    """The same question to the same client has the same id, also when the round is replayed."""
    return hashlib.sha256(f"{run_id}/{round_index}/{phase}/{step}/{client}".encode()).hexdigest()[:32]


class ServerRound:
    """Implements `methods.runtime.Round`.

    Args:
        quorum: The share of those asked that must answer.
        aggregation: The aggregators' states, by name.
        attempts: The number of the first delivery by (phase, client), in a round that is played again.
        steps: The next step by phase, in a stage that goes on after a durable point within it.
        save: Makes a state durable.
    """

    def __init__(
        self,
        desk: Desk,
        index: int,
        cohort: Sequence[ClientId],
        quorum: float,
        *,
        aggregation: Mapping[str, Any] | None = None,
        attempts: Mapping[tuple[str, ClientId], int] | None = None,
        steps: Mapping[str, int] | None = None,
        save: Callable[[ServerRound, Any], Awaitable[None]] | None = None,
    ) -> None:
        self.index = index
        self.cohort: Sequence[ClientId] = tuple(cohort)
        self.env, self.params, self.device = desk.problem.env, desk.problem.params, desk.device
        self.missing: Mapping[ClientId, str] = {}
        self.recorded: dict[str, Any] = {}
        self.steps: dict[str, int] = dict(steps or {})
        self.aggregation: dict[str, Any] = dict(aggregation or {})
        self.answered: set[ClientId] = set()  # who gave at least one answer
        self._desk, self._quorum, self._attempts, self._save = desk, quorum, attempts or {}, save
        self._hung: dict[ClientId, str] = {}
        self._posted: list[Task] = []
        self._told_at = 0.0
        self._log = log.get("rounds")

    def model(self) -> nn.Module:
        """A fresh copy of the run's network."""
        return self._desk.problem.copy_network().to(self.device)

    def rng(self, purpose: str, step: int = 0) -> np.random.Generator:
        """The stream for a purpose in this round."""
        return derive(self._desk.problem.config.seed, purpose, "server", self.index, step)

    def learning_rate(self) -> float:
        """The clients' rate of this round, after decay."""
        return compute_learning_rate(self.env.train, self.index)

    async def compute(self, function: Callable[..., T], *args: Any, keep_memory: bool = False) -> T:
        """Runs heavy work off the event loop."""

        def work() -> T:
            with keeping_freed_memory() if keep_memory else contextlib.nullcontext():
                return function(*args)

        return await asyncio.get_running_loop().run_in_executor(self._desk.work, work)

    async def oracle(self, epochs: int) -> nn.Module:
        """A network trained on all clients' raw data; the record says that it was asked for."""
        self.record(oracle="sees all raw data")
        stop = threading.Event()

        def check() -> None:
            if stop.is_set():
                raise Cancelled("the server ends")

        try:
            return await self.compute(self._desk.problem.train_oracle, epochs, self.device, check, keep_memory=True)
        except asyncio.CancelledError:
            stop.set()
            raise

    async def save(self, state: Any) -> None:
        """Makes a state durable within a stage."""
        if self._save is None:
            raise RuntimeError("this stage has nothing to go on from; only set-up and rounds can be saved within")
        await self._save(self, state)

    def record(self, **values: Any) -> None:
        """Adds values to this round's line in records.jsonl."""
        self.recorded |= values

    def close(self) -> None:
        """Withdraws whatever a method left unanswered."""
        self._desk.mailbox.withdraw(self._posted, "the round is over")

    async def mean(
        self,
        phase: Phase[Down, Up],
        message: Down | Mapping[ClientId, Down],
        *,
        check: Check[Down, Up] | None = None,
        each: Callable[[Reply[Up]], Awaitable[None]] | None = None,
    ) -> Aggregate[Up]:
        """Asks the cohort and aggregates the fields that only count in the mean, by the run's layers."""
        if each is not None:
            self._check_may_see_updates(phase)
        layers, fields, states = self._desk.problem.aggregators, averaged_fields(phase.up), self.aggregation
        for layer in layers:
            states[layer.name] = await layer.prepare(states[layer.name], self)
        combining = combining_layer(layers, states)
        combiners: dict[str, Any] = {}
        answers: dict[ClientId, Up] = {}
        async for reply in self._ask(phase, message, check=check):
            for name, weigh in fields.items():
                if (tensors := getattr(reply.body, name)) is not None:
                    if name not in combiners:
                        combiners[name] = combining.combiner(states[combining.name])
                    await self.compute(combiners[name].add, reply.client, tensors, weigh(reply.body))
            if each is not None:
                await each(reply)
            answers[reply.client] = _without(reply.body, fields)
        aggregates: Mapping[str, Tensors] = {n: await self.compute(c.combine) for n, c in combiners.items()}
        if answers:
            sent = _sent_to_all(phase, message)
            for layer in layers:
                aggregates, states[layer.name] = await layer.finish(states[layer.name], self, aggregates, sent)
        return Aggregate(answers, aggregates)

    def ask(
        self,
        phase: Phase[Down, Up],
        message: Down | Mapping[ClientId, Down],
        *,
        quorum: float | None = None,
        check: Check[Down, Up] | None = None,
    ) -> AsyncIterator[Reply[Up]]:
        """Asks everybody at once and yields the answers in cohort order."""
        if averaged_fields(phase.up):
            self._check_may_see_updates(phase)
        return self._ask(phase, message, quorum=quorum, check=check)

    def _check_may_see_updates(self, phase: Phase[Any, Any]) -> None:
        method = type(self._desk.problem.method)
        if not method.needs_each_update:
            raise TypeError(
                f"{method.__name__} looks at single clients' updates in phase '{phase.name}', whose "
                f"{', '.join(averaged_fields(phase.up))} should only count in the mean: use `rnd.mean`, or say why "
                "in `needs_each_update`"
            )

    async def _ask(
        self,
        phase: Phase[Down, Up],
        message: Down | Mapping[ClientId, Down],
        *,
        quorum: float | None = None,
        check: Check[Down, Up] | None = None,
    ) -> AsyncIterator[Reply[Up]]:
        asked = dict(message) if isinstance(message, Mapping) else dict.fromkeys(self.cohort, message)
        tasks = await self._tasks(phase, asked, self._number(phase))
        missing: dict[ClientId, Missing] = {}
        self._desk.mailbox.post(task for task in tasks if not task.done)
        try:
            for task in tasks:
                self._tell(phase, tasks)
                reply = await self._reply(await task.outcome, phase, task, asked[task.client], check)
                if isinstance(reply, Missing):
                    missing[task.client] = reply
                    self._note(phase, task.client, reply)
                    continue
                self.answered.add(task.client)
                yield reply
                del reply  # its mapped file with it
                task.question.forget()
        except asyncio.CancelledError:
            tasks = []  # the server ends: clients may work on, for its next life asks the same again
            raise
        finally:
            self._desk.mailbox.withdraw(tasks, "nobody waits for the answer any more")
            self.missing = {client: why.reason for client, why in missing.items()}
        self._check_quorum(phase, len(tasks), missing, self._quorum if quorum is None else quorum)

    def _number(self, phase: Phase[Any, Any]) -> int:
        number = self.steps.get(phase.name, 0)
        self.steps[phase.name] = number + 1
        return number

    async def _tasks(self, phase: Phase[Any, Any], asked: Mapping[ClientId, Any], step: int) -> list[Task]:
        desk = self._desk
        times = Counter(id(message) for message in asked.values())
        questions = {id(m): Question(m, shared=times[id(m)] > 1) for m in asked.values()}
        if len(questions) == 1:
            # A broadcast: encoded before anything can change it.
            await desk.off_loop(next(iter(questions.values())).prepare)
        tasks = []
        for client in [c for c in self.cohort if c in asked] + [c for c in asked if c not in self.cohort]:
            name = task_id(desk.run_id, self.index, phase.name, step, client)
            question = questions[id(asked[client])]
            outcome: asyncio.Future[Spooled | Missing] = asyncio.get_running_loop().create_future()
            epoch = desk.mailbox.durable
            if desk.spool.exists(epoch, name):
                await desk.off_loop(question.prepare)
                kept = desk.spool.reusable(epoch, name, question.payload.digest)
                if kept:
                    outcome.set_result(kept)
            if not outcome.done() and client in self._hung:
                outcome.set_result(Missing(self._hung[client], hung=True))
            attempt = self._attempts.get((phase.name, client), 0)
            tasks.append(Task(name, client, epoch, self.index, phase.name, step, question, outcome, attempt=attempt))
        self._posted = [task for task in self._posted if not task.done] + tasks
        return tasks

    async def _reply(
        self,
        outcome: Spooled | Missing,
        phase: Phase[Down, Up],
        task: Task,
        message: Down,
        check: Check[Down, Up] | None,
    ) -> Missing | Reply[Up]:
        if isinstance(outcome, Missing):
            return outcome
        try:
            # A hop to another thread costs more than the work on a small reply.
            small = (outcome.stat().st_size if isinstance(outcome, Path) else outcome.size) < _SMALL_BYTES
            args = (outcome, phase, task.question, message, check)
            return Reply(task.client, _read(*args) if small else await self._desk.off_loop(_read, *args))
        except Exception as error:
            # Whatever is wrong with a reply is its client's fault, never the run's.
            return Missing(str(error) if isinstance(error, WireError) else f"{type(error).__name__}: {error}")

    def _note(self, phase: Phase[Any, Any], client: ClientId, why: Missing) -> None:
        if why.hung:
            self._hung[client] = why.reason
        self._log.warning("client_missing", phase=phase.name, client=client, why=why.reason)

    def _tell(self, phase: Phase[Any, Any], tasks: Sequence[Task]) -> None:
        now = time.monotonic()
        if now - self._told_at > _TELL_EVERY_S:
            self._told_at = now
            answered = sum(task.done for task in tasks)
            values = {"round": self.index, "phase": phase.name, "answered": answered, "of": len(tasks)}
            self._desk.progress("phase", values)

    def _check_quorum(
        self, phase: Phase[Any, Any], num_asked: int, missing: Mapping[ClientId, Missing], quorum: float
    ) -> None:
        # Who abstained was never going to answer, so it does not count among those who should have.
        due = num_asked - sum(why.abstained for why in missing.values())
        needed, answered = math.ceil(quorum * due), num_asked - len(missing)
        if answered < needed:
            why = "; ".join(f"client {client}: {what.reason}" for client, what in list(missing.items())[:3])
            raise QuorumError(
                f"round {self.index}, phase {phase.name}: {answered} of {num_asked} clients answered, the quorum is "
                f"{needed} ({why}); run the same command again to go on from here"
            )


def _read(
    reply: Spooled, phase: Phase[Any, Any], question: Question, message: Any, check: Check[Any, Any] | None
) -> Any:
    """Decodes and checks one spooled reply to a message; raises when anything is wrong with it."""
    envelope, buffers = read_reply(reply)
    tensors = decode_parts(phase.up, envelope.parts, buffers)
    body = unflatten(phase.up, tensors)
    for name in phase.same:
        _check_same(name, question.payload.parts, envelope.parts)
    for part in envelope.parts:
        if part.kind != pb.KIND_SCALARS:
            _check_finite(part.name, tensors[part.name])
    for each in (phase.check, check):
        if each is not None:
            each(message, body)
    return body


def _without(answer: Up, fields: Iterable[str]) -> Up:
    """An answer without its averaged fields, copied out of the file that it was read from."""
    small: Up = dataclasses.replace(answer, **{name: {} for name in fields})  # type: ignore[type-var]
    return copy.deepcopy(small)


def _sent_to_all(phase: Phase[Down, Any], message: Down | Mapping[ClientId, Down]) -> dict[str, Tensors]:
    """What all clients started from: the fields of the question that the answer has too, if all got the same."""
    messages = list(message.values()) if isinstance(message, Mapping) else [message]
    found = {}
    for name in phase.same:
        first = getattr(messages[0], name)
        if isinstance(first, dict) and all(getattr(other, name) is first for other in messages):
            found[name] = first
    return found


def _check_same(name: str, asked: Iterable[pb.Part], told: Iterable[pb.Part]) -> None:
    def layout(parts: Iterable[pb.Part]) -> dict[str, Any]:
        specs = [spec for part in parts if part.name == name for spec in part.tensors]
        return {spec.path: (DTYPES[spec.dtype], tuple(spec.shape)) for spec in specs}

    ours, theirs = layout(asked), layout(told)
    for path in [*ours, *theirs]:
        if ours.get(path) != theirs.get(path):
            raise WireError(f"'{name}' tensor '{path}': expected {ours.get(path)}, got {theirs.get(path)}")


def _check_finite(name: str, tensors: Tensors) -> None:
    for path, tensor in tensors.items():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        # NaN and infinity always reach the sum, which is quicker by far; a sum that overflows is looked at closely.
        small = tensor.dtype.itemsize < 2  # float8 has no sum
        if (small or not bool(torch.isfinite(tensor.sum()))) and not bool(torch.isfinite(tensor).all()):
            raise WireError(f"'{name}' tensor '{path}' has NaN or infinity: the client's training diverged")
