"""Fed-ZDAC: FedAvg with a uniform mean, with synthetic data beside the real from some round on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from fedrpc.aggregation.mean import WeightedMean
from fedrpc.errors import AnswerRefused, ConfigError
from fedrpc.methods import fedzdac
from fedrpc.methods.blocks.zero_shot import Inversion, build_privacy_record
from fedrpc.methods.fedavg import FIT, FedAvg, Global, Update
from fedrpc.methods.fedzdac import FedZdac
from fedrpc.methods.fedzdas import FedZdas
from fedrpc.methods.phases import on
from fedrpc.methods.qffl import QFfl
from fedrpc.methods.runtime import ClientContext, Round
from fedrpc.models.state import count_payload_bytes, read_tensors
from fedrpc.problem import Problem
from fedrpc.wire.message import Tensors
from tests.fakes import Played, mlp, problem_of, run_in_memory
from tests.unit.wire.messages import same

FEW: dict[str, Any] = {"samples_per_class": 2, "iterations": 3}
NEVER = FEW | {"t_start": 1000}
SOON = FEW | {"t_start": 1}


class Uniform(FedAvg):
    """FedAvg, each client alike."""

    name = "uniform"
    needs_each_update = "a test"

    async def round(self, state: Global, rnd: Round) -> Global:
        mean = WeightedMean()
        async for reply in rnd.ask(FIT, state):
            mean.add(reply.body.weights, 1.0)
        return Global(mean.combine())


@pytest.fixture(scope="module")
def played() -> Played:
    return run_in_memory(problem_of("fedzdac", fraction=0.5, params=SOON), 3)


@pytest.mark.parametrize("method", ["fedzdac", "fedzdas"])
def test_without_synthetic_data_it_is_fedavg_with_a_uniform_mean_bit_for_bit(method):
    ours = run_in_memory(problem_of(method, fraction=0.75, params=NEVER), 3)
    plain = run_in_memory(problem_of(Uniform, fraction=0.75), 3)
    assert all(map(same, ours.states, plain.states))
    assert ours.sha256 != run_in_memory(problem_of("fedavg", fraction=0.75), 3).sha256  # clients differ in size


@pytest.mark.parametrize("method", ["fedzdac", "fedzdas"])
def test_data_is_synthesised_from_t_start_on(method):
    ours, plain = (run_in_memory(problem_of(m, params=p), 3) for m, p in ((method, SOON), (Uniform, {})))
    assert [same(a, b) for a, b in zip(ours.states, plain.states, strict=True)] == [True, True, False, False]


@pytest.mark.parametrize("method", ["fedzdac", "fedzdas"])
def test_bytes_are_exactly_fedavgs(method):
    ours, fedavg = (
        run_in_memory(problem_of(m, fraction=0.5, params=p), 3) for m, p in ((method, SOON), ("fedavg", {}))
    )
    assert ours.measured() == ours.predicted() == fedavg.measured()
    assert ours.measured()["up"]["weights"] == 3 * 2 * count_payload_bytes(ours.weights)


def test_clients_train_on_their_own_and_on_synthetic_data():
    problem = problem_of("fedzdac", params=SOON, train={"epochs": 1})
    seen: dict[tuple[int, int], int] = {}

    class Watched(FedZdac):
        name = "watched"

        @on(FIT)
        def fit(self, ctx: ClientContext, msg: Global) -> Update:
            update = super().fit(ctx, msg)
            seen[ctx.round, ctx.client] = update.num_examples
            return update

    run_in_memory(problem_of(Watched, params=SOON), 2)
    real = problem.env.num_examples()
    assert seen == {(index, client): real[client] + 20 * index for index in range(2) for client in range(4)}


def test_every_client_inverts_the_received_model(monkeypatch):
    inversions: list[tuple[Tensors, Tensor]] = []
    start = fedzdac.start_inversion

    def watch(model: nn.Module, *rest: Any) -> Inversion:
        batch = start(model, *rest)
        inversions.append((read_tensors(model), batch.finish().x))
        return batch

    monkeypatch.setattr(fedzdac, "start_inversion", watch)
    played = run_in_memory(problem_of("fedzdac", params=SOON), 2)
    assert len(inversions) == 4
    assert all(same(model, played.states[1].weights) for model, _ in inversions)
    assert len({x.numpy().tobytes() for _, x in inversions}) == 4


def test_records_have_the_real_fraction_and_no_claim(played):
    real = played.problem.env.num_examples()
    for index, (cohort, record) in enumerate(zip(played.cohorts, played.records, strict=True)):
        fractions = [real[client] / (real[client] + (20 if index else 0)) for client in cohort]
        assert record["zda_real_fraction"] == max(fractions)
        assert record["formal_dp"] == "none"
        assert record["formal_dp_reason"]
        assert not any("epsilon" in name for name in record)


def test_the_summary_has_the_real_fraction_and_no_guarantee(played):
    reported = played.reported()
    assert reported["zda_real_fraction"]["value"] == played.records[-1]["zda_real_fraction"] < 1
    assert reported["formal_dp"]["value"] == "none"
    assert "does not protect a record" in reported["formal_dp"]["why"]


def test_nothing_but_weights_and_scalars_leaves_a_client(played):
    assert FedZdac.shares == FedZdas.shares == ""
    assert set(played.measured()["up"]) == {"weights", "scalars"}


def remove_data(problem: Problem, poor: int) -> Problem:
    """The same problem, but one client has nothing."""
    split, nothing = problem.split_client_indices, np.empty(0, dtype=np.int64)
    problem.split_client_indices = lambda client: (nothing, nothing) if client == poor else split(client)
    return problem


def test_a_client_without_data_does_not_count_before_t_start():
    poor = run_in_memory(remove_data(problem_of("fedzdac", params=NEVER), 2), 1)
    gone = run_in_memory(problem_of("fedzdac", params=NEVER), 1, absent=lambda i, p, s, client: client == 2)
    assert same(poor.state, gone.state)


def test_a_client_without_data_trains_on_synthetic_data():
    problem = remove_data(problem_of("fedzdac", params=SOON), 2)
    with_made, fewer = (
        run_in_memory(problem, 2),
        run_in_memory(
            remove_data(problem_of("fedzdac", params=SOON), 2), 2, absent=lambda i, p, s, client: (i, client) == (1, 2)
        ),
    )
    assert with_made.records[1]["local_losses"][2] != [0.0]
    assert with_made.sha256 != fewer.sha256
    assert build_privacy_record(problem.env, {2: 20})["zda_real_fraction"] == 0


@pytest.mark.parametrize("method", ["fedzdac", "fedzdas"])
def test_networks_without_batchnorm_are_refused(method):
    with pytest.raises(ConfigError, match=rf"{method} synthesises data from the statistics of BatchNorm layers"):
        problem_of(method, build=mlp)


@pytest.mark.parametrize("method", [FedZdac, FedZdas])
def test_dp_sgd_is_refused_with_the_reason(method):
    assert not method.dp_sgd.is_allowed
    assert method.dp_sgd.reason.startswith("DP-SGD needs a network without BatchNorm")


@pytest.mark.parametrize("method", [FedZdac, FedZdas])
def test_updates_without_batchnorms_buffers_are_refused(method):
    class Bare(method):  # type: ignore[misc, valid-type]
        name = "bare"

        @on(FIT)
        def fit(self, ctx: ClientContext, msg: Global) -> Update:
            update = super().fit(ctx, msg)
            kept = {name: value for name, value in update.weights.items() if "running" not in name}
            return Update(kept, update.num_examples, update.losses)

    with pytest.raises(AnswerRefused, match=r"0 of 4 clients answered.*running_mean': expected .*float32.*, got None"):
        run_in_memory(problem_of(Bare, params=NEVER), 1)


# Combinations that the paper leaves to future work need no more than a name.


class Both(FedZdas, FedZdac):
    """SyntheticBatch data on both sides, in the same round."""

    name = "both"


class Fair(QFfl, FedZdac):
    """q-FFL's aggregation of clients that make data."""

    name = "fair"

    class Params(QFfl.Params, FedZdac.Params):  # type: ignore[name-defined, misc]
        """Of both."""


def test_both_sides_synthesise_data_in_one_round():
    played, server = (run_in_memory(problem_of(m, params=SOON), 2) for m in (Both, "fedzdas"))
    real = played.problem.env.num_examples()
    assert played.records[1]["zda_real_fraction"] == max(n / (n + 20) for n in real)
    assert played.records[1]["num_made"] == 80
    assert played.sha256 != server.sha256
    assert played.measured() == played.predicted()


def test_another_aggregation_takes_the_same_clients():
    played, plain = (run_in_memory(problem_of(m, params=p), 2) for m, p in ((Fair, SOON), ("qffl", {})))
    assert [same(a, b) for a, b in zip(played.states, plain.states, strict=True)] == [True, True, False]
    assert played.measured() == played.predicted() == plain.measured()
