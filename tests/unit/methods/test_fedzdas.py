"""Fed-ZDAS: the same number of inputs from every client's model, pooled, and the mean trained on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedrpc.aggregation.mean import WeightedMean
from fedrpc.config import TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.methods.blocks.zero_shot import Inversion, start_inversion
from fedrpc.methods.fedavg import FIT, Global, Update
from fedrpc.methods.fedzdas import FedZdas
from fedrpc.methods.phases import on
from fedrpc.methods.runtime import ClientContext
from fedrpc.models.state import load, read_tensors
from fedrpc.seeds import derive
from fedrpc.training.loop import train
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.message import Tensors
from tests.fakes import CPU, problem_of, run_in_memory
from tests.unit.wire.messages import same

AT_ONCE: dict[str, Any] = {"t_start": 0, "samples_per_class": 2, "iterations": 3}


def test_a_round_is_the_papers_algorithm_3():
    sent: dict[int, Tensors] = {}

    class Watched(FedZdas):
        name = "watched"

        @on(FIT)
        def fit(self, ctx: ClientContext, msg: Global) -> Update:
            update = super().fit(ctx, msg)
            sent[ctx.client] = update.weights
            return update

    problem = problem_of(Watched, params=AT_ONCE | {"server_epochs": 2, "server_lr": 0.1, "server_batch_size": 7})
    played = run_in_memory(problem, 1)
    mean, xs, ys = WeightedMean(), [], []
    for client in range(4):
        mean.add(sent[client], 1.0)
        model = problem.copy_network()
        load(model, sent[client])
        batch = start_inversion(model, problem.env, problem.params, derive(7, "synthesis", "server", 0, client), CPU)
        batch.advance(3)
        synthetic = batch.finish()
        assert torch.bincount(synthetic.y).tolist() == [2] * 10
        xs.append(synthetic.x)
        ys.append(synthetic.y)
    model = problem.copy_network()
    load(model, mean.combine())
    config = TrainConfig(lr=0.1, epochs=2, batch_size=7)
    data, order = Examples.of(torch.cat(xs), torch.cat(ys)), derive(7, "order", "server", 0, 0)
    report = train(model, cross_entropy, data, config, lr=0.1, order=order, device=CPU)
    assert same(played.weights, read_tensors(model))
    [record] = played.records
    assert record["num_made"] == len(data) == 80
    assert record["server_loss"] == report.loss
    assert record["zda_real_fraction"] == 1  # what clients upload is of real data alone
    assert sorted(record["synthesis_loss"]) == [0, 1, 2, 3]


def test_the_server_trains_at_a_tenth_of_the_clients_rate_by_default():
    values = FedZdas.Params().model_dump()
    assert (values["server_epochs"], values["server_lr"], values["server_batch_size"]) == (1, 0.002, 10)


def test_zero_epochs_leave_the_mean_unchanged():
    idle, never = (
        run_in_memory(problem_of("fedzdas", params=AT_ONCE | changed), 1).weights
        for changed in ({"server_epochs": 0}, {"t_start": 9})
    )
    assert same(idle, never)


def test_the_inversion_of_a_model_does_not_depend_on_other_clients():
    def play_without(gone: set[int]) -> dict[str, Any]:
        problem = problem_of("fedzdas", params=AT_ONCE)
        return run_in_memory(problem, 1, absent=lambda index, phase, step, client: client in gone).records[0]

    whole, part = play_without(set()), play_without({1})
    assert sorted(part["synthesis_loss"]) == [0, 2, 3]
    assert part["num_made"] == 60
    assert all(whole["synthesis_loss"][client] == loss for client, loss in part["synthesis_loss"].items())


def test_a_model_that_cannot_be_inverted_gives_no_data():
    class Lying(FedZdas):
        name = "lying"

        @on(FIT)
        def fit(self, ctx: ClientContext, msg: Global) -> Update:
            update = super().fit(ctx, msg)
            if ctx.client == 2:
                [name] = [name for name in update.weights if name.endswith("running_var")]
                update.weights[name].fill_(-0.01)
            return update

    played = run_in_memory(problem_of(Lying, params=AT_ONCE), 1)
    [record] = played.records
    assert record["synthesis_loss"][2] is None
    assert record["num_made"] == 60
    assert all(np.isfinite(loss) for client, loss in record["synthesis_loss"].items() if client != 2)
    assert all(torch.isfinite(tensor).all() for tensor in played.weights.values())


@pytest.mark.parametrize("iterations", [1, 20, 41])
def test_an_inversion_has_the_configured_number_of_iterations(iterations, monkeypatch):
    steps: list[int] = []
    advance = Inversion.advance

    def count_iterations(self: Any, count: int, *rest: Any) -> None:
        steps.append(count)
        advance(self, count, *rest)

    monkeypatch.setattr(Inversion, "advance", count_iterations)
    params = AT_ONCE | {"iterations": iterations, "samples_per_class": 1}
    run_in_memory(problem_of("fedzdas", clients=1, params=params), 1)
    assert sum(steps) == iterations
    assert max(steps) <= 20
