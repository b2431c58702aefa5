"""One client of a process: its identity, its store, and the tasks that it has on hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedrpc import log
from fedrpc.client.answer import Answerer, report_ledger
from fedrpc.client.byte_ledger import read_byte_ledger
from fedrpc.client.identity import Identity
from fedrpc.client.limits import OwnLimits
from fedrpc.client.machine import Machine
from fedrpc.client.policy import keep_policy
from fedrpc.client.spending import SPENDING_FILE, SpendingFile
from fedrpc.client.store import BYTES_FILE, ClientStore, Kept
from fedrpc.client.transport import NO_TIMING, Admission, Failure, Receipt, SignedRows, Stream, Task
from fedrpc.config import PrivacyConfig
from fedrpc.errors import Refused
from fedrpc.privacy.signing import Signer
from fedrpc.problem import Problem
from fedrpc.wire.envelope import ClientTiming
from fedrpc.wire.ledger import SESSION, Rows


@dataclass(frozen=True)
class Work:
    """What the clients of a process share.

    Args:
        run_id: The run's id, which is safe as a file name.
        machine: What they compute on.
    """

    problem: Problem
    run_id: str
    device: torch.device
    machine: Machine = field(default_factory=Machine)


def is_about_ledger(task: Task) -> bool:
    """Whether a task asks for the client's ledger: then thousands of stores need not be opened for it."""
    return task.envelope.phase == SESSION


class Member:
    """Implements `transport.Listener`.

    Its store and its data are opened when they are first needed, and can be closed whenever it has no task: most
    clients of a large run are idle for most of it.

    Args:
        enqueue: Called with each task that is to be answered.
        signer: The key of the process's certificate, if it has one.
        token: The client's join token, if it has one.
        policy: Changes of the client's own policy.
    """

    def __init__(
        self,
        state_dir: Path,
        client: int,
        enqueue: Callable[[Member, Task], None],
        signer: Signer | None = None,
        *,
        token: bytes | None = None,
        policy: Mapping[str, Any] | None = None,
    ) -> None:
        self.client = client
        self.identity = Identity(state_dir, client, signer, token)
        self._policy = keep_policy(self.identity.folder, policy or {})
        self._spending: SpendingFile | None = None
        self.session = 0
        self.stop = threading.Event()  # ends the answer under way before its next batch
        self._enqueue = enqueue
        self._work: Work | None = None
        self._store: ClientStore | None = None
        self._answerer: Answerer | None = None
        self._durable = 0
        self._privacy_held, self._privacy_own = 0, 0  # rows that the server has, and that this client has charged
        self._open: dict[str, Task] = {}  # tasks that wait, are being answered or submitted
        self._answering: Task | None = None
        self._withdrawn: set[str] = set()
        self.cpu_s = 0.0  # CPU time of its answers, most of it training
        self._log = log.get("client")

    # Joining

    def check_run(self, privacy: PrivacyConfig) -> None:
        """Raises Refused when the client's own policy forbids a run with these settings."""
        try:
            self._policy.check_run(privacy)
        except Refused as error:
            raise Refused(f"client {self.client} takes no part: {error}") from None

    def load(self, work: Work) -> None:
        """Loads the client's data before the first task."""
        self._work = work
        self.open_store()
        self._open_answerer()

    def admit(self, work: Work, admission: Admission, durable: int) -> None:
        """Takes part in a run under a new session. Raises Refused when the server's copy of the chain is not ours."""
        self._work, self.session = work, admission.session
        self._privacy_held = admission.privacy_rows
        if admission.privacy_rows or self._store or (self._folder / "store.db").exists():
            try:
                adopted = self.open_store().adopt_chain(
                    admission.privacy_rows, admission.privacy_head, admission.privacy_spent
                )
            except Refused as error:
                raise Refused(f"client {self.client}: {error}") from None
            if adopted:
                self._log.warning("privacy_chain_adopted", rows=admission.privacy_rows, why="the local store was lost")
                self._open_spending().raise_to(self.open_store().get_histories())
            self._privacy_own = self.open_store().num_released()
        self.receive_durable(durable)

    @property
    def _folder(self) -> Path:
        assert self._work is not None, "joined before"
        return self.identity.folder / self._work.run_id

    @property
    def is_idle(self) -> bool:
        """Whether it has no task on hand."""
        return not self._open

    def open_store(self) -> ClientStore:
        """Opens the store, unless it is open; only the event loop does so."""
        if self._store is None:
            self._folder.mkdir(exist_ok=True)
            self._store = ClientStore(self._folder)
            self._store.fold(self._durable)
        return self._store

    def _open_answerer(self) -> Answerer:
        if self._answerer is None:
            assert self._work is not None and self._store is not None, "opened before"
            work = self._work
            noise = work.problem.config.privacy.noise
            limits = OwnLimits(self._policy, self._open_spending(), self._store.get_histories, noise)
            self._answerer = Answerer(work.problem, self.client, self._store, work.device, limits, work.machine)
        return self._answerer

    def _open_spending(self) -> SpendingFile:
        if self._spending is None:
            assert self._work is not None, "joined before"
            problem, path = self._work.problem, self.identity.folder / SPENDING_FILE
            self._spending = SpendingFile(path, problem.data_digest, problem.dataset.name, self._work.run_id)
            if self._policy.max_epsilon is not None and (kinds := self._spending.list_uncovered()):
                self._log.warning(
                    "released_uncovered_before", client=self.client, kinds=kinds, dataset=problem.dataset.name
                )
        return self._spending

    def close(self) -> None:
        """Closes the store and frees the data; they are opened again when a task comes."""
        if self._store:
            self._store.close()
        self._store = self._answerer = None

    # As the stream sees it

    def receive_task(self, task: Task) -> None:
        """Takes a task, unless it is on hand already."""
        envelope = task.envelope
        self.receive_durable(envelope.durable)
        known = self._open.get(envelope.task_id)
        if known and known.envelope.digest == envelope.digest and envelope.task_id not in self._withdrawn:
            return  # delivered again
        if known:
            self.receive_cancel(envelope.task_id)
        self._withdrawn.discard(envelope.task_id)
        self._open[envelope.task_id] = task
        self._enqueue(self, task)

    def receive_cancel(self, task_id: str) -> None:
        """Gives up a task, before its next batch if it is being answered."""
        if task_id in self._open:
            self._withdrawn.add(task_id)
        if self._answering and self._answering.envelope.task_id == task_id:
            self.stop.set()

    def receive_durable(self, durable: int) -> None:
        """Drops what only a replay from before the last durable point would need."""
        if durable > self._durable:
            self._durable = durable
            if self._store:
                self._store.fold(durable)

    def book(self, rows: Rows) -> None:
        """Adds rows to the client's ledger; those of no task are not compared, and left out."""
        tasks = {key: sums for key, sums in rows.items() if key.phase != SESSION}
        if tasks:
            self.open_store().book(tasks)

    # Answering

    def is_wanted(self, task: Task) -> bool:
        """Whether the server still waits for the answer to a task, as far as this client knows."""
        mine = self._open.get(task.envelope.task_id) is task
        return mine and task.envelope.task_id not in self._withdrawn and task.envelope.epoch >= self._durable

    def answer(self, task: Task) -> Kept:
        """Answers a task, in the training thread; the store is open unless the question is for the ledger."""
        if is_about_ledger(task):
            rows = self._store.read_ledger() if self._store else read_byte_ledger(self._folder / BYTES_FILE)
            return report_ledger(task, rows)
        answerer = self._open_answerer()
        before = answerer.cpu_s
        try:
            return answerer.answer(task, self.stop)
        finally:
            self.cpu_s += answerer.cpu_s - before
            assert self._store is not None, "opened before"
            self._privacy_own = self._store.num_released()

    def begin(self, task: Task) -> None:
        """Notes that a task is being answered."""
        self._answering, self.stop = task, threading.Event()

    def end_answer(self) -> None:
        """Notes that a task is answered, and is submitted now."""
        self._answering = None

    def drop(self, task: Task) -> None:
        """Notes that a task is done with."""
        if self._open.get(task.envelope.task_id) is task:
            del self._open[task.envelope.task_id]
        self._withdrawn.discard(task.envelope.task_id)

    async def submit(
        self, stream: Stream, task: Task, result: Kept | Failure, timing: ClientTiming = NO_TIMING
    ) -> None:
        """Sends a result once, and notes what the server says of it."""
        if isinstance(result, Failure):
            receipt = await stream.send_failure(self.session, task.envelope, result, timing)
        else:
            receipt = await self._send(stream, task, result, timing)
        self._privacy_held = max(self._privacy_held, receipt.privacy_rows)
        self.receive_durable(receipt.durable)

    async def _send(self, stream: Stream, task: Task, kept: Kept, timing: ClientTiming) -> Receipt:
        attempt = 0 if is_about_ledger(task) else self.open_store().next_attempt(task.envelope.task_id)
        return await stream.send_result(self.session, kept, attempt, self._read_rows(), timing)

    def _read_rows(self) -> SignedRows | None:
        """Reads the privacy rows that the server does not hold yet, and signs the chain up to their end.

        They are those of the answer, and of answers that were charged and then withdrawn before they were sent: so the
        last answer, to the question for the ledger, may have some, too.
        """
        assert self._work is not None, "joined before"
        if (first := self._privacy_held) >= self._privacy_own:
            return None
        store = self.open_store()
        rows = store.read_privacy_rows(first)
        count = first + len(rows)
        head = store.read_hash(count - 1)
        return SignedRows(first, rows, self.identity.signer.sign_head(self._work.run_id, self.client, count, head))
