"""Server optimizers against a reference of their own, in float64, and together with methods."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from fedrpc import config as configuration
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.wire import stored
from tests.fakes import InMemoryFederation, Played, mlp, problem_of, run_in_memory

LR, BETA1, BETA2, TAU, MOMENTUM = 0.3, 0.8, 0.95, 0.01, 0.7
ADAPTIVE = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "tau": TAU}
OPTIMIZERS = ["sgdm", "adam", "yogi", "adagrad"]


def options(optimizer: str, **params: float) -> dict:
    values = {"lr": LR, "momentum": MOMENTUM} if optimizer == "sgdm" else ADAPTIVE
    return {"server_optimizer": optimizer, "aggregation": {optimizer: values | params}}


def reference(optimizer: str, deltas: list[np.ndarray]) -> np.ndarray:
    """Where the optimizer is after these mean updates, from 0: Algorithm 2 of Reddi et al. (2021), and FedAvgM."""
    x, m, v = np.zeros_like(deltas[0]), np.zeros_like(deltas[0]), np.full_like(deltas[0], TAU**2)
    for delta in deltas:
        if optimizer == "sgdm":
            m = MOMENTUM * m + delta
            x = x + LR * m
            continue
        m = BETA1 * m + (1 - BETA1) * delta
        square = delta**2
        if optimizer == "adagrad":
            v = v + square
        elif optimizer == "yogi":
            v = v - (1 - BETA2) * square * np.sign(v - square)
        else:
            v = BETA2 * v + (1 - BETA2) * square
        x = x + LR * m / (np.sqrt(v) + TAU)
    return x


def step_by_step(optimizer: str, deltas: list[np.ndarray]) -> np.ndarray:
    """The same by the aggregator."""
    problem = problem_of("fedavg", build=mlp, **options(optimizer))
    layer = problem.aggregators[-1]
    x, m, v = torch.zeros(len(deltas[0]), dtype=torch.float64), torch.zeros(len(deltas[0]), dtype=torch.float64), None
    for delta in deltas:
        move, m, v = layer.step(torch.from_numpy(delta), m, v)
        x = x + move
    return x.numpy()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_equal_the_papers_algorithm(optimizer):
    rng = np.random.default_rng(3)
    deltas = [rng.normal(size=7) * scale for scale in (1e-3, 1.0, 0.1, 10.0)]
    np.testing.assert_allclose(step_by_step(optimizer, deltas), reference(optimizer, deltas), rtol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_equals_the_reference_on_the_means_that_it_saw(optimizer):
    """Two rounds of FedAvg: the clients' mean of each round, by a plain run that starts where this one was."""
    run = run_in_memory(problem_of("fedavg", build=mlp, **options(optimizer)), 2)
    plain = problem_of("fedavg", build=mlp)
    deltas: dict[str, list[np.ndarray]] = {}
    for index, state in enumerate(run.states[:2]):
        with InMemoryFederation(plain) as federation:
            mean = asyncio.run(federation.problem.method.round(state, federation.stage(index))).weights
        for name, start in state.weights.items():
            deltas.setdefault(name, []).append((mean[name].double() - start.double()).numpy())
    for name, final in run.weights.items():
        moved = final.double().numpy() - run.states[0].weights[name].double().numpy()
        np.testing.assert_allclose(moved, reference(optimizer, deltas[name]), rtol=1e-3, atol=1e-6)


def test_momentum_0_and_rate_1_is_fedavg_bit_for_bit():
    plain = run_in_memory(problem_of("fedavg"), 3)
    same = run_in_memory(problem_of("fedavg", **options("sgdm", lr=1.0, momentum=0.0)), 3)
    assert same.sha256 == plain.sha256


def test_batchnorm_statistics_are_the_clients_mean():
    """After one round from the same start: everybody's statistics are averaged, whatever the optimizer."""
    plain, adam = (run_in_memory(problem_of("fedavg", **more), 1) for more in ({}, options("adam")))
    buffers = [name for name, _ in plain.problem.copy_network().named_buffers()]
    assert buffers
    assert all(torch.equal(plain.weights[name], adam.weights[name]) for name in buffers)
    assert not torch.equal(plain.weights["classifier.weight"], adam.weights["classifier.weight"])


@pytest.mark.parametrize("method", ["flea", "fedprox", "moon", "fedzdas", "fedgen"])
def test_it_composes_with_averaging_methods(method):
    plain, adam = (run_in_memory(problem_of(method, **more), 2) for more in ({}, options("adam")))
    assert adam.sha256 != plain.sha256
    assert adam.measured() == plain.measured() == adam.predicted()


def test_resuming_from_checkpoints_gives_the_same_model():
    def checkpointed(state):
        return stored.loads(type(state), stored.dumps(state))

    problem = problem_of("flea", **options("yogi"))
    assert run_in_memory(problem, 3, between=checkpointed).sha256 == run_in_memory(problem, 3).sha256


def test_losing_the_moments_would_change_the_model():
    problem = problem_of("fedavg", **options("adam"))

    class Forgetful(InMemoryFederation):
        def stage(self, index):
            self.aggregation = {layer.name: layer.init(problem.env) for layer in problem.aggregators}
            return super().stage(index)

    async def play() -> Played:
        with Forgetful(problem) as federation:
            return await federation.play(2)

    assert asyncio.run(play()).sha256 != run_in_memory(problem, 2).sha256


def test_a_method_with_a_rule_of_its_own_refuses_it():
    with pytest.raises(ConfigError, match=r"qffl does not use the run's aggregators .* got mean, adam; leave them out"):
        problem_of("qffl", server_optimizer="adam")


def test_both_spellings_are_the_same_run():
    listed, named = ({"aggregators": ["mean", "adam"]}, {"server_optimizer": "adam"})
    assert configuration.build(listed).hash == configuration.build(named).hash
    assert configuration.build({"aggregators": "mean, adam"}).hash == configuration.build(named).hash


def test_unknown_parameters_and_layers_are_named():
    with pytest.raises(UnknownName, match=r"unknown parameter of adam 'aggregation.adam.beta3'.*aggregation.adam.beta"):
        configuration.build({"server_optimizer": "adam", "aggregation": {"adam": {"beta3": 1}}})
    with pytest.raises(ConfigError, match=r"aggregation.adam sets parameters of a layer that this run does not have"):
        configuration.build({"aggregation": {"adam": {"lr": 1}}})
    with pytest.raises(UnknownName, match=r"unknown aggregator 'meen'.*Did you mean 'mean'"):
        configuration.build({"aggregators": ["meen"]})
    with pytest.raises(ConfigError, match="each layer of aggregation can stand once, got mean, mean"):
        configuration.build({"aggregators": ["mean", "mean"]})
    with pytest.raises(ConfigError, match="expected one aggregator that combines updates, such as 'mean', got none"):
        problem_of("fedavg", aggregators=["adam"])
