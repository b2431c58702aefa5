"""The client's loop: join, keep one poll parked, answer what comes, submit until the server has it."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

import fedrpc
from fedrpc import log
from fedrpc.client.answer import Answerer
from fedrpc.client.identity import Identity
from fedrpc.client.store import ClientStore
from fedrpc.client.transport import SessionLost, Task, Tls, Transport
from fedrpc.config import RunConfig
from fedrpc.device import choose
from fedrpc.errors import Cancelled, FedrpcError, Refused, Unavailable, WireError
from fedrpc.problem import Problem
from fedrpc.wire.ledger import SESSION, Rows, merge
from fedrpc.wire.v1 import coordinator_pb2 as pb

_MAX_BAD_MESSAGES = 5  # in a row: then the fault is not a flipped bit
SCHEMA_DIGEST = hashlib.sha256(pb.DESCRIPTOR.serialized_pb).digest()


@dataclass(frozen=True)
class ClientOptions:
    """What a client knows by itself; the rest it learns from Join."""

    server: str
    client_id: int
    state_dir: Path
    data_dir: Path | None = None
    device: str | None = None
    tls: Tls | None = None
    insecure: bool = False
    wait_s: float = 300.0


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
        self._durable = -2
        self._store: ClientStore | None = None
        self._answerer: Answerer | None = None
        self._run_id = ""
        self._session_rows: Rows = {}
        self._privacy_held = 0
        self._queue: asyncio.Queue[Task] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "answer")
        self._current: Task | None = None
        self._withdrawn: set[str] = set()
        self._max_bytes = 8 << 30

    async def run(self) -> str:
        """Takes part until the run is over; returns the server's last word."""
        try:
            await self._rejoin("")
            async with asyncio.TaskGroup() as group:
                working = group.create_task(self._work())
                reason = await self._poll()
                working.cancel()
            return reason
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            if self._answerer:
                self._answerer.cancel()
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
        """Opens a new session unless another task did so already; gives up after `wait_s` without a server."""
        async with self._joining:
            if self._session != lost:
                return
            give_up = time.monotonic() + self._options.wait_s
            for attempt in range(10**9):
                try:
                    await self._join()
                    return
                except Unavailable as error:
                    delay = min(3.0, 0.1 * 2**attempt) * random.uniform(0.5, 1.5)
                    if time.monotonic() + delay > give_up:
                        raise Unavailable(f"{error}; gave up after {self._options.wait_s:g} s (--wait-s)") from None
                    if attempt == 3:
                        self._log.info("waiting_for_server", address=self._options.server)
                    await asyncio.sleep(delay)

    async def _join(self) -> None:
        request = pb.JoinRequest(
            client_id=self._options.client_id,
            instance=self._identity.instance,
            package_version=fedrpc.__version__,
            schema_digest=SCHEMA_DIGEST,
        )
        answer = await self._transport.join(request)
        if answer.package_version != fedrpc.__version__:
            self._log.warning("version_skew", server=answer.package_version, client=fedrpc.__version__)
        if not self._answerer:
            # Off the event loop: a large partition takes a while, and the channel must stay alive.
            await asyncio.get_running_loop().run_in_executor(self._thread, self._set_up, answer)
        elif answer.run_id != self._run_id:
            raise Refused(
                f"the server now serves run {answer.run_id}, this client belongs to {self._run_id}: restart it"
            )
        assert self._store is not None
        if self._store.adopt_chain(answer.privacy_rows, answer.privacy_head):
            self._log.warning("privacy_chain_adopted", rows=answer.privacy_rows, why="the local store was lost")
        self._privacy_held = answer.privacy_rows
        self._session = answer.session
        self._see_durable(answer.durable_round)
        self._log.info("joined", run=answer.run_id)

    def _set_up(self, answer: pb.JoinResponse) -> None:
        config = RunConfig.model_validate_json(answer.config)
        if not 0 <= self._options.client_id < config.clients:
            raise Refused(f"client id {self._options.client_id} is out of range: the run has 0 to {config.clients - 1}")
        torch.set_num_threads(config.train.threads)
        problem = Problem(config, self._options.data_dir)
        for what, ours, theirs in (
            ("data set", problem.dataset.digest, answer.dataset_digest),
            ("partition", problem.partition.sha256, answer.partition_sha256),
            ("method's messages", problem.method.schema_digest().hex(), answer.method_digest.hex()),
        ):
            if ours != theirs:
                raise Refused(
                    f"the {what} differs from the server's: expected {theirs[:16]}, got {ours[:16]}; "
                    "install the same fedrpc and prepare the same data on both sides"
                )
        folder = self._identity.folder / answer.run_id
        folder.mkdir(exist_ok=True)
        device = choose(self._options.device or config.device, self._options.client_id, config.clients)
        self._max_bytes = config.limits.max_message_bytes
        self._run_id = answer.run_id
        self._store = ClientStore(folder)
        self._answerer = Answerer(problem, self._options.client_id, self._store, device, self._transport.meter)

    def _see_durable(self, durable_round: int) -> None:
        if durable_round > self._durable and self._store:
            self._store.fold(durable_round)
            self._durable = durable_round

    # Polling

    async def _poll(self) -> str:
        bad = 0
        while True:
            session = self._session
            try:
                got = await self._transport.poll(session, self._max_bytes)
                bad = 0
            except (SessionLost, Unavailable):
                await self._rejoin(session)
                continue
            except WireError as error:
                bad += 1
                self._log.warning("bad_task", error=str(error), in_a_row=bad)
                if bad >= _MAX_BAD_MESSAGES:
                    raise
                await self._rejoin(session)  # a new session makes the server deliver the task again
                continue
            if isinstance(got, pb.Idle):
                self._see_durable(got.durable_round)
                if got.finished:
                    return got.reason
                await asyncio.sleep(got.retry_ms / 1000)
            elif isinstance(got, pb.Cancel):
                self._cancel(got.task_id)
            else:
                self._take(got)

    def _take(self, task: Task) -> None:
        self._see_durable(task.envelope.durable_round)
        current = self._current
        if current and current.envelope.task_id == task.envelope.task_id:
            if current.envelope.digest == task.envelope.digest and task.envelope.task_id not in self._withdrawn:
                return  # redelivered while we work on it
            self._cancel(task.envelope.task_id)
        self._withdrawn.discard(task.envelope.task_id)
        self._queue.put_nowait(task)

    def _cancel(self, task_id: str) -> None:
        self._withdrawn.add(task_id)
        if self._current and self._current.envelope.task_id == task_id and self._answerer:
            self._answerer.cancel()

    # Working

    async def _work(self) -> None:
        while True:
            task = self._current = await self._queue.get()
            if task.envelope.task_id in self._withdrawn:
                continue
            try:
                await self._answer(task)
            except Cancelled:
                self._log.info("cancelled", phase=task.envelope.phase, round=task.envelope.round)
            finally:
                self._current = None

    async def _answer(self, task: Task) -> None:
        assert self._answerer is not None
        try:
            path = await asyncio.get_running_loop().run_in_executor(self._thread, self._answerer.answer, task)
        except Cancelled:
            raise
        except Exception as error:
            expected = isinstance(error, FedrpcError)
            self._log.error("answer_failed", phase=task.envelope.phase, error=str(error), exc_info=not expected)
            await self._submit(task, None, f"{type(error).__name__}: {error}")
        else:
            await self._submit(task, path, "")

    async def _submit(self, task: Task, path: Path | None, failure: str) -> None:
        assert self._store is not None
        for bad in range(_MAX_BAD_MESSAGES):
            while True:
                session = self._session
                try:
                    response = await self._send(task.envelope, session, path, failure)
                    break
                except (SessionLost, Unavailable):
                    await self._rejoin(session)
                except WireError as error:
                    self._log.warning("bad_result", error=str(error), in_a_row=bad + 1)
                    response = None
                    break
            if response is not None:
                self._privacy_held = max(self._privacy_held, response.privacy_rows)
                self._see_durable(response.durable_round)
                return
        raise WireError(f"the server took {_MAX_BAD_MESSAGES} tries of one result for broken; see the lines above")

    async def _send(self, task: pb.Envelope, session: str, path: Path | None, failure: str) -> pb.SubmitResponse:
        assert self._store is not None
        if path is None:
            envelope = pb.Envelope(
                session=session,
                task_id=task.task_id,
                round=task.round,
                phase=task.phase,
                step=task.step,
                question=task.digest,
                failure=pb.Failure(code=pb.Failure.CODE_ERROR, reason=failure[:500]),
            )
            return await self._transport.submit_failure(envelope)
        held = self._privacy_held
        rows = pb.PrivacyRows(first=held, rows=self._store.privacy_rows(held))
        return await self._transport.submit(path, session, self._store.next_attempt(task.task_id), rows)


async def run(options: ClientOptions) -> str:
    """Runs one client until the run is over; returns the server's last word."""
    return await ClientApp(options).run()
