"""A round: every question to every client once, every answer checked and in cohort order, or a reason why not."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fedrpc.errors import Abstained, QuorumError
from fedrpc.methods.fedavg import FIT, Global, Update
from fedrpc.methods.phases import Phase, Reply
from fedrpc.server import mailbox as mailboxes
from fedrpc.server import question as questions
from fedrpc.server import rounds
from fedrpc.server.mailbox import Mailbox, Task
from fedrpc.server.roster import Roster
from fedrpc.server.rounds import ServerContext, ServerRound, make_task_id
from fedrpc.server.spool import Spool, read_reply
from fedrpc.wire.codec import encode
from fedrpc.wire.envelope import Envelope
from fedrpc.wire.frames import write_file
from fedrpc.wire.message import Tensors
from tests.fakes import CPU, LinkedClients, asynchronous, problem_of

DTYPES = (torch.float64, torch.float32)
STATE = Global({"w": torch.zeros(2, 3), "n": torch.tensor(0)})


def update(client: int, **changes: Any) -> Update:
    weights = {"w": torch.full((2, 3), float(client)), "n": torch.tensor(client)}
    values = {"weights": weights, "num_examples": client + 1, "losses": torch.zeros(1, dtype=torch.float64)}
    return Update(**(values | changes))


class Scripted:
    """Clients whose answers a test writes; counts who was asked."""

    def __init__(self, answer: Callable[[Task], Any] = lambda task: update(task.client)) -> None:
        self.answer, self.asked = answer, []

    def exchange(self, task: Task, into: Path) -> Path:
        self.asked.append((task.phase, task.step, task.client))
        payload = encode(self.answer(task))
        question = task.question.payload.digest
        envelope = Envelope(task_id=task.task_id, parts=payload.parts, digest=payload.digest, question=question)
        write_file(into, envelope, payload, sync=False)
        return into


class Table:
    """A server's desk with clients at its mailbox."""

    def __init__(self, folder: Path, clients: Any, *, num_clients: int, parallel: int, before: Any) -> None:
        problem = problem_of("fedavg", clients=num_clients)
        self.roster = Roster(num_clients, grace_s=5)
        self.mailbox = Mailbox(self.roster, problem.config.limits, parallel)
        self.spool, self.executor = Spool(folder), ThreadPoolExecutor(2, "compute")
        self.told: list[tuple[str, dict[str, Any]]] = []
        work, io, tell = self.executor, self.executor, lambda *what: self.told.append(what)
        self.desk = ServerContext(problem, "run", self.mailbox, self.spool, work, io, CPU, tell)
        self.clients = LinkedClients(self.roster, self.mailbox, self.spool, clients, before)

    def round(self, cohort: Any = (0, 1, 2), quorum: float = 1.0, index: int = 0) -> ServerRound:
        return ServerRound(self.desk, index, cohort, quorum)


@asynccontextmanager
async def table(
    folder: Path, clients: Any = None, *, num_clients: int = 3, parallel: int = 0, before: Any = None
) -> AsyncIterator[Table]:
    found = Table(folder, clients or Scripted(), num_clients=num_clients, parallel=parallel, before=before)
    for client in range(num_clients):
        found.clients.join(client)
    try:
        yield found
    finally:
        await found.clients.close()
        found.executor.shutdown()


async def asked(rnd: ServerRound, phase: Any = FIT, message: Any = STATE, **options: Any) -> list[Reply[Any]]:
    return [reply async for reply in rnd._ask(phase, message, **options)]


# Order


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@asynchronous
async def test_answers_come_in_cohort_order_whatever_the_order_of_arrival(tmp_path, order):
    gates = {client: asyncio.Event() for client in range(3)}

    async def in_turn(task: Task) -> None:
        await gates[task.client].wait()

    async with table(tmp_path, before=in_turn) as desk:
        asking = asyncio.create_task(asked(desk.round((2, 0, 1))))
        for client in order:
            gates[client].set()
            await asyncio.sleep(0)
        replies = await asking
    assert [reply.client for reply in replies] == [2, 0, 1]
    assert [reply.body.num_examples for reply in replies] == [3, 1, 2]


@asynchronous
async def test_the_first_answer_is_not_held_back_for_the_last(tmp_path):
    gate = asyncio.Event()

    async def last_waits(task: Task) -> None:
        if task.client == 2:
            await gate.wait()

    async with table(tmp_path, before=last_waits) as desk:
        answers = desk.round()._ask(FIT, STATE)
        assert (await anext(answers)).client == 0
        assert (await anext(answers)).client == 1
        gate.set()
        assert (await anext(answers)).client == 2


@pytest.mark.parametrize("parallel", [1, 2, 8])
@asynchronous
async def test_at_most_so_many_work_at_a_time(tmp_path, parallel):
    working, most = 0, 0

    async def count(task: Task) -> None:
        nonlocal working, most
        working += 1
        most = max(most, working)
        for _ in range(5):
            await asyncio.sleep(0)
        working -= 1

    async with table(tmp_path, num_clients=6, parallel=parallel, before=count) as desk:
        replies = await asked(desk.round(range(6)))
    assert [reply.client for reply in replies] == list(range(6))
    assert most == min(parallel, 6)


@asynchronous
async def test_individual_messages_reach_their_clients_and_nobody_else(tmp_path):
    heard: dict[int, float] = {}

    def answer(task: Task) -> Update:
        heard[task.client] = float(task.question._message.weights["w"][0, 0])
        return update(task.client)

    messages = {client: Global({"w": torch.full((2, 3), client + 0.5), "n": torch.tensor(0)}) for client in (3, 1, 0)}
    async with table(tmp_path, Scripted(answer), num_clients=4) as desk:
        replies = await asked(desk.round((0, 1, 2)), message=messages)
    assert heard == {0: 0.5, 1: 1.5, 3: 3.5}
    assert [reply.client for reply in replies] == [0, 1, 3], "the cohort's order, then who is outside it"


@asynchronous
async def test_a_broadcast_is_encoded_once_and_so_is_one_message_for_some(tmp_path, monkeypatch):
    encoded: list[Any] = []
    monkeypatch.setattr(questions, "encode", lambda message: encoded.append(message) or encode(message))
    async with table(tmp_path) as desk:
        rnd = desk.round()
        await asked(rnd)
        await asked(rnd, message={0: STATE, 2: STATE})
    assert encoded == [STATE, STATE]


@asynchronous
async def test_asking_nobody_gives_nothing(tmp_path):
    async with table(tmp_path) as desk:
        assert await asked(desk.round(), message={}) == []


@asynchronous
async def test_the_questions_of_a_phase_number_themselves(tmp_path):
    clients = Scripted()
    async with table(tmp_path, clients) as desk:
        rnd = desk.round()
        await asked(rnd)
        await asked(rnd, message={1: STATE})
        await asked(rnd)
        assert rnd.steps == {"fit": 3}
    assert [step for _, step, client in clients.asked if client == 1] == [0, 1, 2]


@asynchronous
async def test_a_stage_that_goes_on_after_a_durable_point_numbers_on(tmp_path):
    clients = Scripted()
    async with table(tmp_path, clients) as desk:
        rnd = ServerRound(desk.desk, 0, (0,), 1.0, steps={"fit": 5})
        await asked(rnd)
    assert clients.asked == [("fit", 5, 0)]


@asynchronous
async def test_a_round_can_be_saved_within_and_other_stages_can_not(tmp_path):
    saved: list[Any] = []

    async def save(rnd: ServerRound, state: Any) -> None:
        saved.append((rnd.index, state))

    async with table(tmp_path) as desk:
        await ServerRound(desk.desk, 3, (0,), 1.0, save=save).save(STATE)
        assert saved == [(3, STATE)]
        with pytest.raises(RuntimeError, match="only set-up and rounds"):
            await desk.round().save(STATE)


# Who is missing


@asynchronous
async def test_who_does_not_answer_is_missing_with_the_reason(tmp_path):
    def answer(task: Task) -> Update:
        if task.client == 1:
            raise ValueError("no data here")
        return update(task.client)

    async with table(tmp_path, Scripted(answer)) as desk:
        rnd = desk.round(quorum=0.5)
        assert [reply.client for reply in await asked(rnd)] == [0, 2]
        assert rnd.missing == {1: "ValueError: no data here"}
        assert rnd.answered == {0, 2}
        assert len(await asked(rnd, message={0: STATE, 2: STATE})) == 2
        assert rnd.missing == {}, "of the last ask"


@pytest.mark.parametrize(
    ("quorum", "num_failing", "enough"),
    [
        (1.0, 0, True),
        (1.0, 1, False),
        (0.5, 2, True),
        (0.5, 3, False),
        (0.6, 2, False),
        (0.0, 4, True),
        (0.01, 4, False),
    ],
)
@asynchronous
async def test_the_quorum_is_a_share_of_those_asked(tmp_path, quorum, num_failing, enough):
    def answer(task: Task) -> Update:
        if task.client < num_failing:
            raise ValueError("no")
        return update(task.client)

    async with table(tmp_path, Scripted(answer), num_clients=4) as desk:
        rnd = desk.round(range(4), quorum)
        if enough:
            assert len(await asked(rnd)) == 4 - num_failing
        else:
            with pytest.raises(
                QuorumError, match=rf"{4 - num_failing} of 4 clients answered.*clients? 0.*: ValueError: no"
            ):
                await asked(rnd)
        assert len(rnd.missing) == num_failing


@asynchronous
async def test_a_question_can_have_a_quorum_of_its_own(tmp_path):
    def answer(task: Task) -> Update:
        if task.client:
            raise ValueError("no")
        return update(task.client)

    async with table(tmp_path, Scripted(answer)) as desk:
        rnd = desk.round(quorum=1.0)
        assert len(await asked(rnd, quorum=0.0)) == 1
        assert len(await asked(rnd, quorum=0.3)) == 1
        assert await asked(rnd, message={2: STATE}, quorum=0) == []
        with pytest.raises(QuorumError):
            await asked(rnd, quorum=0.5)
        with pytest.raises(QuorumError):
            await asked(rnd)


@asynchronous
async def test_who_abstains_is_missing_but_not_due(tmp_path):
    class Modest(Scripted):
        def exchange(self, task: Task, into: Path) -> Path:
            if task.client:
                raise Abstained("the budget is spent")
            return super().exchange(task, into)

    async with table(tmp_path, Modest()) as desk:
        rnd = desk.round(quorum=1.0)
        assert [reply.client for reply in await asked(rnd)] == [0]
        assert rnd.missing == dict.fromkeys((1, 2), "the budget is spent")


@asynchronous
async def test_who_had_its_time_is_not_waited_for_again_in_this_round(tmp_path):
    async with table(tmp_path) as desk:
        rnd = desk.round(quorum=0.5)
        answers = rnd._ask(FIT, STATE)
        asking = asyncio.create_task(anext(answers))
        await asyncio.sleep(0)
        while not rnd._posted:
            await asyncio.sleep(0)
        for task in rnd._posted:
            if task.client == 2 and not task.done:
                desk.mailbox._end(task, mailboxes.Missing("no answer within 1 s", hung=True))
        await asking
        assert [reply.client async for reply in answers] == [1]
        assert [reply.client for reply in await asked(rnd)] == [0, 1]
        assert rnd.missing == {2: "no answer within 1 s"}
        assert len(await asked(desk.round(index=1))) == 3, "the next round asks it again"


def spoiled(**tensors: torch.Tensor | None) -> Callable[[Task], Update]:
    """Client 1 answers with other weights than it was asked for."""

    def answer(task: Task) -> Update:
        weights: Tensors = dict(update(task.client).weights)
        if task.client == 1:
            weights |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
            weights = {name: tensor for name, tensor in weights.items() if tensors.get(name, tensor) is not None}
        return update(task.client, weights=weights)

    return answer


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (spoiled(w=torch.full((2, 3), torch.nan)), "has NaN or infinity"),
        (spoiled(w=torch.full((2, 3), -torch.inf)), "has NaN or infinity"),
        (spoiled(w=torch.zeros(3, 2)), "'weights' tensor 'w': expected"),
        (spoiled(w=torch.zeros(2, 3).double()), "float64"),
        (spoiled(w=torch.zeros(2, 3).to(torch.float8_e5m2)), "float8"),
        (spoiled(n=torch.tensor(1.0)), "'weights' tensor 'n'"),
        (spoiled(n=torch.tensor([1])), "'weights' tensor 'n'"),
        (spoiled(n=None), "'weights' tensor 'n'"),
        (spoiled(x=torch.zeros(1)), "'weights' tensor 'x'"),
        (lambda task: STATE if task.client == 1 else update(task.client), "is missing"),
        (
            lambda task: update(task.client, num_examples=-1 if task.client == 1 else 1),
            "ValueError: 'num_examples' should count at most",
        ),
        (lambda task: update(task.client, losses=torch.zeros(1, dtype=DTYPES[task.client == 1])), "an update needs"),
    ],
    ids=[
        "nan",
        "inf",
        "shape",
        "wide",
        "narrow",
        "float-counter",
        "1d-counter",
        "lost",
        "extra",
        "other-message",
        "count",
        "losses",
    ],
)
@asynchronous
async def test_an_answer_that_can_not_be_used_counts_as_missing(tmp_path, answer, why):
    async with table(tmp_path, Scripted(answer)) as desk:
        rnd = desk.round(quorum=0.6)
        assert [reply.client for reply in await asked(rnd)] == [0, 2]
        assert list(rnd.missing) == [1]
        assert why in rnd.missing[1]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.complex64], ids=str)
@asynchronous
async def test_weights_without_a_model_to_hold_them_against_are_still_checked(tmp_path, dtype):
    free = Phase("free", Global, Global)

    def answer(task: Task) -> Global:
        value = torch.tensor([1.0, torch.nan if task.client == 1 else 2.0]).to(dtype)
        return Global({"w": value})

    async with table(tmp_path, Scripted(answer)) as desk:
        rnd = desk.round(quorum=0.5)
        await asked(rnd, free)
        assert list(rnd.missing) == [1]


@asynchronous
async def test_a_reply_that_is_damaged_on_disk_counts_as_missing(tmp_path):
    class Torn(Scripted):
        def exchange(self, task: Task, into: Path) -> Path:
            super().exchange(task, into)
            if task.client == 0:
                into.write_bytes(into.read_bytes()[:-30])
            return into

    async with table(tmp_path, Torn()) as desk:
        rnd = desk.round(quorum=0.5)
        assert [reply.client for reply in await asked(rnd)] == [1, 2]
        assert "torn" in rnd.missing[0]


# Restarts


@asynchronous
async def test_a_restarted_server_asks_nobody_the_very_same_question_twice(tmp_path):
    async with table(tmp_path) as desk:
        first = await asked(desk.round())
    again = Scripted(lambda task: update(task.client, num_examples=9))
    async with table(tmp_path, again) as desk:
        second = await asked(desk.round())
        assert again.asked == []
        assert [reply.body.num_examples for reply in second] == [reply.body.num_examples for reply in first]
        other = Global({"w": torch.ones(2, 3), "n": torch.tensor(0)})
        third = await asked(desk.round(), message=other)
    assert [reply.body.num_examples for reply in third] == [9, 9, 9]
    assert len(again.asked) == 3


@asynchronous
async def test_what_was_lost_of_the_spool_is_asked_again_and_no_more(tmp_path):
    async with table(tmp_path) as desk:
        await asked(desk.round())
    (tmp_path / "0" / make_task_id("run", 0, "fit", 0, 1)).unlink()
    torn = tmp_path / "0" / make_task_id("run", 0, "fit", 0, 2)
    torn.write_bytes(torn.read_bytes()[:-1])
    again = Scripted()
    async with table(tmp_path, again) as desk:
        assert len(await asked(desk.round())) == 3
    assert again.asked == [("fit", 0, 1), ("fit", 0, 2)]


@asynchronous
async def test_a_damaged_reply_of_an_earlier_life_is_asked_again(tmp_path):
    async with table(tmp_path) as desk:
        await asked(desk.round())
    path = tmp_path / "0" / make_task_id("run", 0, "fit", 0, 1)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    again = Scripted()
    async with table(tmp_path, again) as desk:
        replies = await asked(desk.round())
    assert again.asked == [("fit", 0, 1)]
    assert torch.equal(replies[1].body.weights["w"], torch.ones(2, 3))


def test_task_ids_differ_in_everything_that_a_question_differs_in():
    ids = {make_task_id(*where) for where in itertools.product(("a", "b"), (0, 1), ("fit", "fot"), (0, 1), (0, 1))}
    assert len(ids) == 32
    assert make_task_id("a", 0, "fit", 0, 1) == make_task_id("a", 0, "fit", 0, 1)


# The rest of what a method is given


@asynchronous
async def test_a_round_that_was_left_early_tells_the_clients(tmp_path):
    gate = asyncio.Event()

    async def wait(task: Task) -> None:
        if task.client:
            await gate.wait()

    async with table(tmp_path, before=wait) as desk:
        rnd = desk.round()
        async for reply in rnd._ask(FIT, STATE):
            assert reply.client == 0
            break
        tasks = list(rnd._posted)
        rnd.close()
        assert [task.done for task in tasks] == [True, True, True]
        assert not isinstance(tasks[0].outcome.result(), mailboxes.Missing)
        assert {tasks[1].outcome.result().reason, tasks[2].outcome.result().reason} <= {
            "the round is over",
            "nobody waits for the answer any more",
        }


@asynchronous
async def test_heavy_work_runs_off_the_event_loop(tmp_path):
    async with table(tmp_path) as desk:
        name = await desk.round().compute(lambda suffix: threading.current_thread().name + suffix, "!")
    assert name.startswith("compute")
    assert name.endswith("!")


@asynchronous
async def test_only_work_that_says_so_keeps_what_it_frees(tmp_path, monkeypatch):
    kept: list[str] = []

    @contextmanager
    def keeping() -> Iterator[None]:
        kept.append("kept")
        yield
        kept.append("given back")

    monkeypatch.setattr(rounds, "keeping_freed_memory", keeping)
    async with table(tmp_path) as desk:
        assert await desk.round().compute(kept.copy) == []
        assert await desk.round().compute(kept.copy, keep_memory=True) == ["kept"]
        assert kept == ["kept", "given back"]
        with pytest.raises(ZeroDivisionError):
            await desk.round().compute(lambda: 1 / 0, keep_memory=True)


@asynchronous
async def test_randomness_and_network_are_the_same_again(tmp_path):
    async with table(tmp_path) as desk:
        rnd, again, later = desk.round(), desk.round(), desk.round(index=1)
        draw = rnd.rng("synthesis").integers(2**60)
        assert draw == rnd.rng("synthesis").integers(2**60) == again.rng("synthesis").integers(2**60)
        assert draw != rnd.rng("noise").integers(2**60)
        assert draw != later.rng("synthesis").integers(2**60)
        one, two = rnd.model().state_dict(), later.model().state_dict()
        assert all(torch.equal(one[name], two[name]) for name in one)


@asynchronous
async def test_progress_is_told_but_not_for_every_answer(tmp_path):
    async with table(tmp_path) as desk:
        rnd = desk.round()
        for _ in range(20):
            await asked(rnd)
        phases = [values for event, values in desk.told if event == "phase"]
    assert 0 < len(phases) < 60
    assert phases[0] == {"round": 0, "phase": "fit", "step": 1, "steps": 0, "answered": 0, "of": 3}


@asynchronous
async def test_one_reply_is_read_at_a_time(tmp_path, monkeypatch):
    reading: list[str] = []
    monkeypatch.setattr(rounds, "read_reply", lambda path: reading.append(path.name) or read_reply(path))
    async with table(tmp_path) as desk:
        number = 0
        async for _ in desk.round()._ask(FIT, STATE):
            number += 1
            assert len(reading) == number
