"""A round as the method's server half sees it: `ask` turns a typed question into tasks and yields checked answers."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from fedrpc import log
from fedrpc.errors import QuorumError, WireError
from fedrpc.methods.base import ClientId, Down, Phase, Reply, Up
from fedrpc.problem import Problem
from fedrpc.seeds import derive
from fedrpc.server.mailbox import Mailbox, Missing, Question, Task
from fedrpc.server.spool import Spool
from fedrpc.wire.codec import decode
from fedrpc.wire.frames import read_file
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import FlatPart, flatten

T = TypeVar("T")
Progress = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Desk:
    """What all rounds of a server share."""

    problem: Problem
    run_id: str
    mailbox: Mailbox
    spool: Spool
    executor: Executor
    device: torch.device
    progress: Progress


def task_id(run_id: str, round_index: int, phase: str, step: int, client: int) -> str:
    """The same question to the same client has the same id, also when the round is replayed."""
    return hashlib.sha256(f"{run_id}/{round_index}/{phase}/{step}/{client}".encode()).hexdigest()[:32]


class ServerRound:
    """Implements `methods.base.Round`.

    Args:
        quorum: The share of those asked that must answer.
        attempts: The number of the first delivery by (phase, client), in a round that is played again.
    """

    def __init__(
        self,
        desk: Desk,
        index: int,
        cohort: Sequence[ClientId],
        quorum: float,
        attempts: Mapping[tuple[str, ClientId], int] | None = None,
    ) -> None:
        self.index = index
        self.cohort: Sequence[ClientId] = tuple(cohort)
        self.params, self.device = desk.problem.params, desk.device
        self.missing: Mapping[ClientId, str] = {}
        self.recorded: dict[str, Any] = {}
        self._desk, self._quorum, self._attempts = desk, quorum, attempts or {}
        self._posted: list[Task] = []
        self._asked: set[str] = set()
        self._log = log.get("rounds")

    def model(self) -> nn.Module:
        """A fresh copy of the run's network."""
        return self._desk.problem.network().to(self.device)

    def rng(self, purpose: str) -> np.random.Generator:
        """The stream for a purpose in this round."""
        return derive(self._desk.problem.config.seed, purpose, "server", self.index)

    async def compute(self, function: Callable[..., T], *args: Any) -> T:
        """Runs heavy work off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._desk.executor, function, *args)

    def record(self, **values: Any) -> None:
        """Adds values to this round's line in records.jsonl."""
        self.recorded |= values

    def close(self) -> None:
        """Withdraws whatever a method left unanswered."""
        self._desk.mailbox.withdraw(self._posted, "the round is over")

    async def ask(
        self, phase: Phase[Down, Up], message: Down | Mapping[ClientId, Down], *, step: int = 0
    ) -> AsyncIterator[Reply[Up]]:
        """Asks everybody at once and yields the answers in cohort order."""
        asked = dict(message) if isinstance(message, Mapping) else dict.fromkeys(self.cohort, message)
        tasks = await self._tasks(phase, asked, step)
        missing: dict[ClientId, str] = {}
        self._desk.mailbox.post(task for task in tasks if not task.done)
        try:
            for number, task in enumerate(tasks):
                self._tell(phase, tasks)
                outcome = await task.outcome
                try:
                    if isinstance(outcome, Missing):
                        raise WireError(outcome.reason)
                    body = await self.compute(_read, outcome, phase, asked[task.client])
                except WireError as error:
                    missing[task.client] = str(error)
                    self._log.warning("client_missing", phase=phase.name, client=task.client, why=str(error))
                    continue
                yield Reply(task.client, body)
                del body
                tasks[number].question = Question(None)  # an individual message can be forgotten now
        except asyncio.CancelledError:
            tasks = []  # the server ends: clients may work on, for its next life asks the same again
            raise
        finally:
            self._desk.mailbox.withdraw(tasks, "nobody waits for the answer any more")
            self.missing = missing
        self._check_quorum(phase, len(tasks), missing)

    async def _tasks(self, phase: Phase[Any, Any], asked: Mapping[ClientId, Any], step: int) -> list[Task]:
        desk, questions = self._desk, {id(message): Question(message) for message in asked.values()}
        if len(questions) == 1 and asked:
            # A broadcast: encoded once, before anything can change it.
            await self.compute(next(iter(questions.values())).prepare)
        tasks = []
        for client in [c for c in self.cohort if c in asked] + [c for c in asked if c not in self.cohort]:
            name = task_id(desk.run_id, self.index, phase.name, step, client)
            if name in self._asked:
                raise ValueError(
                    f"client {client} was asked phase '{phase.name}', step {step} in round {self.index} already; "
                    "number further questions of one phase in a round with step="
                )
            self._asked.add(name)
            question = questions[id(asked[client])]
            outcome: asyncio.Future[Path | Missing] = asyncio.get_running_loop().create_future()
            if desk.spool.exists(self.index, name):
                digest = (await self.compute(lambda q=question: q.payload)).digest
                kept = desk.spool.reusable(self.index, name, digest)
                if kept:
                    outcome.set_result(kept)
            attempt = self._attempts.get((phase.name, client), 0)
            tasks.append(Task(name, client, self.index, phase.name, step, question, outcome, attempt=attempt))
        self._posted = [task for task in self._posted if not task.done] + tasks
        return tasks

    def _tell(self, phase: Phase[Any, Any], tasks: Sequence[Task]) -> None:
        answered = sum(task.done for task in tasks)
        self._desk.progress("phase", {"round": self.index, "phase": phase.name, "answered": answered, "of": len(tasks)})

    def _check_quorum(self, phase: Phase[Any, Any], num_asked: int, missing: Mapping[ClientId, str]) -> None:
        needed = math.ceil(self._quorum * num_asked)
        answered = num_asked - len(missing)
        if answered < needed:
            why = "; ".join(f"client {client}: {reason}" for client, reason in list(missing.items())[:3])
            raise QuorumError(
                f"round {self.index}, phase {phase.name}: {answered} of {num_asked} clients answered, the quorum is "
                f"{needed} ({why}); run the same command again to go on from here"
            )


def _read(path: Path, phase: Phase[Any, Any], question: Any) -> Any:
    """Decodes and checks one spooled reply; what is wrong with it is the client's fault, never ours."""
    envelope, buffers = read_file(path)
    body = decode(phase.up, envelope.parts, buffers)
    flat = {part.name: part for part in flatten(body)}
    wanted = {part.name: part for part in flatten(question)} if phase.same else {}
    for name in phase.same:
        _check_same(flat.get(name), wanted.get(name), name)
    for part in flat.values():
        if part.kind == Kind.WEIGHTS:
            _check_finite(part)
    return body


def _check_same(got: FlatPart | None, wanted: FlatPart | None, name: str) -> None:
    def layout(part: FlatPart | None) -> dict[str, Any]:
        return {path: (t.dtype, t.shape) for path, t in part.tensors.items()} if part else {}

    ours, theirs = layout(wanted), layout(got)
    for path in [*ours, *theirs]:
        if ours.get(path) != theirs.get(path):
            raise WireError(f"'{name}' tensor '{path}': expected {ours.get(path)}, got {theirs.get(path)}")


def _check_finite(part: FlatPart) -> None:
    for path, tensor in part.tensors.items():
        if (tensor.is_floating_point() or tensor.is_complex()) and not bool(torch.isfinite(tensor).all()):
            raise WireError(f"'{part.name}' tensor '{path}' has NaN or infinity: the client's training diverged")
