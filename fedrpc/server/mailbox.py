"""Tasks for clients: leased in cohort order, sent over their streams, ended by a reply, a deadline or an absence.

Everything happens on one event loop, so there are no locks; one reaper enforces all time limits.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fedrpc import clock as time  # without the time in which this process stood still
from fedrpc import log
from fedrpc.config import LimitsConfig
from fedrpc.errors import MethodFailed
from fedrpc.metrics.progress import Asked
from fedrpc.server.board import Board
from fedrpc.server.pace import MOMENT_S, PATIENCE_S
from fedrpc.server.question import Question
from fedrpc.server.roster import Link, Roster, Session
from fedrpc.server.spool import Spooled
from fedrpc.server.task_times import TaskTimes
from fedrpc.wire.envelope import Cancel, Finished

_MAX_MISSED = 2  # deadlines in a row, before a process of many clients counts as hung
_DEPTH = 2  # leases of a stream that serves several clients: one trains, the next one's task is there already


@dataclass(frozen=True)
class Missing:
    """Why a client did not answer.

    Args:
        hung: It missed its deadline; another question in the same round would only miss it again.
        abstained: It chose not to answer, which is no failure.
        planned: The run's settings want it so: the client dropped out, or (`hung`) was not among the first.
        failed: What failed, if it would fail again when the client is asked again.
    """

    reason: str
    hung: bool = False
    abstained: bool = False
    failed: type[MethodFailed] | None = None
    planned: bool = False


@dataclass(eq=False)
class Task:
    """One question to one client.

    Its time runs from its first delivery on, however often the client breaks off and comes again, and stands still only
    while the task waits for the server.

    Args:
        began_at: When its time began: with its first delivery, and anew once a delivery was complete.
        held_since: Since when it waits for the server: for its turn, or for a permit to be sent.
        behind_s: By how many seconds the answer that is coming in is behind the least rate.
        times: What is measured of it; no time limit looks at that.
    """

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
    link: Link | None = None  # the stream that it was leased to
    num_deliveries: int = 0
    began_at: float | None = None
    held_since: float | None = None
    delivered_at: float | None = None  # of its last delivery
    was_delivered: bool = False
    receiving: int = 0
    behind_s: float = 0.0
    number: int = -1  # in the order of posting
    queued: Link | None = None  # the stream in whose queue of ready tasks it is
    times: TaskTimes = field(default_factory=TaskTimes)

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


class _Queue:
    """One stream's ready tasks in posting order, and how many tasks it has on lease."""

    def __init__(self) -> None:
        self.ready: list[tuple[int, Task]] = []  # a heap
        self.num_leased = 0
        self.num_missed = 0  # deadlines, since the last reply


def _get_depth(link: Link) -> int:
    """How many leases a stream may have at a time."""
    return _DEPTH if link.num_sessions > 1 else 1


class Mailbox:
    """Hands tasks to the streams of their clients.

    An event costs the same however many clients and tasks there are: it concerns one client, whose first waiting task
    enters the queue of its stream when the client is there and free. An entry that is no longer ready when its turn
    comes is dropped; the event that makes the client ready again queues its task again.

    A process that serves one client has one task at a time. One that serves many answers them one after the other, and
    gets the next task while it still works on the one before.

    Args:
        roster: The clients that have joined.
        limits: Time limits.
        parallel: How many streams may have tasks at a time; 0 is no limit.
    """

    def __init__(self, roster: Roster, limits: LimitsConfig, parallel: int) -> None:
        self._roster, self._limits, self._parallel = roster, limits, parallel
        self._open: dict[str, Task] = {}
        self._of_client: dict[int, dict[str, Task]] = {}  # open tasks by client, in posting order
        self._busy: dict[int, Task] = {}  # leases, by client
        self._queues: dict[Link, _Queue] = {}
        self._num_busy_links = 0
        self._turns: list[tuple[int, int, Link]] = []  # a heap: whose first ready task was posted first
        self._num_posted = 0
        self._num_turns = 0
        self._ended: dict[str, None] = {}  # recently accepted: a second submission is a duplicate, not late
        self._finished: Finished | None = None
        self._ending = False
        self._board = Board()
        self.durable = 0  # durable points so far
        self._log = log.get("mailbox")

    # The consumer's side

    def post(self, tasks: Sequence[Task]) -> None:
        """Enqueues the tasks of a question that have no outcome yet, in the order in which they may be leased."""
        self._board.show(tasks)
        for task in tasks:
            if task.done:
                self._note_end(task, task.outcome.result())
                continue
            task.times.note_posted()
            task.number = self._num_posted
            self._num_posted += 1
            self._open[task.task_id] = task
            self._of_client.setdefault(task.client, {})[task.task_id] = task
            self._queue_next(task.client)
        self._lease_ready()

    def withdraw(self, tasks: Iterable[Task], reason: str, *, late: bool = False) -> None:
        """Ends tasks that nobody waits for, and cancels them at their clients; does nothing once the server stops.

        Args:
            late: Their clients were not among the first, and are not asked again in the round.
        """
        for task in tasks:
            if not task.done and not self._ending:
                self._end(task, Missing(reason, hung=late, planned=late), cancel=True)

    def end(self) -> None:
        """Notes that the server stops before the run ends: clients go on, since a restart asks the same questions."""
        self._ending = True

    def finish(self, reason: str) -> None:
        """Tells every client, from now on, that the run is over."""
        self._finished = Finished(reason, self.durable)
        for link in list(self._queues):
            link.send_finished(self._finished)

    @property
    def num_out(self) -> int:
        """Tasks that are leased: on their way to clients, or being answered."""
        return len(self._busy)

    @property
    def num_waiting(self) -> int:
        """Tasks that are not leased."""
        return len(self._open) - len(self._busy)

    def list_asked(self) -> list[Asked]:
        """What became of the last question, client by client."""

        def is_here(client: int) -> bool:
            session = self._roster.get(client)
            return session is not None and session.link is not None

        def is_out(task_id: str) -> bool:
            return task_id in self._open and self._open[task_id].leased

        return self._board.list_asked(is_out, is_here)

    # The clients' side

    def attach(self, sessions: Iterable[Session], link: Link) -> None:
        """Notes that a stream has opened, or serves more sessions; their tasks can be sent."""
        self._queues.setdefault(link, _Queue())
        if self._finished:
            link.send_finished(self._finished)
        for session in sessions:
            self._queue_next(session.client)
        self._lease_ready()

    def detach(self, link: Link) -> None:
        """Notes that a stream has ended; its leases stay until their clients join again or are lost."""
        queue = self._queues.pop(link, None)
        for _, task in queue.ready if queue else ():
            if task.queued is link:
                task.queued = None
                _resume(task)  # from now on it is the client that keeps it waiting
        if queue and queue.num_leased:
            self._num_busy_links -= 1
        for task in self._find_leases(link)[1:] if queue and queue.num_leased > 1 else ():
            task.began_at, task.was_delivered = None, False  # the process was still at the one before
        self._lease_ready()

    def _is_ready(self, task: Task, link: Link) -> bool:
        """Whether a task could be leased to this stream, if it has room."""
        session = self._roster.get(task.client)
        linked = session is not None and session.link is link
        return linked and task.client not in self._busy and self._open.get(task.task_id) is task

    def _queue_next(self, client: int) -> None:
        """Queues a client's first open task if it is ready; called whenever that may have become so."""
        task = next(iter(self._of_client.get(client, {}).values()), None)
        session = self._roster.get(client)
        link = session.link if session else None
        if task and link and link in self._queues and task.queued is not link and self._is_ready(task, link):
            task.queued = link  # an entry in the queue of a stream that it had before is dropped there
            if task.held_since is None:
                task.held_since = time.monotonic()
            heapq.heappush(self._queues[link].ready, (task.number, task))
            self._offer(link)

    def _offer(self, link: Link) -> None:
        """Gives a stream a turn if it has a ready task and room for it."""
        queue = self._queues.get(link)
        if queue and queue.ready and queue.num_leased < _get_depth(link):
            self._num_turns += 1
            heapq.heappush(self._turns, (queue.ready[0][0], self._num_turns, link))

    def _lease_ready(self) -> None:
        """Leases ready tasks in posting order, as far as `parallel` and the streams' room permit."""
        while self._turns:
            number, _, link = self._turns[0]
            queue = self._queues.get(link)
            if not queue or not queue.ready or queue.ready[0][0] != number:
                heapq.heappop(self._turns)  # a later turn has taken its task, or the stream is gone
                continue
            if not queue.num_leased and self._parallel and self._num_busy_links >= self._parallel:
                return
            heapq.heappop(self._turns)
            if queue.num_leased >= _get_depth(link):
                continue  # it gets a turn when a lease ends
            _, task = heapq.heappop(queue.ready)
            if task.queued is link:
                task.queued = None
            if self._is_ready(task, link):
                if task.num_deliveries < self._limits.deliveries:
                    self._lease(task, link, queue)
                else:
                    self._miss(task, f"no answer in {task.num_deliveries} deliveries", link)
            self._offer(link)

    def _lease(self, task: Task, link: Link, queue: _Queue) -> None:
        task.leased, task.link = True, link
        task.num_deliveries += 1
        self._busy[task.client] = task
        queue.num_leased += 1
        if queue.num_leased == 1:
            self._num_busy_links += 1
        link.send_task(Delivery(task, task.attempt))

    def _unlease(self, task: Task) -> None:
        """Ends a lease; the next task of the same stream has its whole time from now on."""
        if self._busy.get(task.client) is not task:
            return
        del self._busy[task.client]
        link, task.link = task.link, None
        queue = self._queues.get(link) if link else None
        if link is None or queue is None:
            return
        queue.num_leased -= 1
        if not queue.num_leased:
            self._num_busy_links -= 1
        else:
            for other in self._find_leases(link):
                if other.delivered_at is not None:
                    other.began_at = time.monotonic()
        self._offer(link)

    def _find_leases(self, link: Link) -> list[Task]:
        return [task for task in self._busy.values() if task.link is link]

    def _remove(self, task: Task) -> None:
        """Removes a task that has ended, or is about to."""
        self._open.pop(task.task_id, None)
        of_client = self._of_client.get(task.client, {})
        of_client.pop(task.task_id, None)
        if not of_client:
            self._of_client.pop(task.client, None)

    def start_delivery(self, delivery: Delivery) -> None:
        """Notes that a task's first frame is sent, for which it has waited."""
        if delivery.current:
            task = delivery.task
            _resume(task)
            if task.began_at is None:
                task.began_at = time.monotonic()

    def mark_delivered(self, delivery: Delivery) -> None:
        """Starts a task's deadline, once its last frame was sent; another delivery does not start it anew."""
        self.start_delivery(delivery)
        if delivery.current:
            task = delivery.task
            task.delivered_at = time.monotonic()
            if not task.was_delivered:
                task.was_delivered, task.began_at = True, task.delivered_at

    def return_to_queue(self, delivery: Delivery) -> None:
        """Makes a task wait for its client again after a delivery or a session broke, unless it was leased since."""
        task = delivery.task
        if not delivery.current:
            return
        _resume(task)
        self._unlease(task)
        task.leased, task.delivered_at = False, None
        task.attempt += 1
        self._queue_next(task.client)
        self._lease_ready()

    def fail_question(self, task: Task, error: Exception) -> None:
        """Ends a task whose question cannot be encoded: the method's mistake, which its `ask` raises."""
        self._remove(task)
        self._unlease(task)
        task.times.note_ended()
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
        if task.link in self._queues:
            self._queues[task.link].num_missed = 0
        self._ended[task.task_id] = None
        while len(self._ended) > 10_000:
            del self._ended[next(iter(self._ended))]
        self._end(task, reply)

    def accept_failure(
        self, task: Task, reason: str, *, abstained: bool = False, failed: type[MethodFailed] | None = None
    ) -> None:
        """Ends a task whose client gave a reason instead of an answer."""
        self._end(task, Missing(reason, abstained=abstained, failed=failed))

    def _end(self, task: Task, outcome: Spooled | Missing, *, cancel: bool = False) -> None:
        self._remove(task)
        task.times.note_ended()
        self._note_end(task, outcome)
        if self._busy.get(task.client) is task:
            self._unlease(task)
            session = self._roster.get(task.client)
            if cancel and session and session.link and isinstance(outcome, Missing):
                session.link.send_cancel(session, Cancel(task.task_id, outcome.reason))
        if not task.done:
            task.outcome.set_result(outcome)
        self._queue_next(task.client)
        self._lease_ready()

    def _note_end(self, task: Task, outcome: Spooled | Missing) -> None:
        self._board.note_end(task.task_id, outcome if isinstance(outcome, Missing) else None)

    # Time

    def replace_session(self, old: Session) -> None:
        """Moves what a closed session held to the client's next session."""
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
        first = {task.link: task for task in reversed(self._busy.values())}  # the others' time has not begun
        away = [task for task in self._open.values() if task.began_at is not None and not task.leased]
        for task in [*first.values(), *away]:
            if not task.done and task.began_at is not None and task.held_since is None:
                self._check_time(task, now - task.began_at)
        absent_s = self._limits.absent_s
        for client in [c for c in self._of_client if self._roster.measure_absence(c) > absent_s]:
            for task in list(self._of_client[client].values()):
                if not task.leased:
                    self._end(task, Missing(f"not connected for {absent_s:g} s"))

    def _check_time(self, task: Task, waited: float) -> None:
        """Ends a task whose time is up: as long for its delivery as for its answer, and as long again for an upload."""
        deadline_s = self._limits.deadline_s
        overdue_s = waited - deadline_s
        # Whoever moved when the deadline came may pause after it; who did not, or only drips, holds up no round.
        is_moving = task.receiving and task.behind_s <= min(PATIENCE_S, MOMENT_S + overdue_s)
        if overdue_s > (deadline_s if is_moving else 0):
            what = "no answer" if task.was_delivered else "not delivered"
            self._miss(task, f"{what} within {deadline_s:g} s", task.link)

    def _miss(self, task: Task, reason: str, link: Link | None) -> None:
        """Gives a task up; a process that misses two in a row gets no time for its others."""
        self._end(task, Missing(reason, hung=True), cancel=True)
        queue = self._queues.get(link) if link else None
        if queue is None:
            return
        queue.num_missed += 1
        if queue.num_missed < _MAX_MISSED:
            return
        for session in self._roster:
            for other in list(self._of_client.get(session.client, {}).values()) if session.link is link else ():
                self._end(other, Missing(f"its process gave {reason}", hung=True), cancel=True)


def _resume(task: Task) -> None:
    """Lets a task's time run again after it has waited for the server."""
    if task.held_since is not None and task.began_at is not None:
        # Negative when the server stood still before it, which was noticed only after.
        task.began_at += max(0.0, time.monotonic() - task.held_since)
    task.held_since = None
