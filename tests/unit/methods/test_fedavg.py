"""FedAvg against its oracles: means of models, one central step, and who has a say."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch
from torch import nn

from fedrpc.errors import QuorumError
from fedrpc.methods.fedavg import FIT, FedAvg, Global, Update
from fedrpc.methods.phases import Reply
from fedrpc.models.state import read_tensors
from fedrpc.server.summary import build_shapes
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.codec import count_tensor_bytes
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors
from tests.fakes import InMemoryFederation, Played, mlp, problem_of, run_in_memory

FULL = {"train": {"epochs": 1, "batch_size": 1000, "lr": 0.5}}


def same(one: Tensors, two: Tensors) -> bool:
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


def answered(weights_of: dict[int, tuple[Tensors, int]]) -> Tensors:
    """What the server half makes of these answers."""

    async def replies(phase, message, check=None):
        assert phase is FIT
        for client, (weights, count) in weights_of.items():
            yield Reply(client, Update(weights, count, torch.zeros(1, dtype=torch.float64)))

    with InMemoryFederation(problem_of("fedavg")) as federation:
        rnd = federation.stage(0)
        rnd._ask = replies
        return asyncio.run(FedAvg().round(Global({}), rnd)).weights


def model(seed: int) -> Tensors:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    network[1].num_batches_tracked += seed
    return read_tensors(network)


# (a) to (e) of the card


def test_a_identical_client_models_are_unchanged():
    assert same(answered({0: (model(1), 5), 1: (model(1), 17), 2: (model(1), 1)}), model(1))


def test_b_one_client_is_its_model():
    assert same(answered({3: (model(2), 9)}), model(2))


@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.3"])
def test_c_a_full_batch_step_is_a_central_step_on_the_pooled_data(partition):
    problem = problem_of("fedavg", build=mlp, partition=partition, **FULL)
    got = run_in_memory(problem, 1).weights
    central = problem.network()
    parts = [problem.client_data(client).train.all() for client in range(4)]
    assert len({len(y) for _, y in parts}) > 1 or partition == "iid"
    cross_entropy(central, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).backward()
    torch.optim.SGD(central.parameters(), lr=0.5).step()
    for name, wanted in read_tensors(central).items():
        scale = float(wanted.abs().max())
        assert torch.allclose(got[name], wanted, rtol=1e-6, atol=scale * 1e-6), name
    moved = max(float((got[name] - start).abs().max()) for name, start in read_tensors(problem.network()).items())
    assert moved > 1e-3, "a step was made"


def test_c_only_the_sampled_clients_count():
    problem = problem_of("fedavg", build=mlp, fraction=0.5, **FULL)
    played = run_in_memory(problem, 1)
    [cohort] = played.cohorts
    assert len(cohort) == 2
    central = problem.network()
    parts = [problem.client_data(client).train.all() for client in cohort]
    cross_entropy(central, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).backward()
    torch.optim.SGD(central.parameters(), lr=0.5).step()
    for name, wanted in read_tensors(central).items():
        assert torch.allclose(played.weights[name], wanted, rtol=1e-6, atol=float(wanted.abs().max()) * 1e-6), name


def test_d_the_order_of_clients_does_not_matter():
    models = {client: (model(client), client + 1) for client in range(4)}
    wanted = answered(models)
    for order in itertools.permutations(models):
        got = answered({client: models[client] for client in order})
        assert all(torch.allclose(got[name].double(), wanted[name].double(), rtol=1e-7) for name in wanted)


def test_e_every_coordinate_lies_within_the_clients():
    models = {client: (model(client), 10**client) for client in range(4)}
    got = answered(models)
    for name, value in got.items():
        stacked = torch.stack([weights[name] for weights, _ in models.values()])
        low, high = stacked.min(0).values, stacked.max(0).values
        if value.is_floating_point():
            low, high = torch.nextafter(low, torch.tensor(-torch.inf)), torch.nextafter(high, torch.tensor(torch.inf))
        assert bool(((low <= value) & (value <= high)).all()), name


def test_batchnorm_statistics_are_averaged_and_its_counter_is_the_largest():
    got = answered({0: (model(2), 1), 1: (model(5), 3)})
    assert got["1.num_batches_tracked"].item() == 5
    wanted = (model(2)["0.weight"].double() + 3 * model(5)["0.weight"].double()) / 4
    assert torch.equal(got["0.weight"], wanted.float())


def test_a_client_without_data_changes_nothing():
    assert same(answered({0: (model(1), 4), 1: (model(9), 0)}), model(1))
    with pytest.raises(QuorumError):
        answered({0: (model(1), 0)})


# Whole runs


@pytest.fixture(scope="module")
def played() -> Played:
    return run_in_memory(problem_of("fedavg", fraction=0.75, train={"epochs": 2}), 3)


def test_a_run_learns(played):
    problem = problem_of("fedavg", train_size=400, partition="iid", train={"epochs": 2, "lr": 0.1})
    before = run_in_memory(problem, 0).evaluate()
    after = run_in_memory(problem, 4).evaluate()
    assert after.loss < before.loss
    assert after.accuracy > before.accuracy + 10
    assert len(played.states) == 4


def test_the_same_seed_is_the_same_model_and_another_is_another(played):
    again = run_in_memory(problem_of("fedavg", fraction=0.75, train={"epochs": 2}), 3)
    assert again.sha256 == played.sha256
    assert run_in_memory(problem_of("fedavg", fraction=0.75, train={"epochs": 2}, seed=8), 3).sha256 != played.sha256


def test_losses_of_every_answer_are_recorded(played):
    for cohort, record in zip(played.cohorts, played.records, strict=True):
        assert sorted(record["local_losses"]) == cohort
        assert all(len(losses) == 2 for losses in record["local_losses"].values())


def test_a_missing_client_is_left_out_of_the_mean():
    problem = problem_of("fedavg", build=mlp, **FULL)
    got = run_in_memory(problem, 1, absent=lambda index, phase, step, client: client == 2).weights
    central = problem.network()
    parts = [problem.client_data(client).train.all() for client in (0, 1, 3)]
    cross_entropy(central, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).backward()
    torch.optim.SGD(central.parameters(), lr=0.5).step()
    for name, wanted in read_tensors(central).items():
        assert torch.allclose(got[name], wanted, rtol=1e-6, atol=float(wanted.abs().max()) * 1e-6), name


def test_too_few_answers_end_the_run():
    with pytest.raises(QuorumError, match="1 of 4 clients answered"):
        run_in_memory(problem_of("fedavg"), 1, absent=lambda index, phase, step, client: client > 0)


def test_there_is_no_set_up_and_no_end():
    assert not FedAvg.overrides("setup")
    assert not FedAvg.overrides("finalize")


def test_the_cost_is_the_cards():
    problem = problem_of("fedavg", train={"epochs": 3})
    weights = read_tensors(problem.network())
    cost = FedAvg().cost(build_shapes(problem, weights, [[0, 1], [3]]))
    theta = sum(t.numel() for t in weights.values() if t.is_floating_point())
    counters = sum(not t.is_floating_point() for t in weights.values())
    assert cost.down == {Kind.WEIGHTS: 3 * (4 * theta + 8 * counters)}
    assert cost.up == {Kind.WEIGHTS: 3 * (4 * theta + 8 * counters), Kind.SCALARS: 3 * (8 + 8 * 3)}
    update = Update(weights, 5, torch.zeros(3, dtype=torch.float64))
    assert count_tensor_bytes(update) == {Kind.WEIGHTS: 4 * theta + 8 * counters, Kind.SCALARS: 32}


@pytest.mark.parametrize(
    "answer",
    [
        Update({}, -1, torch.zeros(1, dtype=torch.float64)),
        Update({}, 1, torch.zeros(1)),
        Update({}, 1, torch.zeros(1, 1, dtype=torch.float64)),
    ],
    ids=["count", "dtype", "shape"],
)
def test_an_answer_that_makes_no_sense_is_noticed(answer):
    assert FIT.check is not None
    with pytest.raises(ValueError, match="an update needs"):
        FIT.check(Global({}), answer)
    FIT.check(Global({}), Update({}, 0, torch.zeros(2, dtype=torch.float64)))


def test_clients_train_the_model_that_they_got():
    problem = problem_of("fedavg", train={"epochs": 0})
    with InMemoryFederation(problem) as federation:
        start = model_of(problem, 5)

        async def play() -> Tensors:
            return (await problem.method.round(Global(start), federation.stage(0))).weights

        assert same(asyncio.run(play()), start)


def model_of(problem, seed: int) -> Tensors:
    torch.manual_seed(seed)
    network = problem.network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
    return read_tensors(network)
