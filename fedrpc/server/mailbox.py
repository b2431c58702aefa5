"""Tasks for clients: leased in cohort order, delivered by polls, ended by a reply, a deadline or an absence.

Everything happens on one event loop, so there are no locks; one reaper looks after all time limits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedrpc import log
from fedrpc.config import LimitsConfig
from fedrpc.server.roster import Roster, Session
from fedrpc.wire.codec import Payload, encode
from fedrpc.wire.frames import chunk_frames
from fedrpc.wire.kinds import Kind
from fedrpc.wire.v1 import coordinator_pb2 as pb


class Question:
    """A message to be sent, encoded once for everybody who is asked the same.

    Args:
        message: The typed message; it must not change while the question is open.
    """

    def __init__(self, message: Any) -> None:
        self._message = message

    @cached_property
    def payload(self) -> Payload:
        """Headers and buffers."""
        return encode(self._message)

    @cached_property
    def frames(self) -> list[tuple[Kind, int, bytes]]:
        """The chunks, serialised, as (kind, tensor bytes, frame)."""
        parts = self.payload.parts
        return [(Kind(parts[index].kind), size, data) for index, size, data in chunk_frames(self.payload)]

    def prepare(self) -> None:
        """Does the encoding now; heavy, so off the event loop."""
        _ = self.frames


@dataclass(frozen=True)
class Missing:
    """Why a client did not answer."""

    reason: str


@dataclass(eq=False)
class Task:
    """One question to one client."""

    task_id: str
    client: int
    round: int
    phase: str
    step: int
    question: Question
    outcome: asyncio.Future[Path | Missing]
    posted_at: float = field(default_factory=time.monotonic)
    attempt: int = 0
    leased: bool = False
    delivered_at: float | None = None
    receiving: int = 0

    @property
    def done(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.outcome.done()


class Mailbox:
    """Hands tasks to parked polls.

    Args:
        roster: Who is here.
        limits: Time limits.
        parallel: Tasks that may be out at a time; 0 is no limit.
        on_lost: Called for each session that is given up.
    """

    def __init__(
        self, roster: Roster, limits: LimitsConfig, parallel: int, on_lost: Callable[[Session], None] = lambda _: None
    ) -> None:
        self._roster, self._limits, self._parallel, self._on_lost = roster, limits, parallel, on_lost
        self._open: dict[str, Task] = {}  # in posting order, which is cohort order
        self._busy: dict[int, Task] = {}  # leases, by client
        self._ended: dict[str, None] = {}  # accepted lately: a second submission is a duplicate, not late
        self._finished: pb.Idle | None = None
        self.durable_round = -2
        self._log = log.get("mailbox")

    # The consumer's side

    def post(self, tasks: Iterable[Task]) -> None:
        """Enqueues tasks in the order in which they may be leased."""
        for task in tasks:
            self._open[task.task_id] = task
        self._pump()

    def withdraw(self, tasks: Iterable[Task], reason: str) -> None:
        """Ends tasks that nobody waits for, and tells the clients that work on them."""
        for task in tasks:
            if not task.done:
                self._end(task, Missing(reason), cancel=True)

    def finish(self, reason: str) -> None:
        """Answers every poll from now on with the end of the run."""
        self._finished = pb.Idle(finished=True, reason=reason, durable_round=self.durable_round)
        for session in self._roster:
            self._wake(session, self._finished)

    # The clients' side

    async def next(self, session: Session) -> Task | pb.Cancel | pb.Idle:
        """Parks a client's poll until there is something for it."""
        if self._finished:
            return self._finished
        self._wake(session, pb.Idle(retry_ms=0, durable_round=self.durable_round))  # a newer poll replaces an older one
        parked: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        session.parked = parked
        self._pump()
        try:
            await asyncio.wait({parked}, timeout=self._limits.poll_s)
        except asyncio.CancelledError:
            self._unpark(session, parked)
            self._take_back(session, parked)
            raise
        self._unpark(session, parked)
        replaced = self._roster.of(session.client) is not session  # then the task waits for the new session already
        if parked.done() and not (replaced and isinstance(parked.result(), Task)):
            got: Task | pb.Cancel | pb.Idle = parked.result()
            return got
        return pb.Idle(retry_ms=0, durable_round=self.durable_round)

    def _take_back(self, session: Session, parked: asyncio.Future[Any]) -> None:
        """A poll broke off before it could bring what it was woken with: the next one brings it."""
        got = parked.result() if parked.done() and self._roster.of(session.client) is session else None
        if isinstance(got, Task):
            self.undelivered(got, got.attempt)
        elif isinstance(got, pb.Cancel):
            session.notices.insert(0, got)
            self._pump()

    def _unpark(self, session: Session, parked: asyncio.Future[Any]) -> None:
        session.last_seen = time.monotonic()
        if session.parked is parked:
            session.parked = None

    def _wake(self, session: Session, what: Any) -> bool:
        if session.parked is None or session.parked.done():
            return False
        session.parked.set_result(what)
        session.parked = None
        session.last_seen = time.monotonic()
        return True

    def _pump(self) -> None:
        for session in self._roster:
            while session.notices and self._wake(session, session.notices[0]):
                session.notices.pop(0)
        for task in list(self._open.values()):
            if self._parallel and len(self._busy) >= self._parallel:
                return
            session_of = self._roster.of(task.client)
            if not task.leased and task.client not in self._busy and session_of and self._wake(session_of, task):
                task.leased = True
                self._busy[task.client] = task

    def delivered(self, task: Task, attempt: int) -> None:
        """The last frame of a task was sent: its deadline starts."""
        if task.leased and task.attempt == attempt:
            task.delivered_at = time.monotonic()

    def undelivered(self, task: Task, attempt: int) -> None:
        """A delivery or a session broke: the task waits for its client again, unless it went on without that one."""
        if task.done or not task.leased or task.attempt != attempt:
            return
        if self._busy.get(task.client) is task:
            del self._busy[task.client]
        task.leased, task.delivered_at = False, None
        task.attempt += 1
        self._pump()

    def find(self, task_id: str) -> Task | None:
        """An open task."""
        return self._open.get(task_id)

    def was_answered(self, task_id: str) -> bool:
        """Whether a task's reply was accepted lately."""
        return task_id in self._ended

    def answered(self, task: Task, reply: Path) -> None:
        """Ends a task with its spooled reply."""
        self._ended[task.task_id] = None
        while len(self._ended) > 10_000:
            del self._ended[next(iter(self._ended))]
        self._end(task, reply)

    def failed(self, task: Task, reason: str) -> None:
        """Ends a task whose client said why it has no answer."""
        self._end(task, Missing(reason))

    def _end(self, task: Task, outcome: Path | Missing, *, cancel: bool = False) -> None:
        self._open.pop(task.task_id, None)
        if self._busy.get(task.client) is task:
            del self._busy[task.client]
            session = self._roster.of(task.client)
            if cancel and session and isinstance(outcome, Missing):
                session.notices.append(pb.Cancel(task_id=task.task_id, reason=outcome.reason))
        if not task.done:
            task.outcome.set_result(outcome)
        self._pump()

    # Time

    def session_replaced(self, old: Session) -> None:
        """A client joined again: what its old session held waits for the new one."""
        if old.parked and not old.parked.done():
            old.parked.set_result(pb.Idle(retry_ms=0, durable_round=self.durable_round))
        task = self._busy.get(old.client)
        if task:
            self.undelivered(task, task.attempt)

    def reap(self) -> None:
        """Gives up lost sessions, late tasks and absent clients; called a few times a second."""
        for session in self._roster.lost():
            self._log.warning("client_lost", client=session.client)
            self._roster.close(session)
            self.session_replaced(session)
            self._on_lost(session)
        now = time.monotonic()
        for task in list(self._open.values()):
            late = task.delivered_at is not None and now - task.delivered_at > self._limits.deadline_s
            if late and not task.receiving:
                self._end(task, Missing(f"no answer within {self._limits.deadline_s:g} s"), cancel=True)
            elif not task.leased and not self._roster.of(task.client):
                since = max(task.posted_at, self._roster.gone_since(task.client))
                if now - since > self._limits.absent_s:
                    self._end(task, Missing(f"not connected for {self._limits.absent_s:g} s"))
