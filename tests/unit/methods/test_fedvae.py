"""FedVAE: FedAvg on a classifying auto-encoder."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from fedrpc.errors import ConfigError
from fedrpc.models.dpms import Dpms
from fedrpc.models.state import load
from fedrpc.wire.message import Tensors
from tests.fakes import Build, problem_of, run_in_memory, tiny

BUILD: Build = lambda: Dpms((1, 28, 28), 10, latent=6)  # noqa: E731


def test_without_weight_it_is_fedavg_on_encoder_and_classifier():
    plain = run_in_memory(problem_of("fedavg", build=BUILD), 2).weights
    whole = run_in_memory(problem_of("fedvae", build=BUILD, params={"lam": 0.0}), 2).weights
    assert list(whole)[: len(plain)] == list(plain)
    assert all(torch.equal(whole[name], plain[name]) for name in plain)


def test_it_starts_where_fedavg_starts():
    plain, whole = (problem_of(name, build=BUILD) for name in ("fedavg", "fedvae"))
    first, second = plain.copy_network().state_dict(), whole.copy_network().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_all_parts_travel_and_are_averaged():
    problem = problem_of("fedvae", model="dpms", build=None)
    run = run_in_memory(problem, 1)
    values = 55_338 + 50_208 + 56_513  # encoder, mean and classifier; log-variance; decoder
    assert run.measured() == run.predicted()
    assert run.measured()["down"] == {"weights": 4 * 4 * values}
    assert run.measured()["up"]["weights"] == 4 * 4 * values
    before, after = run.states[0].weights, run.states[1].weights
    assert not [name for name in before if torch.equal(before[name], after[name])]


def test_the_averaged_parts_learn_to_reconstruct():
    train = {"optimizer": "adam", "lr": 0.003, "epochs": 8}
    problem = problem_of("fedvae", build=BUILD, normalise="unit", train=train)
    run = run_in_memory(problem, 3)
    x, model = problem.load_external_test().batch(np.arange(100))[0], problem.copy_network()

    def error(weights: Tensors) -> float:
        load(model, weights)
        with torch.no_grad():
            return float((model.decoder(model.features(x)) - x).square().mean())

    first, last = (error(run.problem.method.model(state)) for state in (run.states[0], run.state))
    assert last < 0.6 * first


@pytest.mark.parametrize("build", [tiny, lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10))])
def test_another_network_is_refused(build):
    with pytest.raises(ConfigError, match=r"fedvae needs a latent vector to decode, .* set --model dpms"):
        problem_of("fedvae", build=build)


def test_data_without_a_range_is_refused():
    problem = problem_of("fedvae", build=BUILD)
    with pytest.raises(ConfigError, match="fedvae decodes images"):
        problem.method.check(dataclasses.replace(problem.env, bounds=None))
