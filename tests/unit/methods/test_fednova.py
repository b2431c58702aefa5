"""FedNova against a float64 reference of its algorithm, and where it is FedAvg."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedrpc.errors import ConfigError
from fedrpc.methods.fednova import FIT, NormalisedUpdate, count_effective_steps
from fedrpc.problem import Problem
from fedrpc.wire import stored
from tests.fakes import mlp, problem_of, run_in_memory, tiny
from tests.unit.methods import reference as ref
from tests.unit.methods.test_fedzdac import remove_data
from tests.unit.wire.messages import same


def sum_of_coefficients(num_steps: int, momentum: float) -> float:
    """How often the gradients of all steps enter the local change, counted step by step."""
    total = velocity = 0.0
    for _ in range(num_steps):
        velocity = momentum * velocity + 1
        total += velocity
    return total


def reference_run(problem: Problem, cohorts: list[list[int]]) -> list[tuple[ref.Arrays, float]]:
    """Model and tau_eff of each round, by the paper's algorithm."""
    x, after = ref.as_arrays(dict(problem.copy_network().state_dict())), []
    for index, cohort in enumerate(cohorts):
        counts = [len(problem.load_client_data(client).train) for client in cohort]
        trained = [ref.train(problem, client, index, x) for client in cohort]
        p = [count / sum(counts) for count in counts]
        a = [sum_of_coefficients(steps, problem.config.train.momentum) for _, steps in trained]
        tau = sum(p_i * a_i for p_i, a_i in zip(p, a, strict=True))
        d = [ref.combine((1 / a_i, x), (-1 / a_i, y)) for (y, _), a_i in zip(trained, a, strict=True)]
        x = ref.combine((1, x), *((-tau * p_i, d_i) for p_i, d_i in zip(p, d, strict=True)))
        after.append((x, tau))
    return after


@pytest.mark.parametrize(
    "train", [{}, {"momentum": 0.9}, {"momentum": 0.5, "weight_decay": 0.01, "epochs": 5, "lr": 0.02}]
)
def test_three_rounds_are_the_papers(train: dict[str, Any]) -> None:
    problem = problem_of("fednova", build=mlp, **ref.uneven(**train))
    run = run_in_memory(problem, 3)
    plain = run_in_memory(problem_of("fedavg", build=mlp, **ref.uneven(**train)), 3)
    wanted = reference_run(problem, run.cohorts)
    for state, other, record, (x, tau) in zip(run.states[1:], plain.states[1:], run.records, wanted, strict=True):
        assert ref.distance(state.weights, x) < 5e-6
        assert ref.distance(other.weights, x) > 1e-3, "clients differ in steps, so FedAvg is something else"
        assert record["effective_steps"] == pytest.approx(tau, rel=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 7, 1000])
def test_effective_steps_are_the_sum_of_coefficients(num_steps, momentum):
    wanted = sum_of_coefficients(num_steps, momentum)
    assert count_effective_steps(num_steps, momentum) == pytest.approx(wanted, rel=1e-9)


# Where it is FedAvg


@pytest.mark.parametrize("build", [mlp, tiny])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_equal_steps_it_is_fedavg(build, momentum):
    options = {"build": build, "partition": "iid", "train": {"epochs": 3, "batch_size": 8, "momentum": momentum}}
    ours, fedavg = (run_in_memory(problem_of(m, **options), 2) for m in ("fednova", "fedavg"))
    for name, wanted in fedavg.weights.items():
        assert torch.allclose(ours.weights[name], wanted, rtol=1e-4, atol=1e-6), name


def test_with_one_step_it_is_fedavg_bit_for_bit():
    options = {"fraction": 0.75, "train": {"epochs": 1, "batch_size": 1000}}
    ours, fedavg = (run_in_memory(problem_of(m, **options), 3) for m in ("fednova", "fedavg"))
    assert all(map(same, ours.states, fedavg.states))


def test_buffers_are_fedavgs():
    ours, fedavg = (run_in_memory(problem_of(m, **ref.uneven()), 1) for m in ("fednova", "fedavg"))
    learned = {name for name, _ in ours.problem.copy_network().named_parameters()}
    buffers = set(ours.weights) - learned
    assert buffers
    assert all(torch.equal(ours.weights[name], fedavg.weights[name]) for name in buffers)
    assert any(not torch.equal(ours.weights[name], fedavg.weights[name]) for name in learned)


# Who trains, and what travels


def test_bytes_are_fedavgs_and_a_scalar():
    ours, fedavg = (run_in_memory(problem_of(m, fraction=0.5, train={"epochs": 2}), 3) for m in ("fednova", "fedavg"))
    wanted = fedavg.measured()
    wanted["up"]["scalars"] += 3 * 2 * 8
    assert ours.measured() == ours.predicted() == wanted


def test_a_client_without_examples_has_no_say():
    poor = run_in_memory(remove_data(problem_of("fednova"), 2), 2)
    gone = run_in_memory(problem_of("fednova"), 2, absent=lambda i, p, s, client: client == 2)
    assert same(poor.state, gone.state)


def test_no_epochs_change_nothing():
    run = run_in_memory(problem_of("fednova", train={"epochs": 0}), 2)
    assert same(run.state, run.states[0])
    assert run.records[0]["effective_steps"] == 0


@pytest.mark.parametrize("steps", [-1.0, math.nan, math.inf])
def test_effective_steps_that_make_no_sense_are_refused(steps):
    assert FIT.check is not None
    losses = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="effective steps should be"):
        FIT.check(None, NormalisedUpdate({}, 1, losses, steps))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an update needs"):
        FIT.check(None, NormalisedUpdate({}, -1, losses, 1.0))  # type: ignore[arg-type]


# With other parts of a run


def test_adam_at_the_server_steps_along_the_mean_normalised_update():
    adam = {"lr": 0.02, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    plain, run = (
        run_in_memory(problem_of("fednova", build=mlp, **more), 1)
        for more in ({}, {"server_optimizer": "adam", "aggregation": {"adam": adam}})
    )
    start, after = (ref.as_arrays(state.weights) for state in plain.states)
    tau = plain.records[0]["effective_steps"]
    for name, x in start.items():
        delta = (after[name] - x) / tau
        v = adam["beta2"] * adam["tau"] ** 2 + (1 - adam["beta2"]) * delta**2
        step = adam["lr"] * (1 - adam["beta1"]) * delta / (np.sqrt(v) + adam["tau"])
        assert np.allclose(run.weights[name].numpy(), x + tau * step, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("server_optimizer", ["none", "adam"])
def test_it_goes_on_from_checkpoints(server_optimizer):
    problem = problem_of("fednova", server_optimizer=server_optimizer, fraction=0.75)
    again = run_in_memory(problem, 3, between=lambda state: stored.loads(type(state), stored.dumps(state)))
    assert same(again.state, run_in_memory(problem, 3).state)


def test_private_training_covers_all_that_leaves():
    problem = problem_of("fednova", build=mlp, rounds=2, privacy={"dp_sgd": {"noise_multiplier": 1.0}})
    run = run_in_memory(problem, 2)
    assert run.privacy()["epsilon"] > 0
    assert run.records[0]["effective_steps"] > 1


def test_it_learns():
    problem = problem_of("fednova", train_size=400, partition="dirichlet:0.3", train={"epochs": 2, "lr": 0.1})
    before, after = (run_in_memory(problem, rounds).evaluate() for rounds in (0, 6))
    assert after.accuracy > before.accuracy + 10


def test_adam_on_clients_is_refused():
    with pytest.raises(ConfigError, match=r"SGD with or without momentum, got adam; set train\.optimizer=sgd"):
        problem_of("fednova", train={"optimizer": "adam"})
