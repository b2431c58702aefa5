"""A client process: joins for one client or many, keeps one stream open, and answers their tasks one after another."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fedrpc
from fedrpc import log
from fedrpc.client.machine import Machine
from fedrpc.client.member import Member, Work, is_about_ledger
from fedrpc.client.store import Kept
from fedrpc.client.timing import AnswerTimer
from fedrpc.client.transport import Failure, SessionLost, Stream, Task, Transport, Welcome
from fedrpc.config import RunConfig, parse_join_config
from fedrpc.device import (
    LOST_GPU,
    choose,
    describe,
    explain_full_gpu,
    explain_nondeterminism,
    give_back_gpu_memory,
    label,
    set_up,
)
from fedrpc.errors import (
    Abstained,
    Altered,
    Cancelled,
    Damaged,
    DiskFull,
    FedrpcError,
    MethodFailed,
    Outdated,
    Refused,
    Unavailable,
    WireError,
    describe_exception,
    find_place,
)
from fedrpc.owncode import check_same
from fedrpc.privacy.signing import Signer
from fedrpc.problem import Problem
from fedrpc.process import allow_open_files, give_back_memory, keep_files_private
from fedrpc.tls.credentials import ClientTls
from fedrpc.tls.diagnosis import find_obstacle
from fedrpc.tls.endpoint import read_pem
from fedrpc.tls.tokens import read_token
from fedrpc.training.batches import RESIDENT
from fedrpc.wire.envelope import DEVICE_BYTES, ClientTiming
from fedrpc.wire.frames import MAX_JOINING, check_name

_MAX_BAD_MESSAGES = 5  # in a row: more than that is no transmission error
_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)  # others may need less of it another time
_MAX_OPEN = 64  # clients whose stores and data are open at a time


@dataclass(frozen=True)
class ClientOptions:
    """A process's own options; the rest of its configuration comes with Join.

    Args:
        client_ids: The clients that it runs.
        join_token: The file with a client's join token; {client} stands for its id.
        gpu_share: Of a GPU's memory that the process may take.
        policy: Changes of the clients' own policies.
        speed: How fast it computes, beside this machine.
        cores: Who hands out this machine's cores; None when the process need not wait for one.
    """

    server: str
    client_ids: Sequence[int]
    state_dir: Path
    data_dir: Path | None = None
    device: str | None = None
    tls: ClientTls | None = None
    join_token: str | None = None
    insecure: bool = False
    wait_s: float = 300.0
    gpu_share: float = 1.0
    policy: Mapping[str, Any] = field(default_factory=dict)
    speed: float = 1.0
    cores: str | None = None


class ClientApp:
    """One process.

    Args:
        transport: The way to the server; gRPC's by the options when None.
        start_threads: Starts so many threads of a name.
    """

    def __init__(
        self,
        options: ClientOptions,
        transport: Transport | None = None,
        start_threads: Callable[[int, str], ThreadPoolExecutor] = ThreadPoolExecutor,
    ) -> None:
        self._options = options
        self._log = log.get("client")
        if len(options.client_ids) > 1:
            allow_open_files(len(options.client_ids))  # a lock for each client
        signer = _load_certificate_signer(options.tls)
        pattern = options.join_token
        tokens = {client: read_token(pattern, client) for client in options.client_ids} if pattern else {}
        self._members = [
            Member(options.state_dir, client, self._enqueue, signer, token=tokens.get(client), policy=options.policy)
            for client in options.client_ids
        ]
        self._transport = transport or Transport(options.server, tls=options.tls, insecure=options.insecure)
        self._machine = Machine(options.speed, options.cores)
        self._known: tuple[Work, RunConfig] | None = None
        self._stream: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self._queue: asyncio.Queue[tuple[Member, Task]] = asyncio.Queue()
        self._thread, self._pool = start_threads(1, "answer"), start_threads(1, "io")
        self._group = asyncio.TaskGroup()
        self._working: set[asyncio.Task[None]] = set()
        self._opened: dict[Member, None] = {}  # members that are open, the one used longest ago first

    async def run(self) -> str:
        """Takes part until the run is over; returns the reason that the server gives for its end."""
        try:
            async with self._group:
                self._begin(self._answer_tasks())
                reason = await self._stay_connected()
                for task in self._working:
                    task.cancel()
            answering_s = sum(member.cpu_s for member in self._members)
            self._log.info("cpu", total_s=time.process_time(), answering_s=answering_s)
            return reason
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            for member in self._members:
                member.stop.set()
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._pool.shutdown(wait=True, cancel_futures=True)
            await self._transport.close()
            for member in self._members:
                member.close()
                member.identity.release()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    # Joining

    async def _stay_connected(self) -> str:
        """Keeps a stream open until the run is over; returns the reason for its end."""
        bad = useless = 0
        while True:
            stream = await self._join()
            try:
                return await stream.run()
            except (SessionLost, Unavailable) as error:
                bad = 0
                self._log.info("stream_lost", why=str(error))
            except WireError as error:
                bad = 1 if stream.was_useful else bad + 1
                self._log.warning("bad_frame", error=str(error), in_a_row=bad)
                if bad >= _MAX_BAD_MESSAGES:
                    raise
            finally:
                if self._stream.done():
                    self._stream = asyncio.get_running_loop().create_future()
            useless = 0 if stream.was_useful else useless + 1
            await asyncio.sleep(_draw_pause(useless))  # longer and longer: the server limits how often a client calls

    async def _join(self) -> Stream:
        """Opens sessions and a stream; gives up after `wait_s` without a server."""
        give_up, said, heard, bad = time.monotonic() + self._options.wait_s, "", "", 0
        for attempt in range(10**9):
            try:
                return await self._try_to_join()
            except SessionLost as error:
                why = str(error)
            except Altered as error:
                bad += 1
                self._log.warning("bad_join", error=str(error), times=bad)
                if bad >= _MAX_BAD_MESSAGES:
                    raise
                await asyncio.sleep(_draw_pause(attempt))
                continue
            except Unavailable as error:
                why = said
                # Only when gRPC says something new: looking opens connections, and the server may have just come up.
                if str(error) != heard and (why := await self._find_obstacle() or str(error)) != said:
                    self._log.warning(
                        "waiting_for_server", address=self._options.server, why=why, wait_s=self._options.wait_s
                    )
                    said = why
                heard = str(error)
            delay = _draw_pause(attempt)
            if time.monotonic() + delay > give_up:
                raise Unavailable(f"{why}; gave up after {self._options.wait_s:g} s (--wait-s)")
            await asyncio.sleep(delay)
        raise AssertionError("unreachable")

    async def _find_obstacle(self) -> str:
        """What keeps the process from its server, if that can be told."""
        server, tls = self._options.server, self._options.tls
        found = await asyncio.get_running_loop().run_in_executor(self._pool, find_obstacle, server, tls)
        return f"no fedrpc server answers at {server}: {found}" if found else ""

    async def _try_to_join(self) -> Stream:
        stream: Stream | None = None
        for start in range(0, len(self._members), MAX_JOINING):
            members = self._members[start : start + MAX_JOINING]
            greeting = await self._transport.greet()
            self._check_run_id(greeting.run_id)  # before anything is signed for another run
            welcome = await self._transport.join([member.identity for member in members], greeting)
            work, config = await self._set_up_once(welcome)
            for member, admission in zip(members, welcome.admissions, strict=True):
                member.admit(work, admission, welcome.durable)
                if len(self._members) > _MAX_OPEN and member.is_idle:
                    member.close()
            if stream is None:
                limits = config.limits
                stream = self._transport.connect(limits.most_bytes, limits.heartbeat_s, self._pool)
            sessions = {member.session: member for member in members}
            device = label(work.device)[:DEVICE_BYTES].ljust(DEVICE_BYTES)
            await stream.attach(welcome.token, config.hash, sessions, device)
        assert stream is not None, "a process has at least one client"
        self._stream.set_result(stream)
        self._log.info("joined", run=work.run_id)
        return stream

    async def _set_up_once(self, welcome: Welcome) -> tuple[Work, RunConfig]:
        if welcome.package_version != fedrpc.__version__:
            self._log.warning("version_skew", server=welcome.package_version, client=fedrpc.__version__)
        if self._known is None:
            # Off the event loop: loading a large data set takes a while, and the channel must stay alive.
            loop = asyncio.get_running_loop()
            self._known = await loop.run_in_executor(self._thread, self._set_up, welcome)
        self._check_run_id(welcome.run_id)
        ours, theirs = self._known[1].rounds, parse_join_config(welcome.config).rounds
        if ours != theirs:  # noise for a target epsilon, and methods' schedules, follow them
            raise Outdated(
                f"the run was resumed with {theirs} rounds, and this process was started for {ours}: start it again"
            )
        return self._known

    def _check_run_id(self, run_id: str) -> None:
        if self._known and run_id != (ours := self._known[0].run_id):
            raise Refused(f"the server now serves run {run_id}, this client belongs to {ours}: restart it")

    def _set_up(self, welcome: Welcome) -> tuple[Work, RunConfig]:
        config, ids = parse_join_config(welcome.config), self._options.client_ids
        for client in ids:
            if not 0 <= client < config.clients:
                raise Refused(f"client id {client} is out of range: the run has 0 to {config.clients - 1}")
        for member in self._members:
            member.check_run(config.privacy)
        check_same(config.code, f"{config.method} on {config.model}")
        torch.set_num_threads(config.train.threads)
        problem = Problem(config, self._options.data_dir)
        for what, ours, theirs in (
            ("data set", problem.dataset.digest, welcome.dataset_digest),
            ("partition", problem.partition.sha256, welcome.partition_sha256),
            ("method's messages", problem.schema_digest().hex(), welcome.method_digest.hex()),
        ):
            if ours != theirs:
                raise Refused(
                    f"the {what} differs from the server's: expected {theirs[:16]}, got {ours[:16]}; "
                    "install the same fedrpc and prepare the same data on both sides"
                )
        index = ids[0] // len(ids)  # among processes with as many clients each
        device = choose(self._options.device or config.device, index, self._options.gpu_share)
        set_up(device, deterministic=config.train.deterministic, tf32=config.train.tf32)
        self._log.info("device", **describe(device))
        work = Work(problem, check_name(welcome.run_id), device, self._machine)
        if len(self._members) == 1:
            self._members[0].load(work)
            del problem.partition  # all clients' indices; this client has loaded its own examples
        give_back_memory()
        return work, config

    # Working

    def _enqueue(self, member: Member, task: Task) -> None:
        if not is_about_ledger(task):
            self._make_room_for(member)
        self._queue.put_nowait((member, task))

    async def _answer_tasks(self) -> None:
        while True:
            member, task = await self._queue.get()
            if member.is_wanted(task) and not is_about_ledger(task):
                await self._machine.wait_for_core()
            if not member.is_wanted(task):
                self._machine.give_core_back()
                member.drop(task)
                continue
            member.begin(task)
            timer = AnswerTimer(task)
            result: Kept | Failure | None = None
            try:
                result = await self._answer(member, task)
            except Cancelled:
                self._log.info("cancelled", phase=task.envelope.phase, round=task.envelope.round)
            finally:
                self._machine.give_core_back()
                member.end_answer()
            if result is None:
                member.drop(task)
                continue
            # Beside the next task: a submission waits for the server.
            self._begin(self._submit(member, task, result, timer.stop()))

    def _make_room_for(self, member: Member) -> None:
        """Opens a client's store, and closes those that were idle longest when too many are open."""
        member.open_store()
        self._opened.pop(member, None)
        self._opened[member] = None
        for other in list(self._opened)[: max(0, len(self._opened) - _MAX_OPEN)]:
            if other.is_idle:
                other.close()
                del self._opened[other]

    async def _answer(self, member: Member, task: Task) -> Kept | Failure:
        result = await self._try_to_answer(member, task)
        if self._known and isinstance(result, Failure):
            # Only now: while an exception is handled, its traceback holds the tensors of the answer that failed.
            give_back_gpu_memory(self._known[0].device)
        return result

    async def _try_to_answer(self, member: Member, task: Task) -> Kept | Failure:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, member.answer, task)
        except (Cancelled, DiskFull, Damaged):
            raise  # a reason would not help: without its store this client has no answer to anything
        except LOST_GPU as error:
            # The GPU's context is lost with all that is in it: only a new process can compute again.
            raise Unavailable(f"the GPU failed: {' '.join(str(error).split())[:300]}") from error
        except Abstained as error:
            self._log.warning("abstained", client=member.client, phase=task.envelope.phase, why=str(error))
            return Failure(str(error)[:500], abstained=True)
        except Exception as error:
            expected = isinstance(error, FedrpcError)
            self._log.error(
                "answer_failed",
                client=member.client,
                phase=task.envelope.phase,
                error=str(error),
                exc_info=not expected,
            )
            return self._explain(error)

    def _explain(self, error: Exception) -> Failure:
        """Tells a failure that would happen again from one that may be over when the client is asked again."""
        if isinstance(error, MethodFailed):
            return Failure(str(error)[:500], failed=type(error))
        if isinstance(error, FedrpcError) or self._known is None:
            return Failure(f"{type(error).__name__}: {error}"[:500])
        if isinstance(error, torch.OutOfMemoryError):
            RESIDENT.give_up()
            return Failure(explain_full_gpu(error))
        if "deterministic implementation" in str(error):
            return Failure(explain_nondeterminism(error), failed=MethodFailed)
        module = type(self._known[0].problem.method).__module__
        mistake = find_place(error, module) and not isinstance(error, _OUT_OF_MEMORY)
        return Failure(describe_exception(error, module), failed=MethodFailed if mistake else None)

    async def _submit(self, member: Member, task: Task, result: Kept | Failure, timing: ClientTiming) -> None:
        """Sends a result until the server has it or no longer waits for it."""
        bad = 0
        try:
            while member.is_wanted(task):
                if not self._stream.done():
                    await asyncio.shield(self._stream)
                    continue  # joining may have brought a durable point, and with it the end of the kept answer
                stream = self._stream.result()
                try:
                    await member.submit(stream, task, result, timing)
                    return
                except (SessionLost, Unavailable):
                    await asyncio.sleep(_draw_pause(0))
                except WireError as error:
                    bad += 1
                    self._log.warning("bad_result", client=member.client, error=str(error), in_a_row=bad)
                    if bad == _MAX_BAD_MESSAGES:  # the other clients of this process go on
                        result = Failure(f"the server refused the answer {bad} times: {error}"[:500])
                    elif bad > _MAX_BAD_MESSAGES:
                        return
        finally:
            member.drop(task)


def _load_certificate_signer(tls: ClientTls | None) -> Signer | None:
    """The key of the process's certificate, with which its clients sign; None when it has none."""
    return Signer.from_pem(read_pem(tls.key), f"--tls-key {tls.key}") if tls and tls.key else None


def _draw_pause(attempt: int) -> float:
    """Draws the seconds to wait before a retry: from 0.1 doubling to 3, with jitter so that clients spread out."""
    return float(min(3.0, 0.1 * 2.0 ** min(attempt, 10)) * random.uniform(0.5, 1.5))


async def run(options: ClientOptions) -> str:
    """Runs a process's clients until the run is over; returns the reason that the server gives for its end."""
    keep_files_private()  # stores have a client's data, and more
    return await ClientApp(options).run()
