"""A client process against the real server in memory: joins, answers, comes again, and both ledgers agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import grpc
import grpc.aio
import pytest
import torch

from fedrpc.client import app, store
from fedrpc.client.answer import Answerer
from fedrpc.client.app import ClientApp, ClientOptions
from fedrpc.client.member import Member, is_about_ledger
from fedrpc.client.store import ClientStore
from fedrpc.client.transport import Transport
from fedrpc.device import LOST_GPU
from fedrpc.errors import FedrpcError, Outdated, Refused, Taken, Unavailable, WireError
from fedrpc.methods.builtin import LEDGER
from fedrpc.methods.fedavg import FIT, Global, Update
from fedrpc.methods.phases import Reply
from fedrpc.models.state import read_tensors
from fedrpc.privacy.heads import HeadsFile
from fedrpc.privacy.ledger import PrivacyFile
from fedrpc.problem import Problem
from fedrpc.server.app import STATUS, Servicer
from fedrpc.server.connection import Connection
from fedrpc.server.gatekeeper import Gatekeeper
from fedrpc.server.mailbox import Mailbox, Missing
from fedrpc.server.roster import Roster
from fedrpc.server.rounds import ServerContext, ServerRound
from fedrpc.server.sockets import Sockets
from fedrpc.server.spool import Spool
from fedrpc.training import batches
from fedrpc.wire.frames import count_message_bytes
from fedrpc.wire.ledger import LedgerFile, LedgerQuestion, compare, group_by_client
from fedrpc.wire.tcpinfo import Meter
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.fakes import CPU, asynchronous, problem_of

WAIT_S = 30.0
PEER = "ipv4:10.0.0.1:5000"


class Aborted(Exception):
    """Ends a call of the server, as gRPC's `abort` does."""


def make_error(code: grpc.StatusCode, text: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text)


class Pipe:
    """Both ends of one stream: the client's call, and the server's context."""

    def __init__(self, serve: Callable[[Any, Any], Any]) -> None:
        self._up: asyncio.Queue[Any] = asyncio.Queue()
        self._down: asyncio.Queue[Any] = asyncio.Queue()
        self.seen = {"up": 0, "down": 0}  # bytes of the frames that the server read and wrote
        context = SimpleNamespace(
            read=self._read_up,
            write=self._write_down,
            abort=self._abort,
            peer=lambda: PEER,
            auth_context=dict,
            send_initial_metadata=AsyncMock(),
        )
        self.serving = asyncio.ensure_future(serve(None, context))
        self.serving.add_done_callback(lambda _: self._down.put_nowait(grpc.aio.EOF))

    async def _read_up(self) -> Any:
        data = await self._up.get()
        if data is not grpc.aio.EOF:
            self.seen["up"] += count_message_bytes(len(data))
        return data

    async def _write_down(self, data: bytes) -> None:
        self.seen["down"] += count_message_bytes(len(data))
        self._down.put_nowait(data)

    async def _abort(self, code: grpc.StatusCode, text: str) -> None:
        self._down.put_nowait(make_error(code, text))
        raise Aborted

    async def read(self) -> Any:
        data = await self._down.get()
        if isinstance(data, grpc.aio.AioRpcError):
            raise data
        return data

    async def write(self, data: bytes) -> None:
        if self.serving.done():
            raise asyncio.InvalidStateError
        self._up.put_nowait(data)

    def cancel(self) -> None:
        """The client hangs up."""
        self._up.put_nowait(grpc.aio.EOF)

    def cut(self) -> None:
        """The network fails: neither side hears of the other any more."""
        self.serving.cancel()


class Hub:
    """A server without a socket."""

    def __init__(self, folder: Path, problem: Problem) -> None:
        config = problem.config
        self.problem, self.pool = problem, ThreadPoolExecutor(2)
        self.roster = Roster(config.clients, config.limits.grace_s)
        self.mailbox = Mailbox(self.roster, config.limits, config.parallel)
        self.book, self.privacy = LedgerFile(folder), PrivacyFile(folder / "privacy.jsonl")
        self.heads = HeadsFile(folder / "heads.jsonl", "run")
        self.spool = Spool(folder / "spool")
        self.server = ServerContext(
            problem, "run", self.mailbox, self.spool, self.pool, self.pool, CPU, lambda *_: None
        )
        coordinator = cast(Any, SimpleNamespace(round=0))
        sockets = Sockets(Meter(0, local=True), max_connections=100)
        kept = (self.book, self.privacy, self.heads)
        self._servicer = Servicer(self.server, self.roster, coordinator, *kept, sockets, Gatekeeper("run", self.heads))
        self.pipes: list[Pipe] = []
        self.num_joins, self._joined = 0, {"up": 0, "down": 0}

    async def greet(self, data: bytes, timeout: float) -> bytes:
        return await self._call(self._servicer.greet, data)

    async def join(self, data: bytes, timeout: float) -> bytes:
        self.num_joins += 1
        return await self._call(self._servicer.join, data)

    async def _call(self, call: Callable[[bytes, Any], Awaitable[bytes]], data: bytes) -> bytes:
        try:
            answer = await call(data, SimpleNamespace(auth_context=dict, peer=lambda: PEER))
        except FedrpcError as error:
            raise make_error(next(code for cls, code in STATUS if isinstance(error, cls)), str(error)) from None
        self._joined["up"] += count_message_bytes(len(data))
        self._joined["down"] += count_message_bytes(len(answer))
        return answer

    def count_seen(self) -> dict[str, int]:
        """The bytes of all messages, by direction."""
        return {side: size + sum(pipe.seen[side] for pipe in self.pipes) for side, size in self._joined.items()}

    def connect(self) -> Pipe:
        self.pipes.append(Pipe(self._servicer.connect))
        return self.pipes[-1]

    async def ask(self, *cohort: int) -> list[Reply[Update]]:
        """One round of training."""
        weights = Global(read_tensors(self.problem.copy_network()))
        rnd = ServerRound(self.server, 0, cohort, 1.0)
        return [reply async for reply in rnd._ask(FIT, weights)]

    async def close(self) -> None:
        for pipe in self.pipes:
            pipe.serving.cancel()
        await asyncio.gather(*(pipe.serving for pipe in self.pipes), return_exceptions=True)
        self.pool.shutdown()
        self.spool.close()
        self.book.close()
        self.privacy.close()
        self.heads.close()


@asynccontextmanager
async def hub(folder: Path, monkeypatch: pytest.MonkeyPatch, problem: Problem) -> AsyncIterator[Hub]:
    """A server that every client of this process reaches."""
    (folder / "server").mkdir(exist_ok=True)
    found = Hub(folder / "server", problem)

    class InMemory(Transport):
        def __init__(self, address: str, **_: Any) -> None:
            self.address, self._is_local = address, False
            self._greet, self._join, self._connect = found.greet, found.join, found.connect

        async def close(self) -> None:
            pass

    monkeypatch.setattr(app, "Transport", InMemory)
    monkeypatch.setattr(app, "Problem", lambda config, _: problem_of("fedavg", **_SIZES))
    monkeypatch.setattr(app, "_draw_pause", lambda _: 0.01)
    try:
        yield found
    finally:
        await found.close()


_SIZES: dict[str, Any] = {"clients": 3}


@pytest.fixture
def problem() -> Problem:
    return problem_of("fedavg", **_SIZES)


def start(folder: Path, *clients: int, wait_s: float = 5.0) -> asyncio.Task[str]:
    """Starts a process that runs these clients."""
    return asyncio.create_task(ClientApp(ClientOptions("here:1", clients, folder, wait_s=wait_s)).run())


async def finish(server: Hub, *processes: asyncio.Task[str]) -> None:
    """Ends the run; all processes hear of it."""
    server.mailbox.finish("the run is complete")
    for process in processes:
        assert await asyncio.wait_for(process, WAIT_S) == "the run is complete"


def check_ledgers(server: Hub, folder: Path, *clients: int) -> None:
    """Both sides booked the same for every completed transfer."""
    ours = group_by_client(server.book.read_all_rows())
    for client in clients:
        store = ClientStore(folder / str(client) / "run")
        found = compare(ours[client], store.read_ledger())
        store.close()
        assert found["compared"] > 0
        assert (found["differing"], found["only_server"], found["only_client"]) == (0, 0, 0)


@pytest.mark.parametrize("processes", [[[0], [1], [2]], [[0, 1, 2]], [[2, 0], [1]]], ids=str)
@asynchronous
async def test_processes_of_one_client_or_many_answer_alike(tmp_path, monkeypatch, problem, processes):
    async with hub(tmp_path, monkeypatch, problem) as server:
        running = [start(tmp_path, *clients) for clients in processes]
        replies = await asyncio.wait_for(server.ask(0, 1, 2), WAIT_S)
        assert [reply.client for reply in replies] == [0, 1, 2]
        again = await asyncio.wait_for(server.ask(0, 1, 2), WAIT_S)
        assert [reply.body.num_examples for reply in again] == [reply.body.num_examples for reply in replies]
        assert server.num_joins == len(processes)
        await finish(server, *running)
        check_ledgers(server, tmp_path, 0, 1, 2)
        await asyncio.wait_for(asyncio.gather(*(pipe.serving for pipe in server.pipes)), WAIT_S)
        assert server.book.message_bytes == server.count_seen(), "every byte is in the ledger, those of Join, too"
        assert [server.privacy.get_head(client)[0] > 0 for client in range(3)] == [True] * 3


@asynchronous
async def test_a_host_joins_in_groups_over_one_stream(tmp_path, monkeypatch, problem):
    monkeypatch.setattr(app, "MAX_JOINING", 2)
    monkeypatch.setattr(app, "_MAX_OPEN", 1)
    async with hub(tmp_path, monkeypatch, problem) as server:
        process = start(tmp_path, 0, 1, 2)
        await asyncio.wait_for(server.ask(0, 1, 2), WAIT_S)
        assert (server.num_joins, len(server.pipes)) == (2, 1)
        await finish(server, process)
        check_ledgers(server, tmp_path, 0, 1, 2)


@pytest.mark.parametrize("clients", [[0], [0, 1, 2]], ids=str)
@asynchronous
async def test_a_process_whose_stream_breaks_comes_again_and_nothing_is_lost(tmp_path, monkeypatch, problem, clients):
    async with hub(tmp_path, monkeypatch, problem) as server:
        process = start(tmp_path, *clients)
        asking = asyncio.create_task(server.ask(*clients))
        async with asyncio.timeout(WAIT_S):
            while not server.mailbox.num_out:
                await asyncio.sleep(0)
        server.pipes[0].cut()
        assert [reply.client for reply in await asyncio.wait_for(asking, WAIT_S)] == clients
        assert len(server.pipes) == 2
        await finish(server, process)


@asynchronous
async def test_an_answer_is_kept_for_a_server_that_comes_back(tmp_path, monkeypatch, problem):
    async with hub(tmp_path, monkeypatch, problem) as server:
        process = start(tmp_path, 0)
        first = await asyncio.wait_for(server.ask(0), WAIT_S)
        server.pipes[0].cut()
        server.server.spool.clear(1)  # what the server had of it is gone
        second = await asyncio.wait_for(server.ask(0), WAIT_S)
        assert second[0].body.num_examples == first[0].body.num_examples
        await finish(server, process)
        [released] = {server.privacy.get_head(0)[0]}
        store = ClientStore(tmp_path / "0" / "run")
        assert store.num_released() == released, "answered once, charged once"
        store.close()


@asynchronous
async def test_an_id_that_another_process_uses_is_taken(tmp_path, monkeypatch, problem):
    async with hub(tmp_path, monkeypatch, problem) as server:
        process = start(tmp_path / "one", 0)
        await asyncio.wait_for(server.ask(0), WAIT_S)
        with pytest.raises(Taken, match="client id 0 is used by another live client"):
            await asyncio.wait_for(start(tmp_path / "two", 1, 0), WAIT_S)
        await finish(server, process)


@asynchronous
async def test_an_id_that_the_run_does_not_have_is_refused(tmp_path, monkeypatch, problem):
    async with hub(tmp_path, monkeypatch, problem):
        with pytest.raises(Refused, match="client id 3 is out of range"):
            await asyncio.wait_for(start(tmp_path, 0, 3), WAIT_S)


@asynchronous
async def test_another_run_at_the_same_address_is_refused(tmp_path, monkeypatch, problem):
    async with hub(tmp_path, monkeypatch, problem) as server:
        process = start(tmp_path, 0)
        await asyncio.wait_for(server.ask(0), WAIT_S)
        object.__setattr__(server.server, "run_id", "another")
        server.pipes[0].cut()
        with pytest.raises(Refused, match="serves run another, this client belongs to run"):
            await asyncio.wait_for(process, WAIT_S)


@asynchronous
async def test_a_run_that_goes_on_for_more_rounds_needs_new_processes(tmp_path, monkeypatch, problem):
    """Noise for a target epsilon is for so many rounds."""
    async with hub(tmp_path, monkeypatch, problem) as server:
        process = start(tmp_path, 0)
        await asyncio.wait_for(server.ask(0), WAIT_S)
        more = problem.config.model_copy(update={"rounds": problem.config.rounds + 5})
        monkeypatch.setattr(problem, "config", more)
        server.pipes[0].cut()
        with pytest.raises(Outdated, match=f"resumed with {more.rounds} rounds, .* started for {more.rounds - 5}"):
            await asyncio.wait_for(process, WAIT_S)


@asynchronous
async def test_a_process_gives_up_a_server_that_does_not_answer(tmp_path, monkeypatch, problem):
    async with hub(tmp_path, monkeypatch, problem) as server:

        async def refuse(*_: Any, **__: Any) -> bytes:
            raise make_error(grpc.StatusCode.UNAVAILABLE, "nobody is here")

        monkeypatch.setattr(server, "join", refuse)
        with pytest.raises(Unavailable, match=r"gave up after 0\.05 s"):
            await asyncio.wait_for(start(tmp_path, 0, wait_s=0.05), WAIT_S)


# At the wrong moment


async def make_tasks(server: Hub, *cohort: int, step: int = 0) -> list[Any]:
    rnd = ServerRound(server.server, 0, cohort, 1.0)
    message = Global(read_tensors(server.problem.copy_network()))
    return await rnd._make_tasks(FIT, dict.fromkeys(cohort, message), step, server.server.expect(FIT))


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0)


@asynchronous
async def test_a_late_receipt_and_the_same_task_in_one_frame(tmp_path, monkeypatch, problem):
    """A server came back, and a kept answer arrives just before its question is asked again."""
    async with hub(tmp_path, monkeypatch, problem) as server:
        process = start(tmp_path, 0)
        await until(lambda: len(server.roster) and server.roster.get(0).link)
        [first] = await make_tasks(server, 0)
        server.mailbox.post([first])
        await until(lambda: first.delivered_at)
        server.pipes[0].cut()
        await asyncio.sleep(0)
        server.mailbox.withdraw([first], "what a restart forgets")
        [again] = await make_tasks(server, 0)
        original, seen = Connection._acknowledge, []

        def acknowledge(self: Connection, session: Any, task_id: str, status: int, *args: Any) -> None:
            original(self, session, task_id, status, *args)
            if task_id == again.task_id and status == pb.Receipt.STATUS_LATE and not seen:
                seen.append(task_id)
                server.mailbox.post([again])  # while the receipt waits

        monkeypatch.setattr(Connection, "_acknowledge", acknowledge)
        assert not isinstance(await asyncio.wait_for(again.outcome, WAIT_S), Missing)
        assert seen
        await finish(server, process)


@asynchronous
async def test_rows_of_an_answer_that_was_withdrawn_before_it_was_sent_come_with_the_ledger(
    tmp_path, monkeypatch, problem
):
    """It was charged, and no later answer takes its rows along."""
    async with hub(tmp_path, monkeypatch, problem) as server:
        original, loop, seen = Member.answer, asyncio.get_running_loop(), []

        def answer(self: Member, task: Any) -> Any:
            kept = original(self, task)
            if not is_about_ledger(task):  # in another thread: the loop takes the cancel before this answer
                seen.append(self)
                loop.call_soon_threadsafe(server.mailbox.withdraw, [asked], "too late")
                asyncio.run_coroutine_threadsafe(until(lambda: self._withdrawn), loop).result(WAIT_S)
            return kept

        monkeypatch.setattr(Member, "answer", answer)
        process = start(tmp_path, 0)
        await until(lambda: len(server.roster) and server.roster.get(0).link)
        [asked] = await make_tasks(server, 0)
        server.mailbox.post([asked])
        assert isinstance(await asyncio.wait_for(asked.outcome, WAIT_S), Missing)
        rnd = ServerRound(server.server, 1, [0], 1.0)
        assert [reply.client async for reply in rnd._ask(LEDGER, LedgerQuestion("what did you count?"))] == [0]
        assert server.privacy.get_head(0)[0] == seen[0].open_store().num_released() > 0
        await finish(server, process)


@asynchronous
async def test_an_answer_that_became_durable_while_the_stream_was_away(tmp_path, monkeypatch, problem):
    monkeypatch.setattr(store, "_SMALL_BYTES", 0)  # so that the answer has a file
    async with hub(tmp_path, monkeypatch, problem) as server:
        original, pause_s = server.join, 0.0

        async def join(*args: Any, **kwargs: Any) -> bytes:
            await asyncio.sleep(pause_s)
            return await original(*args, **kwargs)

        server.join = join
        process = start(tmp_path, 0)
        await asyncio.wait_for(server.ask(0), WAIT_S)  # accepted, but its receipt waits
        pause_s = 0.3  # longer than the client waits before it tries to submit again
        server.pipes[0].cut()
        server.mailbox.durable = 1
        await until(lambda: len(server.pipes) == 2 or process.done())
        await asyncio.sleep(0.3)
        await finish(server, process)


@asynchronous
async def test_a_client_whose_results_are_refused_does_not_end_its_host(tmp_path, monkeypatch, problem):
    async with hub(tmp_path, monkeypatch, problem) as server:
        extend = server.privacy.extend

        def refuse(client: int, *args: Any) -> int:
            if client == 1:
                raise WireError("this client's rows are always wrong")
            return extend(client, *args)

        monkeypatch.setattr(server.privacy, "extend", refuse)
        process = start(tmp_path, 0, 1, 2)
        tasks = await make_tasks(server, 0, 1, 2)
        server.mailbox.post(tasks)
        outcomes = [await asyncio.wait_for(task.outcome, WAIT_S) for task in tasks]
        assert [isinstance(outcome, Missing) for outcome in outcomes] == [False, True, False]
        assert "refused the answer 5 times" in outcomes[1].reason
        await finish(server, process)


@asynchronous
async def test_a_client_for_which_the_gpu_is_too_small_does_not_end_its_host(tmp_path, monkeypatch, problem):
    """Nor does it stay so for that client: what the failed answer held is free again."""
    full, freed, answer = {1}, [], Answerer.answer

    def fill(answerer: Answerer, task: Any, stop: Any) -> Any:
        if answerer._client in full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return answer(answerer, task, stop)

    monkeypatch.setattr(Answerer, "answer", fill)
    monkeypatch.setattr(batches, "RESIDENT", batches.ResidentData())
    monkeypatch.setattr(app, "RESIDENT", batches.RESIDENT)
    monkeypatch.setattr(app, "give_back_gpu_memory", freed.append)
    async with hub(tmp_path, monkeypatch, problem) as server:
        process = start(tmp_path, 0, 1, 2)
        tasks = await make_tasks(server, 0, 1, 2)
        server.mailbox.post(tasks)
        outcomes = [await asyncio.wait_for(task.outcome, WAIT_S) for task in tasks]
        assert [isinstance(outcome, Missing) for outcome in outcomes] == [False, True, False]
        assert "GPU's memory is full" in outcomes[1].reason
        assert "smaller train.batch_size" in outcomes[1].reason
        assert outcomes[1].failed is None, "another time there may be room"
        assert len(freed) == 1
        assert batches.RESIDENT._share == 0.0, "from now on its data is copied as it is used"
        full.clear()
        again = await make_tasks(server, 1, step=1)
        server.mailbox.post(again)
        assert not isinstance(await asyncio.wait_for(again[0].outcome, WAIT_S), Missing)
        await finish(server, process)


@asynchronous
async def test_a_process_whose_gpu_is_lost_ends_to_be_started_again(tmp_path, monkeypatch, problem):
    def lose(answerer: Answerer, task: Any, stop: Any) -> Any:
        raise LOST_GPU[0]("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Answerer, "answer", lose)
    async with hub(tmp_path, monkeypatch, problem) as server:
        process = start(tmp_path, 0, 1)
        server.mailbox.post(await make_tasks(server, 0))
        with pytest.raises(Unavailable, match="the GPU failed: CUDA error: an illegal memory access"):
            await asyncio.wait_for(process, WAIT_S)


@asynchronous
async def test_an_operation_that_is_not_deterministic_names_the_setting(tmp_path, monkeypatch, problem):
    def refuse(answerer: Answerer, task: Any, stop: Any) -> Any:
        raise RuntimeError("pool_backward_cuda does not have a deterministic implementation, but you set ...")

    monkeypatch.setattr(Answerer, "answer", refuse)
    async with hub(tmp_path, monkeypatch, problem) as server:
        process = start(tmp_path, 0)
        tasks = await make_tasks(server, 0)
        server.mailbox.post(tasks)
        outcome = await asyncio.wait_for(tasks[0].outcome, WAIT_S)
        assert "--set train.deterministic=false" in outcome.reason
        assert outcome.failed is not None, "it would happen again"
        await finish(server, process)
