"""FedAvg against reference results: means of models, one central step, and which clients count."""

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


def are_equal(one: Tensors, two: Tensors) -> bool:
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


def average_answers(weights_of: dict[int, tuple[Tensors, int]]) -> Tensors:
    """The server half's next model from these answers."""

    async def reply(phase, message, check, **_):
        assert phase is FIT
        for client, (weights, count) in weights_of.items():
            update = Update(weights, count, torch.zeros(1, dtype=torch.float64))
            check(message, update)
            yield Reply(client, update)

    with InMemoryFederation(problem_of("fedavg")) as federation:
        rnd = federation.stage(0)
        rnd._ask = reply
        return asyncio.run(FedAvg().round(Global({}), rnd)).weights


def make_weights(seed: int) -> Tensors:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    network[1].num_batches_tracked += seed
    return read_tensors(network)


# Means


def test_identical_client_models_are_unchanged():
    assert are_equal(
        average_answers({0: (make_weights(1), 5), 1: (make_weights(1), 17), 2: (make_weights(1), 1)}), make_weights(1)
    )


def test_the_mean_of_one_client_is_its_model():
    assert are_equal(average_answers({3: (make_weights(2), 9)}), make_weights(2))


@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.3"])
def test_a_full_batch_step_is_a_central_step_on_the_pooled_data(partition):
    problem = problem_of("fedavg", build=mlp, partition=partition, **FULL)
    got = run_in_memory(problem, 1).weights
    central = problem.copy_network()
    parts = [problem.load_client_data(client).train.all() for client in range(4)]
    assert len({len(y) for _, y in parts}) > 1 or partition == "iid"
    cross_entropy(central, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).backward()
    torch.optim.SGD(central.parameters(), lr=0.5).step()
    for name, wanted in read_tensors(central).items():
        scale = float(wanted.abs().max())
        assert torch.allclose(got[name], wanted, rtol=1e-6, atol=scale * 1e-6), name
    moved = max(float((got[name] - start).abs().max()) for name, start in read_tensors(problem.copy_network()).items())
    assert moved > 1e-3, "the model moved"


def test_only_the_sampled_clients_count():
    problem = problem_of("fedavg", build=mlp, fraction=0.5, **FULL)
    played = run_in_memory(problem, 1)
    [cohort] = played.cohorts
    assert len(cohort) == 2
    central = problem.copy_network()
    parts = [problem.load_client_data(client).train.all() for client in cohort]
    cross_entropy(central, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).backward()
    torch.optim.SGD(central.parameters(), lr=0.5).step()
    for name, wanted in read_tensors(central).items():
        assert torch.allclose(played.weights[name], wanted, rtol=1e-6, atol=float(wanted.abs().max()) * 1e-6), name


def test_the_order_of_clients_does_not_matter():
    models = {client: (make_weights(client), client + 1) for client in range(4)}
    wanted = average_answers(models)
    for order in itertools.permutations(models):
        got = average_answers({client: models[client] for client in order})
        assert all(torch.allclose(got[name].double(), wanted[name].double(), rtol=1e-7) for name in wanted)


def test_every_coordinate_lies_within_the_clients_range():
    models = {client: (make_weights(client), 10**client) for client in range(4)}
    got = average_answers(models)
    for name, value in got.items():
        stacked = torch.stack([weights[name] for weights, _ in models.values()])
        low, high = stacked.min(0).values, stacked.max(0).values
        if value.is_floating_point():
            low, high = torch.nextafter(low, torch.tensor(-torch.inf)), torch.nextafter(high, torch.tensor(torch.inf))
        assert bool(((low <= value) & (value <= high)).all()), name


def test_batchnorm_statistics_are_averaged_and_its_counter_is_the_largest():
    got = average_answers({0: (make_weights(2), 1), 1: (make_weights(5), 3)})
    assert got["1.num_batches_tracked"].item() == 5
    wanted = (make_weights(2)["0.weight"].double() + 3 * make_weights(5)["0.weight"].double()) / 4
    assert torch.equal(got["0.weight"], wanted.float())


def test_a_client_without_data_changes_nothing():
    assert are_equal(average_answers({0: (make_weights(1), 4), 1: (make_weights(9), 0)}), make_weights(1))
    with pytest.raises(QuorumError):
        average_answers({0: (make_weights(1), 0)})


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


def test_the_model_depends_on_the_seed(played):
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
    central = problem.copy_network()
    parts = [problem.load_client_data(client).train.all() for client in (0, 1, 3)]
    cross_entropy(central, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).backward()
    torch.optim.SGD(central.parameters(), lr=0.5).step()
    for name, wanted in read_tensors(central).items():
        assert torch.allclose(got[name], wanted, rtol=1e-6, atol=float(wanted.abs().max()) * 1e-6), name


def test_too_few_answers_end_the_run():
    with pytest.raises(QuorumError, match="1 of 4 clients answered"):
        run_in_memory(problem_of("fedavg"), 1, absent=lambda index, phase, step, client: client > 0)


def test_there_is_no_setup_and_no_finalize():
    assert not FedAvg.overrides("setup")
    assert not FedAvg.overrides("finalize")


def test_the_cost_is_the_papers_formula():
    problem = problem_of("fedavg", train={"epochs": 3})
    weights = read_tensors(problem.copy_network())
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
def test_an_invalid_answer_is_refused(answer):
    assert FIT.check is not None
    with pytest.raises(ValueError, match="an update needs"):
        FIT.check(Global({}), answer)
    FIT.check(Global({}), Update({}, 0, torch.zeros(2, dtype=torch.float64)))


def test_clients_train_the_model_that_they_received():
    problem = problem_of("fedavg", train={"epochs": 0})
    with InMemoryFederation(problem) as federation:
        start = build_weights(problem, 5)

        async def play() -> Tensors:
            return (await problem.method.round(Global(start), federation.stage(0))).weights

        assert are_equal(asyncio.run(play()), start)


def build_weights(problem, seed: int) -> Tensors:
    torch.manual_seed(seed)
    network = problem.copy_network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
    return read_tensors(network)
