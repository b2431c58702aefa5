"""Tasks for clients: leased in cohort order, delivered by polls, ended by a reply, a deadline or an absence.

Everything happens on one event loop, so there are no locks; one reaper enforces all time limits.
"""

from __future__ import annotations

import asyncio
import heapq
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
from fedrpc.wire.frames import fits_envelope, serialise_chunks
from fedrpc.wire.kinds import Kind

Frame = tuple[Kind, int, bytes]  # kind, tensor bytes, serialised


class Question:
    """A message to send, encoded once for all clients that get it.

    Args:
        message: The typed message; it must not change while the question is open.
        shared: Whether several clients get it; then the frames are kept, else they are serialised as they are sent.
    """

    def __init__(self, message: Any, *, shared: bool) -> None:
        self._message, self._shared = message, shared

    @cached_property
    def payload(self) -> Payload:
        """Headers and buffers."""
        return encode(self._message)

    @cached_property
    def _kept(self) -> list[Frame]:
        return list(self._serialise())

    def _serialise(self) -> Iterator[Frame]:
        parts = self.payload.parts
        return ((Kind(parts[index].kind), size, data) for index, size, data in serialise_chunks(self.payload))

    def iter_frames(self) -> Iterable[Frame]:
        """The chunks, serialised; none when they travel in the envelope."""
        if fits_envelope(self.payload):
            return ()
        return self._kept if self._shared else self._serialise()

    @property
    def prepared(self) -> bool:
        """Whether it is encoded."""
        return ("_kept" if self._shared else "payload") in vars(self)

    def prepare(self) -> None:
        """Encodes the message; heavy, so call it off the event loop."""
        _ = self._kept if self._shared else self.payload

    def forget(self) -> None:
        """Frees a message that only one client gets, once it is answered."""
        if not self._shared:
            self._message = None
            vars(self).pop("payload", None)


@dataclass(frozen=True)
class Missing:
    """Why a client did not answer.

    Args:
        hung: It missed its deadline; another question in the same round would only miss it again.
        abstained: It chose not to answer, which is no failure.
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
    number: int = -1  # in the order of posting
    queued: bool = False  # whether it is in the mailbox's queue of ready tasks

    @property
    def done(self) -> bool:
        """Whether it has an outcome."""
        return self.outcome.done()


@dataclass(frozen=True)
class Delivery:
    """One lease of a task: a later lease of the same task has another attempt number."""

    task: Task
    attempt: int

    @property
    def current(self) -> bool:
        """Whether the task is open and was not leased again since."""
        return self.task.leased and not self.task.done and self.task.attempt == self.attempt


class Mailbox:
    """Hands tasks to parked polls.

    An event costs the same however many clients and tasks there are: it concerns one client, whose first waiting task
    enters the queue of ready tasks when the client is parked and free. An entry that is no longer ready when its turn
    comes is dropped; the event that makes the client ready again queues its task again.

    Args:
        roster: The connected clients.
        limits: Time limits.
        parallel: How many tasks may be leased at a time; 0 is no limit.
    """

    def __init__(self, roster: Roster, limits: LimitsConfig, parallel: int) -> None:
        self._roster, self._limits, self._parallel = roster, limits, parallel
        self._open: dict[str, Task] = {}
        self._of_client: dict[int, dict[str, Task]] = {}  # open tasks by client, in posting order
        self._busy: dict[int, Task] = {}  # leases, by client
        self._ready: list[tuple[int, Task]] = []  # a heap in posting order, which is cohort order
        self._num_posted = 0
        self._ended: dict[str, None] = {}  # recently accepted: a second submission is a duplicate, not late
        self._finished: Idle | None = None
        self._ending = False
        self.durable = 0  # durable points so far
        self._log = log.get("mailbox")

    # The consumer's side

    def post(self, tasks: Iterable[Task]) -> None:
        """Enqueues tasks in the order in which they may be leased."""
        for task in tasks:
            task.number = self._num_posted
            self._num_posted += 1
            self._open[task.task_id] = task
            self._of_client.setdefault(task.client, {})[task.task_id] = task
            self._queue_next(task.client)
        self._lease_ready()

    def withdraw(self, tasks: Iterable[Task], reason: str) -> None:
        """Ends tasks that nobody waits for, and cancels them at their clients; does nothing once the server stops."""
        for task in tasks:
            if not task.done and not self._ending:
                self._end(task, Missing(reason), cancel=True)

    def end(self) -> None:
        """Notes that the server stops before the run ends: clients go on, since a restart asks the same questions."""
        self._ending = True

    def finish(self, reason: str) -> None:
        """Answers every poll from now on with the end of the run."""
        self._finished = Idle(finished=True, reason=reason, durable=self.durable)
        for session in self._roster:
            self._wake(session, self._finished)

    @property
    def num_out(self) -> int:
        """Tasks that are leased: on their way to clients, or being answered."""
        return len(self._busy)

    @property
    def num_waiting(self) -> int:
        """Tasks that are not leased."""
        return len(self._open) - len(self._busy)

    # The clients' side

    async def next(self, session: Session) -> Delivery | Cancel | Idle:
        """Parks a client's poll until there is something for it."""
        if self._finished:
            return self._finished
        self._wake(session, Idle(durable=self.durable))  # a newer poll replaces an older one
        parked: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        session.parked = parked
        self._send_notice(session)
        self._queue_next(session.client)
        self._lease_ready()
        try:
            await asyncio.wait({parked}, timeout=self._limits.poll_s)
        except asyncio.CancelledError:
            self._unpark(session, parked)
            self._take_back(session, parked)
            raise
        self._unpark(session, parked)
        replaced = self._roster.get(session.client) is not session  # then the task already waits for the new session
        if parked.done() and not (replaced and isinstance(parked.result(), Delivery)):
            got: Delivery | Cancel | Idle = parked.result()
            return got
        return Idle(durable=self.durable)

    def _take_back(self, session: Session, parked: asyncio.Future[Any]) -> None:
        """Keeps what a broken poll was to deliver, for the next poll."""
        got = parked.result() if parked.done() and self._roster.get(session.client) is session else None
        if isinstance(got, Delivery):
            self.return_to_queue(got)
        elif isinstance(got, Cancel):
            session.notices.insert(0, got)
            self._send_notice(session)

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

    def _send_notice(self, session: Session) -> None:
        if session.notices and self._wake(session, session.notices[0]):
            session.notices.pop(0)

    def _is_ready(self, task: Task) -> bool:
        """Whether a task's client could get it now."""
        session = self._roster.get(task.client)
        parked = session is not None and session.parked is not None and not session.parked.done()
        return parked and task.client not in self._busy and self._open.get(task.task_id) is task

    def _queue_next(self, client: int) -> None:
        """Queues a client's first open task if it is ready; called whenever that may have become so."""
        task = next(iter(self._of_client.get(client, {}).values()), None)
        if task and not task.queued and self._is_ready(task):
            task.queued = True
            heapq.heappush(self._ready, (task.number, task))

    def _lease_ready(self) -> None:
        """Leases ready tasks in posting order, as far as `parallel` permits."""
        while self._ready and not (self._parallel and len(self._busy) >= self._parallel):
            _, task = heapq.heappop(self._ready)
            task.queued = False
            session = self._roster.get(task.client)
            if session and self._is_ready(task) and self._wake(session, Delivery(task, task.attempt)):
                task.leased = True
                self._busy[task.client] = task

    def _remove(self, task: Task) -> None:
        """Removes a task that has ended, or is about to."""
        self._open.pop(task.task_id, None)
        of_client = self._of_client.get(task.client, {})
        of_client.pop(task.task_id, None)
        if not of_client:
            self._of_client.pop(task.client, None)

    def mark_delivered(self, delivery: Delivery) -> None:
        """Starts a task's deadline, once its last frame was sent."""
        if delivery.current:
            delivery.task.delivered_at = time.monotonic()

    def return_to_queue(self, delivery: Delivery) -> None:
        """Makes a task wait for its client again after a delivery or a session broke, unless it was leased since."""
        task = delivery.task
        if not delivery.current:
            return
        if self._busy.get(task.client) is task:
            del self._busy[task.client]
        task.leased, task.delivered_at = False, None
        task.attempt += 1
        self._queue_next(task.client)
        self._lease_ready()

    def fail_question(self, task: Task, error: Exception) -> None:
        """Ends a task whose question cannot be encoded: the method's mistake, which its `ask` raises."""
        self._remove(task)
        self._busy.pop(task.client, None)
        if not task.done:
            task.outcome.set_exception(error)
        self._queue_next(task.client)
        self._lease_ready()

    def find(self, task_id: str) -> Task | None:
        """Finds an open task."""
        return self._open.get(task_id)

    def was_answered(self, task_id: str) -> bool:
        """Whether a reply to this task was recently accepted."""
        return task_id in self._ended

    def accept_reply(self, task: Task, reply: Spooled) -> None:
        """Ends a task with its spooled reply."""
        self._ended[task.task_id] = None
        while len(self._ended) > 10_000:
            del self._ended[next(iter(self._ended))]
        self._end(task, reply)

    def accept_failure(self, task: Task, reason: str, *, abstained: bool = False) -> None:
        """Ends a task whose client gave a reason instead of an answer."""
        self._end(task, Missing(reason, abstained=abstained))

    def _end(self, task: Task, outcome: Spooled | Missing, *, cancel: bool = False) -> None:
        self._remove(task)
        if self._busy.get(task.client) is task:
            del self._busy[task.client]
            session = self._roster.get(task.client)
            if cancel and session and isinstance(outcome, Missing):
                session.notices.append(Cancel(task_id=task.task_id, reason=outcome.reason))
                self._send_notice(session)
        if not task.done:
            task.outcome.set_result(outcome)
        self._queue_next(task.client)
        self._lease_ready()

    # Time

    def replace_session(self, old: Session) -> None:
        """Moves what a closed session held to the client's next session."""
        if old.parked and not old.parked.done():
            old.parked.set_result(Idle(durable=self.durable))
        task = self._busy.get(old.client)
        if task:
            self.return_to_queue(Delivery(task, task.attempt))

    def reap(self) -> None:
        """Ends lost sessions, late tasks and the tasks of absent clients; called a few times a second."""
        for session in self._roster.find_lost():
            self._log.warning("client_lost", client=session.client)
            self._roster.close(session)
            self.replace_session(session)
        now = time.monotonic()
        for task in list(self._busy.values()):
            waited = now - task.delivered_at if task.delivered_at is not None else 0.0
            # An upload gets as long again, but a drip of bytes must not hold up a round forever.
            if waited > self._limits.deadline_s * (2 if task.receiving else 1):
                reason = f"no answer within {self._limits.deadline_s:g} s"
                self._end(task, Missing(reason, hung=True), cancel=True)
        absent_s = self._limits.absent_s
        for client in [c for c in self._of_client if self._roster.measure_absence(c) > absent_s]:
            for task in list(self._of_client[client].values()):
                if not task.leased:
                    self._end(task, Missing(f"not connected for {absent_s:g} s"))
