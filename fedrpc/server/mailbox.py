"""Tasks for clients: leased in cohort order, delivered by polls, ended by a reply, a deadline or an absence.

Everything happens on one event loop, so there are no locks; one reaper looks after all time limits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedrpc import log
from fedrpc.config import LimitsConfig
from fedrpc.server.roster import Roster, Session
from fedrpc.server.spool import Spooled
from fedrpc.wire.codec import Payload, encode
from fedrpc.wire.envelope import Cancel, Idle
from fedrpc.wire.frames import chunk_frames, fits_envelope
from fedrpc.wire.kinds import Kind

Frame = tuple[Kind, int, bytes]  # kind, tensor bytes, serialised


class Question:
    """A message to be sent, encoded once for everybody who is asked the same.

    Args:
        message: The typed message; it must not change while the question is open.
        shared: Whether several clients get it; then the frames are kept, else they are made as they go.
    """

    def __init__(self, message: Any, *, shared: bool) -> None:
        self._message, self._shared = message, shared

    @cached_property
    def payload(self) -> Payload:
        """Headers and buffers."""
        return encode(self._message)

    @cached_property
    def _kept(self) -> list[Frame]:
        return list(self._made())

    def _made(self) -> Iterator[Frame]:
        parts = self.payload.parts
        return ((Kind(parts[index].kind), size, data) for index, size, data in chunk_frames(self.payload))

    def frames(self) -> Iterable[Frame]:
        """The chunks, serialised; none when they travel in the envelope."""
        if fits_envelope(self.payload):
            return ()
        return self._kept if self._shared else self._made()

    @property
    def prepared(self) -> bool:
        """Whether sending it takes no more work."""
        return ("_kept" if self._shared else "payload") in vars(self)

    def prepare(self) -> None:
        """Does the encoding now; heavy, so off the event loop."""
        _ = self._kept if self._shared else self.payload

    def forget(self) -> None:
        """Frees an individual message once it is answered."""
        if not self._shared:
            self._message = None
            vars(self).pop("payload", None)


@dataclass(frozen=True)
class Missing:
    """Why a client did not answer.

    Args:
        hung: It had its time; another question in the same round would only wait as long again.
        abstained: It chose not to, which is no failure.
    """

    reason: str
    hung: bool = False
    abstained: bool = False


@dataclass(eq=False)
class Task:
    """One question to one client."""

    task_id: str
    client: int
    epoch: int
    round: int
    phase: str
    step: int
    question: Question
    outcome: asyncio.Future[Spooled | Missing]
    attempt: int = 0
    leased: bool = False
    delivered_at: float | None = None
    receiving: int = 0

    @property
    def done(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.outcome.done()


@dataclass(frozen=True)
class Delivery:
    """One lease of a task: a later lease of the same task has another attempt number."""

    task: Task
    attempt: int

    @property
    def current(self) -> bool:
        """Whether the task was not leased again meanwhile."""
        return self.task.leased and not self.task.done and self.task.attempt == self.attempt


class Mailbox:
    """Hands tasks to parked polls.

    Args:
        roster: Who is here.
        limits: Time limits.
        parallel: Tasks that may be out at a time; 0 is no limit.
    """

    def __init__(self, roster: Roster, limits: LimitsConfig, parallel: int) -> None:
        self._roster, self._limits, self._parallel = roster, limits, parallel
        self._open: dict[str, Task] = {}  # in posting order, which is cohort order
        self._busy: dict[int, Task] = {}  # leases, by client
        self._ended: dict[str, None] = {}  # accepted lately: a second submission is a duplicate, not late
        self._finished: Idle | None = None
        self._ending = False
        self.durable = 0  # durable points so far
        self._log = log.get("mailbox")

    # The consumer's side

    def post(self, tasks: Iterable[Task]) -> None:
        """Enqueues tasks in the order in which they may be leased."""
        for task in tasks:
            self._open[task.task_id] = task
        self._pump()

    def withdraw(self, tasks: Iterable[Task], reason: str) -> None:
        """Ends tasks that nobody waits for, and tells the clients that work on them; not when the server ends."""
        for task in tasks:
            if not task.done and not self._ending:
                self._end(task, Missing(reason), cancel=True)

    def end(self) -> None:
        """The server ends before the run: clients may work on, for its next life asks the same again."""
        self._ending = True

    def finish(self, reason: str) -> None:
        """Answers every poll from now on with the end of the run."""
        self._finished = Idle(finished=True, reason=reason, durable=self.durable)
        for session in self._roster:
            self._wake(session, self._finished)

    @property
    def num_out(self) -> int:
        """Tasks that clients work on, or that are on their way to them."""
        return len(self._busy)

    @property
    def num_waiting(self) -> int:
        """Tasks that no client has yet."""
        return len(self._open) - len(self._busy)

    # The clients' side

    async def next(self, session: Session) -> Delivery | Cancel | Idle:
        """Parks a client's poll until there is something for it."""
        if self._finished:
            return self._finished
        self._wake(session, Idle(durable=self.durable))  # a newer poll replaces an older one
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
        if parked.done() and not (replaced and isinstance(parked.result(), Delivery)):
            got: Delivery | Cancel | Idle = parked.result()
            return got
        return Idle(durable=self.durable)

    def _take_back(self, session: Session, parked: asyncio.Future[Any]) -> None:
        """A poll broke off before it could bring what it was woken with: the next one brings it."""
        got = parked.result() if parked.done() and self._roster.of(session.client) is session else None
        if isinstance(got, Delivery):
            self.undelivered(got)
        elif isinstance(got, Cancel):
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
            if task.leased or task.client in self._busy or not session_of:
                continue
            if self._wake(session_of, Delivery(task, task.attempt)):
                task.leased = True
                self._busy[task.client] = task

    def delivered(self, delivery: Delivery) -> None:
        """The last frame of a task was sent: its deadline starts."""
        if delivery.current:
            delivery.task.delivered_at = time.monotonic()

    def undelivered(self, delivery: Delivery) -> None:
        """A delivery or a session broke: the task waits for its client again, unless it was leased anew meanwhile."""
        task = delivery.task
        if not delivery.current:
            return
        if self._busy.get(task.client) is task:
            del self._busy[task.client]
        task.leased, task.delivered_at = False, None
        task.attempt += 1
        self._pump()

    def broken(self, task: Task, error: Exception) -> None:
        """Ends a task whose question can not even be encoded: the method's mistake, which its `ask` raises."""
        self._open.pop(task.task_id, None)
        self._busy.pop(task.client, None)
        if not task.done:
            task.outcome.set_exception(error)
        self._pump()

    def find(self, task_id: str) -> Task | None:
        """An open task."""
        return self._open.get(task_id)

    def was_answered(self, task_id: str) -> bool:
        """Whether a task's reply was accepted lately."""
        return task_id in self._ended

    def answered(self, task: Task, reply: Spooled) -> None:
        """Ends a task with its spooled reply."""
        self._ended[task.task_id] = None
        while len(self._ended) > 10_000:
            del self._ended[next(iter(self._ended))]
        self._end(task, reply)

    def failed(self, task: Task, reason: str, *, abstained: bool = False) -> None:
        """Ends a task whose client said why it has no answer."""
        self._end(task, Missing(reason, abstained=abstained))

    def _end(self, task: Task, outcome: Spooled | Missing, *, cancel: bool = False) -> None:
        self._open.pop(task.task_id, None)
        if self._busy.get(task.client) is task:
            del self._busy[task.client]
            session = self._roster.of(task.client)
            if cancel and session and isinstance(outcome, Missing):
                session.notices.append(Cancel(task_id=task.task_id, reason=outcome.reason))
        if not task.done:
            task.outcome.set_result(outcome)
        self._pump()

    # Time

    def session_replaced(self, old: Session) -> None:
        """A client joined again: what its old session held waits for the new one."""
        if old.parked and not old.parked.done():
            old.parked.set_result(Idle(durable=self.durable))
        task = self._busy.get(old.client)
        if task:
            self.undelivered(Delivery(task, task.attempt))

    def reap(self) -> None:
        """Gives up lost sessions, late tasks and absent clients; called a few times a second."""
        for session in self._roster.lost():
            self._log.warning("client_lost", client=session.client)
            self._roster.close(session)
            self.session_replaced(session)
        now = time.monotonic()
        for task in list(self._open.values()):
            waited = now - task.delivered_at if task.delivered_at is not None else 0.0
            # An upload under way may end, but a drip of bytes must not hold a round for ever.
            if waited > self._limits.deadline_s * (2 if task.receiving else 1):
                reason = f"no answer within {self._limits.deadline_s:g} s"
                self._end(task, Missing(reason, hung=True), cancel=True)
            elif not task.leased and self._roster.absent_for(task.client) > self._limits.absent_s:
                self._end(task, Missing(f"not connected for {self._limits.absent_s:g} s"))
