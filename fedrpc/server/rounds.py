"""A round as the method's server half sees it.

`ask` turns a typed question into one task for each client and yields the checked answers. `mean` asks, too, and has the
run's aggregators make one update of all: each aggregator is a layer, one layer combines the updates (by default to
their weighted mean), and others act before or after it, such as a server optimizer. The coordinator checkpoints the
layers' states with the method's.
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
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from fedrpc import log
from fedrpc.aggregation.aggregator import Aggregator, Combiner, find_combining_layer
from fedrpc.data.examples import Examples
from fedrpc.errors import AnswerRefused, Cancelled, FedrpcError, describe_exception
from fedrpc.log import clean_text
from fedrpc.methods.phases import Check, ClientId, Down, Phase, Reply, Up
from fedrpc.methods.runtime import Aggregate
from fedrpc.problem import Problem
from fedrpc.process import keeping_freed_memory
from fedrpc.seeds import derive
from fedrpc.server.attendance import EVERYBODY, Attendance, list_absent
from fedrpc.server.mailbox import Mailbox, Missing, Task
from fedrpc.server.question import Expectation, Question
from fedrpc.server.quorum import build_quorum_error, group_by_reason, name_clients
from fedrpc.server.spool import Spool, Spooled, read_reply
from fedrpc.server.timing import StageClock, Timekeeper
from fedrpc.server.updates import UpdateNorms, check_counts
from fedrpc.training.loop import compute_learning_rate
from fedrpc.wire.codec import Layout, check_finite, check_same_layout, decode_parts, read_layout
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, averaged_fields, unflatten

T = TypeVar("T")
Inspect = Callable[[ClientId, Any, Any], None]  # called with client, question and answer; raises to refuse the answer
Progress = Callable[[str, dict[str, Any]], None]
_PROGRESS_EVERY_S = 0.1
_SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class ServerContext:
    """What the rounds of a server share.

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
    timing: Timekeeper = field(default_factory=Timekeeper)

    @cached_property
    def most_examples(self) -> list[int]:
        """Of every client, the most examples that it can train on."""
        env, method = self.problem.env, self.problem.method
        return [method.count_most_examples(env, client) for client in range(env.num_clients)]

    def expect(self, phase: Phase[Any, Any]) -> Expectation:
        """What the answers to a question can look like."""
        epochs, most = self.problem.config.train.epochs, self.problem.config.limits.max_message_bytes
        return Expectation(phase, epochs=epochs, data_bytes=self._largest_data_bytes, max_bytes=most)

    @cached_property
    def _largest_data_bytes(self) -> int:
        return max(self.problem.num_examples, default=0) * math.prod(self.problem.env.shape) * torch.float32.itemsize

    async def off_loop(self, function: Callable[..., T], *args: Any) -> T:
        """Runs the server's own heavy work in an io thread."""
        return await asyncio.get_running_loop().run_in_executor(self.io, function, *args)


def make_task_id(run_id: str, round_index: int, phase: str, step: int, client: int) -> str:
    """Computes a task's id: the same question to the same client has the same id, also when the round is repeated."""
    return hashlib.sha256(f"{run_id}/{round_index}/{phase}/{step}/{client}".encode()).hexdigest()[:32]


@dataclass(frozen=True)
class _Asked:
    """One question to many clients: what is known of its answers, and what became of them."""

    expected: Expectation
    replies: dict[ClientId, Spooled] = field(default_factory=dict)  # those that were read and found right
    missing: dict[ClientId, Missing] = field(default_factory=dict)

    @property
    def num_asked(self) -> int:
        """How many clients were asked, once all have answered or are missing."""
        return len(self.replies) + len(self.missing)


class ServerRound:
    """Implements `methods.runtime.Round`.

    Args:
        quorum: The share of the clients asked that must answer.
        aggregation: The aggregators' states, by name.
        attempts: Gives the number of the first delivery of a phase to a client: not 0 in a round that is repeated.
        attendance: Who takes part in each question.
        steps: The next step by phase, in a stage that resumes from a durable point within it.
        save: Makes a state durable.
        clock: Measures where the time goes.
    """

    def __init__(
        self,
        server: ServerContext,
        index: int,
        cohort: Sequence[ClientId],
        quorum: float,
        *,
        aggregation: Mapping[str, Any] | None = None,
        attempts: Callable[[str, ClientId], int] = lambda *_: 0,
        attendance: Attendance = EVERYBODY,
        steps: Mapping[str, int] | None = None,
        save: Callable[[ServerRound, Any], Awaitable[None]] | None = None,
        clock: StageClock | None = None,
    ) -> None:
        self.index = index
        self.cohort: Sequence[ClientId] = tuple(cohort)
        self.env, self.params, self.device = server.problem.env, server.problem.params, server.device
        self.missing: Mapping[ClientId, str] = {}
        self.recorded: dict[str, Any] = {}
        self.steps: dict[str, int] = dict(steps or {})
        self.aggregation: dict[str, Any] = dict(aggregation or {})
        self.answered: set[ClientId] = set()  # who gave at least one answer
        self._abstained: set[ClientId] = set()  # who declined at least one question
        self._missed: set[ClientId] = set()  # who failed to answer at least one
        self._reasons: dict[ClientId, Missing] = {}  # why, the last time
        self._num_answers: Counter[str] = Counter()  # by phase
        self._server, self._quorum, self._attempts, self._save = server, quorum, attempts, save
        self._clock = clock or StageClock()
        self._attendance = attendance
        self._scope = ""  # before the purposes of random streams
        self._hung: dict[ClientId, Missing] = {}
        self._posted: list[Task] = []
        self._shown_at = 0.0
        self._warned: set[str] = set()  # reasons
        self._log = log.get("rounds")

    def model(self) -> nn.Module:
        """A fresh copy of the run's network."""
        return self._server.problem.copy_network().to(self.device)

    def rng(self, purpose: str, step: int = 0) -> np.random.Generator:
        """The stream for a purpose in this round."""
        return derive(self._server.problem.config.seed, self._scope + purpose, "server", self.index, step)

    def learning_rate(self) -> float:
        """The clients' rate of this round, after decay."""
        return compute_learning_rate(self.env.train, self.index)

    async def compute(self, function: Callable[..., T], *args: Any, keep_memory: bool = False) -> T:
        """Runs heavy work off the event loop."""

        def work() -> T:
            with keeping_freed_memory() if keep_memory else contextlib.nullcontext():
                return function(*args)

        return await asyncio.get_running_loop().run_in_executor(self._server.work, work)

    async def oracle(self, epochs: int) -> nn.Module:
        """A network trained on all clients' raw data; the record says that it was asked for."""
        self.record(oracle="sees all raw data")
        stop = threading.Event()

        def check() -> None:
            if stop.is_set():
                raise Cancelled("the server is shutting down")

        try:
            return await self.compute(self._server.problem.train_oracle, epochs, self.device, check, keep_memory=True)
        except asyncio.CancelledError:
            stop.set()
            raise

    def held_out(self) -> Examples:
        """Real training examples that no client holds; the record says that they were asked for."""
        self.record(held_out="real examples that no client holds")
        return self._server.problem.load_held_out()

    async def save(self, state: Any) -> None:
        """Makes a state durable within a stage."""
        if self._save is None:
            raise RuntimeError("only set-up and rounds have durable points within them")
        await self._save(self, state)
        self._num_answers.clear()

    def record(self, **values: Any) -> None:
        """Adds values to this round's line in records.jsonl."""
        self.recorded |= values

    def describe_participation(self) -> dict[str, Any]:
        """Who was to take part in this stage and who did, for records.jsonl: `fedrpc audit` checks rows by it.

        `answers` are counted by phase from the last durable point within the stage, if there was one: a server that is
        started again continues there, and knows of no answer before.
        """
        return {
            "cohort": list(self.cohort),
            "answered": sorted(self.answered),
            "abstained": sorted(self._abstained),
            "missing": sorted(self._missed),
            "answers": dict(self._num_answers),
        } | list_absent(self._reasons)

    def close(self) -> None:
        """Withdraws the tasks that the method left unanswered."""
        self._server.mailbox.withdraw(self._posted, "the round is over")

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
        layers, fields, states = self._server.problem.aggregators, averaged_fields(phase.up), self.aggregation
        clients = list(message) if isinstance(message, Mapping) else self.cohort
        for layer in layers:
            state = await layer.prepare(states[layer.name], self._for_layer(layer), phase, clients)
            self._set_state(layer, state)
        combining = find_combining_layer(layers)
        combiners: dict[str, Combiner] = {}
        answers: dict[ClientId, Up] = {}
        asked = _Asked(self._server.expect(phase))
        layouts, norms = _SameLayouts(fields, check, asked.expected), self._build_norms(phase)

        async def combine(reply: Reply[Up]) -> None:
            for name, weigh in fields.items():
                if (tensors := getattr(reply.body, name)) is not None:
                    if name not in combiners:
                        combiners[name] = combining.make_combiner(states[combining.name])
                    await self.compute(combiners[name].add, tensors, weigh(reply.body), reply.client)

        async for reply in self._ask(phase, message, check=layouts, inspect=norms.measure, asked=asked):
            await combine(reply)
            answers[reply.client] = _drop_fields(reply.body, fields)
            del reply  # its mapped file with it
        if refused := norms.find_outliers():
            self._refuse(phase, refused, asked, self._quorum)
            combiners.clear()
            answers = {client: answer for client, answer in answers.items() if client not in refused}
        if refused or each is not None:
            # Once more, now that it is known which updates count.
            async for reply in self._read_again(phase, asked):
                if refused:
                    await combine(reply)
                if each is not None:
                    await each(reply)
                del reply
        aggregates: Mapping[str, Tensors] = {n: await self.compute(c.combine) for n, c in combiners.items()}
        for name, tensors in aggregates.items():
            layouts.check_aggregate(name, tensors, combining.name)
        if answers:
            sent = _find_common_fields(phase, message)
            for layer in layers:
                rnd = self._for_layer(layer)
                aggregates, state = await layer.finish(states[layer.name], rnd, aggregates, sent)
                self._set_state(layer, state)
        return Aggregate(answers, aggregates)

    def _build_norms(self, phase: Phase[Any, Any]) -> UpdateNorms:
        """Measures the updates that answer a phase; none where an aggregator hides them."""
        hidden = any(layer.hides_updates for layer in self._server.problem.aggregators)
        ratio = self._server.problem.config.limits.update_norm
        return UpdateNorms(phase, {} if hidden else averaged_fields(phase.up), self._server.problem.num_examples, ratio)

    def _refuse(self, phase: Phase[Any, Any], why: Mapping[ClientId, str], asked: _Asked, quorum: float) -> None:
        """Counts clients as missing whose answers were right by themselves, but not beside the others'."""
        for client, reason in why.items():
            del asked.replies[client]
            self.answered.discard(client)
            asked.missing[client] = Missing(reason)
            self._note_missing(phase, client, asked.missing[client])
        self.missing = {client: missing.reason for client, missing in asked.missing.items()}
        self.record(refused_updates=self.recorded.get("refused_updates", {}) | dict(why))
        self._check_quorum(phase, asked, quorum)

    async def _read_again(self, phase: Phase[Any, Up], asked: _Asked) -> AsyncIterator[Reply[Up]]:
        """Yields the answers that were found right, from where they are spooled."""
        for client, spooled in asked.replies.items():
            self._clock.enter(phase.name, "read")
            reply = Reply(client, await self._server.off_loop(_decode, spooled, phase))
            self._clock.enter(phase.name, "aggregate")
            yield reply
            del reply  # its mapped file with it

    def _for_layer(self, layer: Aggregator[Any, Any]) -> ServerRound:
        """This round for an aggregator: with random streams of its own, and its answers are no participation."""
        mine = copy.copy(self)
        mine._scope = f"aggregation/{layer.name}/"
        mine.answered, mine._abstained, mine._missed = set(), set(), set()
        mine._reasons = {}
        return mine

    def _set_state(self, layer: Aggregator[Any, Any], state: Any) -> None:
        before = self.aggregation[layer.name]
        if type(state) is not type(before):
            raise TypeError(
                f"the state of aggregator '{layer.name}' was {type(before).__name__}, got {type(state).__name__}"
            )
        self.aggregation[layer.name] = state

    def ask(
        self,
        phase: Phase[Down, Up],
        message: Down | Mapping[ClientId, Down],
        *,
        quorum: float | None = None,
        check: Check[Down, Up] | None = None,
        inspect: Inspect | None = None,
    ) -> AsyncIterator[Reply[Up]]:
        """Asks everybody at once and yields the answers in cohort order.

        Args:
            inspect: For the coordinator's own questions: a check that knows whose answer it is.
        """
        if not averaged_fields(phase.up):
            return self._ask(phase, message, quorum=quorum, check=check, inspect=inspect)
        self._check_may_see_updates(phase)
        return self._ask_for_updates(phase, message, quorum, check)

    async def _ask_for_updates(
        self,
        phase: Phase[Down, Up],
        message: Down | Mapping[ClientId, Down],
        quorum: float | None,
        check: Check[Down, Up] | None,
    ) -> AsyncIterator[Reply[Up]]:
        """Yields updates once all are there, since only then it is known which of them are out of proportion."""
        asked, norms = _Asked(self._server.expect(phase)), self._build_norms(phase)
        async for _ in self._ask(phase, message, quorum=quorum, check=check, inspect=norms.measure, asked=asked):
            pass
        if refused := norms.find_outliers():
            self._refuse(phase, refused, asked, self._quorum if quorum is None else quorum)
        async for reply in self._read_again(phase, asked):
            yield reply

    def _check_may_see_updates(self, phase: Phase[Any, Any]) -> None:
        method = type(self._server.problem.method)
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
        inspect: Inspect | None = None,
        asked: _Asked | None = None,
    ) -> AsyncIterator[Reply[Up]]:
        messages = dict(message) if isinstance(message, Mapping) else dict.fromkeys(self.cohort, message)
        asked = asked or _Asked(self._server.expect(phase))
        self._clock.enter(phase.name, "encode")
        tasks = await self._make_tasks(phase, messages, self._next_step(phase), asked.expected)
        checks = (phase.check, check)
        self._attendance.apply(tasks, self._server.mailbox)
        self._server.mailbox.post(tasks)
        try:
            for task in tasks:
                self._show_progress(phase, tasks)
                self._clock.wait(phase.name, task.times)
                outcome = await task.outcome
                self._clock.enter(phase.name, "read")
                reply = await self._read_reply(outcome, phase, task, messages[task.client], checks, inspect)
                if isinstance(reply, Missing):
                    asked.missing[task.client] = reply
                    self._note_missing(phase, task.client, reply)
                    self._server.timing.write_missing(task, reply)
                    continue
                assert not isinstance(outcome, Missing), "it was read"
                asked.replies[task.client] = outcome
                self.answered.add(task.client)
                self._num_answers[phase.name] += 1
                self._clock.enter(phase.name, "aggregate")
                yield reply
                del reply  # its mapped file with it
                task.question.forget()
        except asyncio.CancelledError:
            tasks = []  # the server is shutting down: clients may go on, since it asks the same after a restart
            raise
        finally:
            self._server.mailbox.withdraw(tasks, "the answer is no longer needed")
            for task in tasks:
                if task.done:
                    self._server.timing.write_withdrawn(task)
            self.missing = {client: why.reason for client, why in asked.missing.items()}
        self._clock.enter(phase.name, "aggregate")
        self._check_quorum(phase, asked, self._quorum if quorum is None else quorum)

    def _next_step(self, phase: Phase[Any, Any]) -> int:
        number = self.steps.get(phase.name, 0)
        self.steps[phase.name] = number + 1
        return number

    async def _make_tasks(
        self, phase: Phase[Any, Any], asked: Mapping[ClientId, Any], step: int, expected: Expectation
    ) -> list[Task]:
        server = self._server
        times = Counter(id(message) for message in asked.values())
        questions = {id(m): Question(m, shared=times[id(m)] > 1, expected=expected) for m in asked.values()}
        if len(questions) == 1:
            # A broadcast is encoded before anything can change it.
            await server.off_loop(next(iter(questions.values())).prepare)
        tasks = []
        for client in [c for c in self.cohort if c in asked] + [c for c in asked if c not in self.cohort]:
            name = make_task_id(server.run_id, self.index, phase.name, step, client)
            question = questions[id(asked[client])]
            outcome: asyncio.Future[Spooled | Missing] = asyncio.get_running_loop().create_future()
            epoch = server.mailbox.durable
            if server.spool.exists(epoch, name):
                await server.off_loop(question.prepare)
                kept = server.spool.find_reusable(epoch, name, question.payload.digest)
                if kept:
                    outcome.set_result(kept)
            if not outcome.done() and client in self._hung:
                outcome.set_result(self._hung[client])
            attempt = self._attempts(phase.name, client)
            tasks.append(Task(name, client, epoch, self.index, phase.name, step, question, outcome, attempt=attempt))
        self._posted[:] = [task for task in self._posted if not task.done] + tasks
        return tasks

    async def _read_reply(
        self,
        outcome: Spooled | Missing,
        phase: Phase[Down, Up],
        task: Task,
        message: Down,
        checks: Sequence[Check[Down, Up] | None],
        inspect: Inspect | None,
    ) -> Missing | Reply[Up]:
        if isinstance(outcome, Missing):
            return outcome
        try:
            # A hop to another thread costs more than the work on a small reply.
            small = (outcome.stat().st_size if isinstance(outcome, Path) else outcome.size) < _SMALL_BYTES
            args = (outcome, phase, task, message, checks, inspect)
            return Reply(task.client, self._read(*args) if small else await self._server.off_loop(self._read, *args))
        except Exception as error:
            # A bad reply is its client's failure, never the run's.
            text = str(error) if isinstance(error, FedrpcError) else f"{type(error).__name__}: {error}"
            if not isinstance(error, FedrpcError | ValueError):  # a check refuses by ValueError: this is its mistake
                text = describe_exception(error, type(self._server.problem.method).__module__)
            return Missing(clean_text(text), failed=AnswerRefused)

    def _read(
        self,
        reply: Spooled,
        phase: Phase[Any, Any],
        task: Task,
        message: Any,
        checks: Sequence[Check[Any, Any] | None],
        inspect: Inspect | None,
    ) -> Any:
        """Decodes and checks one spooled reply to a message; raises when anything is wrong with it."""
        envelope, buffers = read_reply(reply)
        tensors = decode_parts(phase.up, envelope.parts, buffers)
        body = unflatten(phase.up, tensors)
        for name, asked in phase.same_fields.items():
            sent = read_layout(task.question.payload.parts, asked)
            check_same_layout(name, sent, read_layout(envelope.parts, name))
        for part in envelope.parts:
            if Kind(part.kind) != Kind.SCALARS:
                check_finite(part.name, tensors[part.name])
        check_counts(body, self._server.most_examples[task.client], self.env.train.epochs)
        for check in checks:
            if check is not None:
                check(message, body)
        if inspect is not None:
            inspect(task.client, message, body)
        return body

    def _note_missing(self, phase: Phase[Any, Any], client: ClientId, why: Missing) -> None:
        if why.hung:
            self._hung[client] = why
        self._reasons[client] = why
        (self._abstained if why.abstained else self._missed).add(client)
        # What fails again and again is said once, by `_check_quorum`: as a warning, or as what ends the run.
        say = self._log.info if why.failed or why.planned else self._log.warning
        say("client_missing", phase=phase.name, client=client, why=why.reason)

    def _show_progress(self, phase: Phase[Any, Any], tasks: Sequence[Task]) -> None:
        now = time.monotonic()
        if now - self._shown_at > _PROGRESS_EVERY_S:
            self._shown_at, name = now, phase.name
            place = {"round": self.index, "phase": name, "step": self.steps[name]}
            steps = self._server.problem.method.count_steps(self.params).get(name, 0)
            answers = {"answered": sum(task.done for task in tasks), "of": len(tasks)}
            self._server.progress("phase", place | {"steps": steps} | answers)

    def _check_quorum(self, phase: Phase[Any, Any], asked: _Asked, quorum: float) -> None:
        num_asked, missing = asked.num_asked, asked.missing
        # Clients that abstained could not answer, so the quorum does not count them.
        due = self._attendance.count_due(num_asked - sum(why.abstained for why in missing.values()))
        needed, answered = math.ceil(quorum * due), num_asked - len(missing)
        if answered < needed:
            where = f"round {self.index}, phase {phase.name}"
            raise build_quorum_error(where, num_asked, needed, missing, self._server.problem.config)
        failed = group_by_reason({client: what for client, what in missing.items() if what.failed})
        for reason in failed.keys() - self._warned:
            self._log.warning("clients_failed", phase=phase.name, clients=name_clients(failed[reason]), why=reason)
        self._warned |= failed.keys()


def _decode(reply: Spooled, phase: Phase[Any, Up]) -> Up:
    """Decodes a reply that was checked before."""
    envelope, buffers = read_reply(reply)
    body: Up = unflatten(phase.up, decode_parts(phase.up, envelope.parts, buffers))
    return body


class _SameLayouts:
    """Checks answers, and that their averaged fields have the names, shapes and dtypes of the first answer's."""

    def __init__(self, fields: Iterable[str], check: Check[Any, Any] | None, expected: Expectation) -> None:
        self._fields, self._check, self._expected = tuple(fields), check, expected
        self._layouts: dict[str, Layout] = {}

    def __call__(self, question: Any, answer: Any) -> None:
        """Raises ValueError when an answer cannot be averaged with the others."""
        if self._check is not None:
            self._check(question, answer)
        for name in self._fields:
            if (tensors := getattr(answer, name)) is None:
                continue
            layout = _describe_layout(tensors)
            if layout != self._layouts.setdefault(name, layout):
                raise ValueError(f"'{name}' has other names, shapes or dtypes than the first answer's")
            self._expected.note_layout(name, layout)

    def check_aggregate(self, name: str, tensors: Tensors, aggregator: str) -> None:
        """Raises TypeError when what an aggregator made of the answers is not like one of them."""
        if _describe_layout(tensors) != self._layouts[name]:
            raise TypeError(f"aggregator '{aggregator}' gave '{name}' other names, shapes or dtypes than updates have")


def _describe_layout(tensors: Tensors) -> Layout:
    return {path: (tensor.dtype, tuple(tensor.shape)) for path, tensor in tensors.items()}


def _are_equal(one: Tensors, other: Tensors) -> bool:
    return one is other or (
        isinstance(one, dict) and one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    )


def _drop_fields(answer: Up, fields: Iterable[str]) -> Up:
    """An answer without its averaged fields, copied out of the file that it was read from."""
    small: Up = dataclasses.replace(answer, **{name: {} for name in fields})  # type: ignore[type-var]
    return copy.deepcopy(small)


def _find_common_fields(phase: Phase[Down, Any], message: Down | Mapping[ClientId, Down]) -> dict[str, Tensors]:
    """What all clients started from: the fields of the question that the answer has too, if all got the same."""
    messages = list(message.values()) if isinstance(message, Mapping) else [message]
    found = {}
    for name, asked in phase.same_fields.items():
        if name != asked:
            continue
        first = getattr(messages[0], name)
        if isinstance(first, dict) and all(_are_equal(getattr(other, name), first) for other in messages):
            found[name] = first
    return found
