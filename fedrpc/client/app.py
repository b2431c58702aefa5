"""The client's loop: join, keep one poll parked, answer tasks, and submit each result until the server has it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

import fedrpc
from fedrpc import log
from fedrpc.client.answer import Answerer
from fedrpc.client.identity import Identity
from fedrpc.client.store import ClientStore, Kept
from fedrpc.client.transport import Admission, Failure, Receipt, SessionLost, Task, Transport
from fedrpc.config import parse_join_config
from fedrpc.device import choose
from fedrpc.errors import Abstained, Cancelled, FedrpcError, Refused, Unavailable, WireError
from fedrpc.problem import Problem
from fedrpc.process import give_back_memory
from fedrpc.tls.credentials import ClientTls
from fedrpc.wire.envelope import Cancel, Envelope, Idle
from fedrpc.wire.frames import check_name
from fedrpc.wire.ledger import SESSION, Rows, merge

_MAX_BAD_MESSAGES = 5  # in a row: more than that is no transmission error


@dataclass(frozen=True)
class ClientOptions:
    """A client's own options; the rest of its configuration comes with Join."""

    server: str
    client_id: int
    state_dir: Path
    data_dir: Path | None = None
    device: str | None = None
    tls: ClientTls | None = None
    insecure: bool = False
    wait_s: float = 300.0
    num_sharing: int | None = None  # clients that share this machine's GPUs; all clients of the run when None


class ClientApp:
    """One client process."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._log = log.get("client")
        self._identity = Identity(options.state_dir, options.client_id)
        self._transport = Transport(
            options.server, options.client_id, self._book, tls=options.tls, insecure=options.insecure
        )
        self._session, self._joining = "", asyncio.Lock()
        self._durable = 0
        self._store: ClientStore | None = None
        self._answerer: Answerer | None = None
        self._run_id = ""
        self._session_rows: Rows = {}
        self._privacy_held = 0
        self._queue: asyncio.Queue[Task] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "answer")
        self._current: Task | None = None
        self._stop = threading.Event()  # ends the answer under way before its next batch
        self._withdrawn: set[str] = set()
        self._max_bytes = 8 << 30

    async def run(self) -> str:
        """Takes part until the run is over; returns the reason that the server gives for its end."""
        try:
            await self._rejoin("")
            async with asyncio.TaskGroup() as group:
                working = group.create_task(self._work())
                reason = await self._poll()
                working.cancel()
            answering = self._answerer.cpu_s if self._answerer else 0.0
            self._log.info("cpu", total_s=time.process_time(), answering_s=answering)
            return reason
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._stop.set()
            self._thread.shutdown(wait=True, cancel_futures=True)
            await self._transport.close()
            if self._store:
                self._store.close()
            self._identity.release()

    def _book(self, rows: Rows) -> None:
        tasks = {key: sums for key, sums in rows.items() if key.phase != SESSION}
        merge(self._session_rows, {key: sums for key, sums in rows.items() if key.phase == SESSION})
        if tasks and self._store:
            self._store.book(tasks)

    # Joining

    async def _rejoin(self, lost: str) -> None:
        """Opens a new session unless another coroutine has done so; gives up after `wait_s` without a server."""
        async with self._joining:
            if self._session != lost:
                return
            give_up = time.monotonic() + self._options.wait_s
            for attempt in range(10**9):
                try:
                    await self._join()
                    return
                except Unavailable as error:
                    delay = _draw_pause(attempt)
                    if time.monotonic() + delay > give_up:
                        raise Unavailable(f"{error}; gave up after {self._options.wait_s:g} s (--wait-s)") from None
                    if attempt == 3:
                        self._log.info("waiting_for_server", address=self._options.server)
                    await asyncio.sleep(delay)

    async def _join(self) -> None:
        answer = await self._transport.join(self._identity.instance)
        if answer.package_version != fedrpc.__version__:
            self._log.warning("version_skew", server=answer.package_version, client=fedrpc.__version__)
        if not self._answerer:
            # Off the event loop: loading a large data set takes a while, and the channel must stay alive.
            await asyncio.get_running_loop().run_in_executor(self._thread, self._set_up, answer)
        elif answer.run_id != self._run_id:
            raise Refused(
                f"the server now serves run {answer.run_id}, this client belongs to {self._run_id}: restart it"
            )
        assert self._store is not None
        if self._store.adopt_chain(answer.privacy_rows, answer.privacy_head, answer.privacy_spent):
            self._log.warning("privacy_chain_adopted", rows=answer.privacy_rows, why="the local store was lost")
        self._privacy_held = answer.privacy_rows
        self._session = answer.session
        self._note_durable(answer.durable)
        self._log.info("joined", run=answer.run_id)

    def _set_up(self, answer: Admission) -> None:
        config = parse_join_config(answer.config)
        if not 0 <= self._options.client_id < config.clients:
            raise Refused(f"client id {self._options.client_id} is out of range: the run has 0 to {config.clients - 1}")
        torch.set_num_threads(config.train.threads)
        problem = Problem(config, self._options.data_dir)
        for what, ours, theirs in (
            ("data set", problem.dataset.digest, answer.dataset_digest),
            ("partition", problem.partition.sha256, answer.partition_sha256),
            ("method's messages", problem.schema_digest().hex(), answer.method_digest.hex()),
        ):
            if ours != theirs:
                raise Refused(
                    f"the {what} differs from the server's: expected {theirs[:16]}, got {ours[:16]}; "
                    "install the same fedrpc and prepare the same data on both sides"
                )
        folder = self._identity.folder / check_name(answer.run_id)
        folder.mkdir(exist_ok=True)
        sharing = self._options.num_sharing or config.clients
        device = choose(self._options.device or config.device, self._options.client_id, sharing)
        self._max_bytes = config.limits.max_message_bytes
        self._run_id = answer.run_id
        self._store = ClientStore(folder)
        self._answerer = Answerer(problem, self._options.client_id, self._store, device, self._transport.meter)
        del problem.partition  # all clients' indices; this client has loaded its own examples
        give_back_memory()

    def _note_durable(self, durable: int) -> None:
        if durable > self._durable and self._store:
            self._store.fold(durable)
            self._durable = durable

    def _is_over(self, task: Task) -> bool:
        """Whether the server is past this task: nobody waits for the answer, and the store has dropped it."""
        return task.envelope.epoch < self._durable

    # Polling

    async def _poll(self) -> str:
        bad = 0
        while True:
            session = self._session
            try:
                item = await self._transport.poll(session, self._max_bytes)
                bad = 0
            except (SessionLost, Unavailable):
                await asyncio.sleep(_draw_pause(0))
                await self._rejoin(session)
                continue
            except WireError as error:
                bad += 1
                self._log.warning("bad_task", error=str(error), in_a_row=bad)
                if bad >= _MAX_BAD_MESSAGES:
                    raise
                await self._rejoin(session)  # a new session makes the server deliver the task again
                continue
            if isinstance(item, Idle):
                self._note_durable(item.durable)
                if item.finished:
                    return item.reason
                await asyncio.sleep(item.retry_ms / 1000)
            elif isinstance(item, Cancel):
                self._cancel(item.task_id)
            else:
                self._enqueue(item)

    def _enqueue(self, task: Task) -> None:
        self._note_durable(task.envelope.durable)
        current = self._current
        if current and current.envelope.task_id == task.envelope.task_id:
            if current.envelope.digest == task.envelope.digest and task.envelope.task_id not in self._withdrawn:
                return  # delivered again while it is being answered
            self._cancel(task.envelope.task_id)
        self._withdrawn.discard(task.envelope.task_id)
        self._queue.put_nowait(task)

    def _cancel(self, task_id: str) -> None:
        self._withdrawn.add(task_id)
        if self._current and self._current.envelope.task_id == task_id:
            self._stop.set()

    # Working

    async def _work(self) -> None:
        while True:
            task = self._current = await self._queue.get()
            if task.envelope.task_id in self._withdrawn or self._is_over(task):
                continue
            try:
                await self._answer(task)
            except Cancelled:
                self._log.info("cancelled", phase=task.envelope.phase, round=task.envelope.round)
            finally:
                self._current = None

    async def _answer(self, task: Task) -> None:
        assert self._answerer is not None
        answer, self._stop = self._answerer.answer, threading.Event()
        result: Kept | Failure
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, answer, task, self._stop)
        except Cancelled:
            raise
        except Abstained as error:
            self._log.warning("abstained", phase=task.envelope.phase, why=str(error))
            result = Failure(str(error)[:500], abstained=True)
        except Exception as error:
            expected = isinstance(error, FedrpcError)
            self._log.error("answer_failed", phase=task.envelope.phase, error=str(error), exc_info=not expected)
            result = Failure(f"{type(error).__name__}: {error}"[:500])
        await self._submit(task, result)

    async def _submit(self, task: Task, result: Kept | Failure) -> None:
        """Sends a result until the server has it or no longer waits for it."""
        bad = away = 0
        while not self._is_over(task):
            session = self._session
            try:
                response = await self._send(task.envelope, session, result)
            except (SessionLost, Unavailable):
                away += 1
                await asyncio.sleep(_draw_pause(away))
                await self._rejoin(session)
            except WireError as error:
                bad += 1
                self._log.warning("bad_result", error=str(error), in_a_row=bad)
                if bad >= _MAX_BAD_MESSAGES:
                    raise WireError(f"the server refused one result {bad} times as malformed: {error}") from None
            else:
                self._privacy_held = max(self._privacy_held, response.privacy_rows)
                self._note_durable(response.durable)
                return

    async def _send(self, question: Envelope, session: str, result: Kept | Failure) -> Receipt:
        assert self._store is not None
        if isinstance(result, Failure):
            return await self._transport.submit_failure(question, session, result)
        first, attempt = self._privacy_held, self._store.next_attempt(question.task_id)
        return await self._transport.submit(result, session, attempt, first, self._store.read_privacy_rows(first))


def _draw_pause(attempt: int) -> float:
    """Draws the seconds to wait before a retry: from 0.1 doubling to 3, with jitter so that clients spread out."""
    return float(min(3.0, 0.1 * 2.0 ** min(attempt, 10)) * random.uniform(0.5, 1.5))


async def run(options: ClientOptions) -> str:
    """Runs one client until the run is over; returns the reason that the server gives for its end."""
    return await ClientApp(options).run()
