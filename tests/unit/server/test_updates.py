"""Answers beside what the server knows: no count above the partition, no update out of proportion to the others."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.aggregation.mean import WeightedMean
from fedrpc.errors import QuorumError
from fedrpc.methods.fedavg import FIT, Global, Update
from fedrpc.methods.phases import Phase, Reply
from fedrpc.server.mailbox import Task
from fedrpc.server.rounds import ServerRound
from fedrpc.server.updates import UpdateNorms, check_counts
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, averaged_fields, part
from tests.fakes import asynchronous
from tests.unit.server.test_rounds import STATE, Scripted, Table, asked, table, update

# Counts


@dataclass(frozen=True)
class Counts:
    one: int = part(Kind.SCALARS, counts_examples=True)
    some: torch.Tensor = part(Kind.SCALARS, counts_examples=True)
    named: dict[int, int] = part(Kind.SCALARS, counts_examples=True)
    maybe: int | None = part(Kind.SCALARS, default=None, counts_examples=True)
    other: int = part(Kind.SCALARS, default=2**62)
    losses: list[float] = part(Kind.SCALARS, default=(), by_epoch=True)


def count(one: int = 0, some: Any = (0,), named: Any = (), **others: Any) -> Counts:
    return Counts(one, torch.tensor(some), dict(enumerate(named)), **others)


@pytest.mark.parametrize("answer", [count(), count(10, (3, 7), (5, 5), maybe=10), count(losses=[math.nan] * 4)])
def test_counts_up_to_what_a_client_has_are_right(answer):
    check_counts(answer, 10, 4)


@pytest.mark.parametrize(
    "answer",
    [
        count(11),
        count(2**62),
        count(-1),
        count(0, (5, 6)),
        count(0, (2**62, 2**62)),
        count(0, (-5, 10)),
        count(0, (math.nan,)),
        count(0, (math.inf,)),
        count(0, (0,), (5, 6)),
        count(maybe=11),
        count(losses=[0.0] * 5),
    ],
    ids=str,
)
def test_other_counts_are_refused(answer):
    with pytest.raises(ValueError, match="should"):
        check_counts(answer, 10, 4)


def test_a_long_count_is_not_repeated_to_the_log():
    with pytest.raises(ValueError, match="should count") as caught:
        check_counts(count(0, (1,) * 100_000), 10, 4)
    assert len(str(caught.value)) < 200


# Norms


def judge(norms: list[float], ratio: float = 100.0, num_examples: list[int] | None = None) -> set[int]:
    """The clients whose updates are refused, when the updates of their only weight have these norms."""
    found = UpdateNorms(FIT, averaged_fields(Update), num_examples or [10] * len(norms), ratio)
    losses = torch.zeros(1, dtype=torch.float64)
    for client, norm in enumerate(norms):
        found.measure(client, Global({"w": torch.ones(1)}), Update({"w": torch.tensor([1.0 + norm])}, 1, losses))
    return set(found.find_outliers())


@pytest.mark.parametrize(
    ("norms", "refused"),
    [
        ([1.0, 1.0, 1.0, 1e38], {3}),
        ([1e38, 1.0, 1.0, 1.0], {0}),
        ([1.0, -2.0, 99.0], set()),
        ([1.0, 1.0, 101.0], {2}),
        ([1e6, 1e6, 1e8], set()),
        ([1.0, 1e6], set()),
        ([1.0, 1e10], {1}),
        ([1e38], {0}),
        ([0.0, 0.0, 5.0], set()),
        ([0.0, 0.0, 1e10], {2}),
        ([], set()),
    ],
    ids=str,
)
def test_an_update_out_of_all_proportion_is_refused(norms, refused):
    assert judge(norms) == refused


def test_a_client_with_more_examples_than_others_may_move_farther():
    assert judge([1.0, 1.0, 1500.0], num_examples=[10, 10, 10]) == {2}
    assert judge([1.0, 1.0, 1500.0], num_examples=[10, 10, 200]) == set()
    assert judge([1.0, 50.0, 1.0, 1.0], num_examples=[10, 1, 10, 10]) == set(), "one with fewer has no smaller bound"


def test_the_ratio_can_be_chosen():
    assert judge([1.0, 1.0, 11.0], ratio=10.0) == {2}
    assert judge([1.0, 1.0, 1e8], ratio=math.inf) == set()
    assert judge([0.0, 0.0, 1e8], ratio=math.inf) == set()


@given(st.lists(st.floats(0.1, 9.9), min_size=3, max_size=9))
def test_updates_of_like_norms_are_never_refused(norms):
    assert judge(norms, ratio=100.0) == set()


def test_counters_are_no_measure_of_weights():
    start = Global({"w": torch.zeros(1), "n": torch.tensor(0)})
    found = UpdateNorms(FIT, averaged_fields(Update), [10] * 4, 100.0)
    moves = [(1.0, 5000), (1.0, 5000), (1.0, 2**62), (4000.0, 5000)]
    for client, (weight, counter) in enumerate(moves):
        weights = {"w": torch.tensor([weight]), "n": torch.tensor(counter)}
        found.measure(client, start, Update(weights, 1, torch.zeros(1)))
    assert set(found.find_outliers()) == {2, 3}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64])
def test_every_type_of_weights_has_a_norm(dtype):
    found = UpdateNorms(FIT, averaged_fields(Update), [10] * 4, 100.0)
    for client, norm in enumerate((1.0, 1.0, 1.0, 400.0)):
        weights = {"w": torch.tensor([norm]).to(dtype)}
        found.measure(client, Global({"w": torch.zeros(1).to(dtype)}), Update(weights, 1, torch.zeros(1)))
    assert set(found.find_outliers()) == {3}


def test_a_large_update_is_measured_whole():
    found = UpdateNorms(FIT, averaged_fields(Update), [10] * 3, 100.0)
    for client in range(3):
        weights = torch.zeros(3, 70_000)
        weights[2, 60_000:] = 3.0 if client else 4.0
        found.measure(client, Global({"w": torch.zeros(3, 70_000)}), Update({"w": weights}, 1, torch.zeros(1)))
    assert list(found._norms["weights"].values()) == pytest.approx([400.0, 300.0, 300.0])


def test_updates_without_a_weight_do_not_count():
    found = UpdateNorms(FIT, averaged_fields(Update), [10] * 9, 100.0)
    for client in range(9):
        trained = client < 4
        weights = {"w": torch.full((1,), float(trained))}
        found.measure(client, Global({"w": torch.zeros(1)}), Update(weights, 5 * trained, torch.zeros(1)))
    assert found.find_outliers() == {}


# In a round


def poisoned(*clients: int, value: float = 1e38) -> Scripted:
    def answer(task: Task) -> Update:
        return update(task.client, weights=poison) if task.client in clients else update(task.client)

    poison = {"w": torch.full((2, 3), value), "n": torch.tensor(0)}
    return Scripted(answer)


def open_round(desk: Table, quorum: float = 0.5) -> ServerRound:
    return ServerRound(desk.desk, 0, range(4), quorum, aggregation={"mean": None})


def average(*clients: int) -> Tensors:
    mean = WeightedMean()
    for client in clients:
        mean.add(update(client).weights, client + 1)
    return mean.combine()


@pytest.mark.parametrize("hostile", range(4))
@asynchronous
async def test_the_mean_is_as_if_the_poisoned_client_had_not_answered(tmp_path: Path, hostile: int):
    honest = [client for client in range(4) if client != hostile]
    seen = []

    async def see(reply: Reply[Update]) -> None:
        seen.append((reply.client, reply.body.weights["w"].clone()))

    async with table(tmp_path, poisoned(hostile), num_clients=4) as desk:
        rnd = open_round(desk)
        rnd._check_may_see_updates = lambda phase: None  # type: ignore[method-assign]
        found = await rnd.mean(FIT, STATE, each=see)
    assert found.clients == honest == [client for client, _ in seen]
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in average(*honest).items())
    assert all(torch.equal(weights, update(client).weights["w"]) for client, weights in seen)
    assert rnd.answered == {*honest}
    assert list(rnd.missing) == [hostile]
    assert "its update of weights has a norm of inf" in rnd.missing[hostile]
    assert rnd.recorded == {"refused_updates": rnd.missing}


@asynchronous
async def test_nobody_is_asked_or_read_twice_when_all_are_honest(tmp_path, monkeypatch):
    async with table(tmp_path, num_clients=4) as desk:
        rnd = open_round(desk)
        monkeypatch.setattr(ServerRound, "_read_again", None)
        found = await rnd.mean(FIT, STATE)
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in average(0, 1, 2, 3).items())
    assert rnd.recorded == {}


@asynchronous
async def test_refused_updates_count_for_the_quorum(tmp_path):
    async with table(tmp_path, poisoned(1), num_clients=4) as desk:
        with pytest.raises(QuorumError, match="3 of 4 clients answered, the quorum is 4"):
            await open_round(desk, quorum=1.0).mean(FIT, STATE)


@asynchronous
async def test_a_method_that_sees_each_update_sees_no_poisoned_one(tmp_path):
    async with table(tmp_path, poisoned(0), num_clients=4) as desk:
        rnd = open_round(desk)
        rnd._check_may_see_updates = lambda phase: None  # type: ignore[method-assign]
        assert [reply.client async for reply in rnd.ask(FIT, STATE)] == [1, 2, 3]
        assert list(rnd.missing) == [0]


@asynchronous
async def test_an_aggregator_that_hides_updates_leaves_nothing_to_compare(tmp_path, monkeypatch):
    async with table(tmp_path, poisoned(1, value=1e20), num_clients=4) as desk:
        [layer] = desk.desk.problem.aggregators
        monkeypatch.setattr(type(layer), "hides_updates", "they are masked")
        found = await open_round(desk).mean(FIT, STATE)
    assert found.clients == [0, 1, 2, 3]


@asynchronous
async def test_a_count_above_the_partition_is_refused(tmp_path):
    def boast(task: Task) -> Update:
        return update(task.client, num_examples=2**62 if task.client == 1 else 1)

    async with table(tmp_path, Scripted(boast), num_clients=4) as desk:
        rnd = open_round(desk)
        found = await rnd.mean(FIT, STATE)
        most = desk.desk.problem.num_examples[1]
    assert found.clients == [0, 2, 3]
    assert f"'num_examples' should count at most {most} examples, got {2**62}" in rnd.missing[1]


@asynchronous
async def test_more_losses_than_epochs_are_refused(tmp_path):
    def babble(task: Task) -> Update:
        return update(task.client, losses=torch.zeros(2_000_000 if task.client == 1 else 1, dtype=torch.float64))

    async with table(tmp_path, Scripted(babble), num_clients=4) as desk:
        rnd = desk.round(range(4), quorum=0.5)
        assert [reply.client for reply in await asked(rnd)] == [0, 2, 3]
    assert "'losses' should have a value for each of 1 epochs, got 2000000" in rnd.missing[1]


def test_a_field_that_is_not_marked_is_not_held_to_anything():
    plain = dataclasses.make_dataclass("Plain", [("steps", int, part(Kind.SCALARS))], frozen=True)
    check_counts(plain(2**62), 1, 1)
    assert Phase("plain", Global, plain).up is plain
