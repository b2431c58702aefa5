"""A method that is not whole is told at the start, not in a traceback at the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedrpc.aggregation.aggregator import AGGREGATORS
from fedrpc.aggregation.mean import Mean
from fedrpc.errors import ConfigError
from fedrpc.methods.fedavg import FedAvg
from fedrpc.methods.method import Method
from tests.fakes import problem_of


def test_a_method_that_lacks_something_is_refused() -> None:
    class Half(Method[object]):
        name = "half"
        init, model = FedAvg.init, FedAvg.model

    with pytest.raises(ConfigError, match="method 'half' is incomplete: Half lacks round, cost"):
        problem_of(Half)


@pytest.mark.parametrize("privacy", [{}, {"dp_sgd": {"noise_multiplier": 0.0}}], ids=["no noise", "noise of 0"])
def test_a_budget_that_limits_nothing_is_refused(privacy: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"--epsilon-budget 8 limits nothing: .* got fedavg without noise; add --dp-sgd"
    ):
        problem_of("fedavg", privacy={"epsilon_budget": 8.0} | privacy)


@pytest.mark.parametrize("dp_sgd", [{"noise_multiplier": 1.0}, {"target_epsilon": 3.0}])
def test_a_budget_that_private_training_spends_is_accepted(dp_sgd: dict[str, Any]) -> None:
    assert problem_of("fedavg", privacy={"epsilon_budget": 8.0, "dp_sgd": dp_sgd}).expects_cost


def test_a_budget_is_accepted_if_the_method_or_an_aggregator_releases_with_noise() -> None:
    means: dict[str, Any] = {"build": None, "model": "dpms", "privacy": {"epsilon_budget": 8.0}}
    private = {"mode": "private", "m": 2, "preliminary": 1}
    assert problem_of("feddpms", params=private, **means).expects_cost
    for silent in ({"mode": "paper"}, private | {"sigma": 0.0}, private | {"alpha": 0}):
        with pytest.raises(ConfigError, match="limits nothing"):
            problem_of("feddpms", params=silent, **means)

    class Noisy(Mean):
        name = "noisy"
        releases_updates = True

    AGGREGATORS.register(Noisy.name)(Noisy)
    try:
        assert problem_of("fedavg", aggregators=["noisy"], privacy={"epsilon_budget": 8.0}).expects_cost
    finally:
        AGGREGATORS._items.pop(Noisy.name)


def test_a_method_that_needs_a_network_gets_it_when_none_is_named() -> None:
    params = {"preliminary": 1, "m": 2}
    assert problem_of("feddpms", build=None, params=params).config.model == "dpms"
    assert problem_of("fedvae", build=None).config.model == "dpms"
    assert problem_of("fedavg", build=None).config.model == "zda-mnist"
    with pytest.raises(ConfigError, match="set --model dpms"):
        problem_of("fedvae", build=None, model="zda-mnist")


def test_the_oracle_depends_on_the_run_alone() -> None:
    """Its dropout is not drawn from what the caller happens to have left of torch's stream."""
    problem = problem_of("fedavg", build=None, model="cnn-dropout", train_size=100, train={"epochs": 1})
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.random.get_rng_state()
        found.append(problem.train_oracle(1, torch.device("cpu")).state_dict())
        assert torch.equal(torch.random.get_rng_state(), expected), "the caller's stream goes on as it was"
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_is_held_out_takes_the_place_of_the_test_set_and_nobody_trains_on_it() -> None:
    problem, plain = problem_of("fedavg", validation=0.1), problem_of("fedavg")
    assert problem.dataset.train.y is not None
    held, test = problem._validation, problem.load_external_test()
    assert held is not None
    assert len(test) == len(held) == 600
    assert test.y.tolist() == problem.dataset.train.y[held].tolist()
    x, y = test.batch(np.arange(20))
    assert torch.equal(x, problem._read_inputs(problem.dataset.train.x[held[:20]]))
    assert y.tolist() == problem.dataset.train.y[held[:20]].tolist()
    trained = np.concatenate(problem.partition.indices)
    assert len(trained) == 60
    assert not np.intersect1d(trained, held).size
    assert len(problem.load_held_out()) == len(problem.dataset.train.y) - 60 - 600
    assert len(plain.load_external_test()) == len(plain.dataset.test)
    assert problem.config.hash != plain.config.hash


def test_a_train_size_that_validation_leaves_no_room_for_is_told() -> None:
    with pytest.raises(
        ConfigError, match=r"expected 1 to 600 samples, got 601 \(validation holds 5400 of 6000 training examples out\)"
    ):
        _ = problem_of("fedavg", validation=0.9, train_size=601).partition
