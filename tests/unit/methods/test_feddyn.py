"""FedDyn against a float64 reference of its algorithm, and what clients' gradients survive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedrpc.client.store import Transaction
from fedrpc.errors import ConfigError
from fedrpc.methods.feddyn import Gradient, State
from fedrpc.problem import Problem
from fedrpc.wire import stored
from tests.fakes import InMemoryFederation, mlp, problem_of, run_in_memory
from tests.unit.methods import reference as ref
from tests.unit.methods.test_fedzdac import remove_data
from tests.unit.wire.messages import same


def reference_run(
    problem: Problem, cohorts: list[list[int]], alpha: float = 0.01
) -> list[tuple[ref.Arrays, ref.Arrays]]:
    """Model and server h after each round, by the paper's algorithm."""
    theta = ref.as_arrays(dict(problem.copy_network().state_dict()))
    h, own = ref.zeros(theta), {client: ref.zeros(theta) for client in range(problem.config.clients)}
    after = []
    for index, cohort in enumerate(cohorts):
        models = []
        for client in cohort:

            def correction(w: ref.Arrays, start: ref.Arrays = theta, client: int = client) -> ref.Arrays:
                return ref.combine((-1, own[client]), (alpha, w), (-alpha, start))

            model, _ = ref.train(problem, client, index, theta, correction)
            own[client] = ref.combine((1, own[client]), (-alpha, model), (alpha, theta))
            models.append(model)
        moves = [ref.combine((1, model), (-1, theta)) for model in models]
        h = ref.combine((1, h), *((-alpha / problem.config.clients, move) for move in moves))
        theta = ref.combine((1, ref.mean(models)), (-1 / alpha, h))
        after.append((theta, h))
    return after


@pytest.mark.parametrize(
    ("params", "train"),
    [({}, {}), ({"alpha": 0.5}, {}), ({"alpha": 0.1}, {"momentum": 0.9, "weight_decay": 0.01, "lr": 0.02})],
)
def test_three_rounds_are_the_papers(params: dict[str, Any], train: dict[str, Any]) -> None:
    problem = problem_of("feddyn", build=mlp, params=params, **ref.uneven(**train))
    run = run_in_memory(problem, 3)
    assert len({*run.cohorts[0]} & {*run.cohorts[1]}) > 0, "somebody takes part twice"
    for state, (theta, h) in zip(run.states[1:], reference_run(problem, run.cohorts, **params), strict=True):
        assert ref.distance(state.weights, theta) < 1e-5
        assert ref.distance(state.h, h) < 2e-5


def test_the_regulariser_matters():
    weak, strong = (
        run_in_memory(problem_of("feddyn", build=mlp, params={"alpha": a}, **ref.uneven()), 2) for a in (0.01, 1.0)
    )
    assert ref.distance(weak.weights, ref.as_arrays(strong.weights)) > 1e-3


def test_the_servers_h_is_the_mean_of_all_clients():
    with InMemoryFederation(problem_of("feddyn", fraction=0.5)) as federation:
        played = asyncio.run(federation.play(4))
        kept = [Transaction(federation.clients.store(client)).get("gradient", Gradient) for client in range(4)]
    for name, h in played.state.h.items():
        own = [k.h[name] if k else torch.zeros_like(h) for k in kept]
        assert torch.allclose(torch.stack(own).mean(0), h, rtol=1e-4, atol=1e-7)


def test_with_every_client_and_one_step_a_round_moves_twice_as_far_as_the_uniform_mean():
    """h starts at 0, and after the first round the model is the mean and the mean move once more."""
    run = run_in_memory(problem_of("feddyn", build=mlp, train={"epochs": 1, "batch_size": 1000}), 1)
    start = ref.as_arrays(run.states[0].weights)
    gradients = [ref.gradient(start, *ref.examples(run.problem, client)) for client in range(4)]
    wanted = ref.combine((1, start), (-2 * 0.05, ref.mean(gradients)))
    assert ref.distance(run.weights, wanted) < 1e-6


# Who trains, and what travels


def test_bytes_are_fedavgs():
    ours, fedavg = (run_in_memory(problem_of(m, fraction=0.5, train={"epochs": 2}), 3) for m in ("feddyn", "fedavg"))
    assert ours.measured() == ours.predicted() == fedavg.measured()


def test_h_is_of_trainable_parameters_and_buffers_are_averaged():
    run = run_in_memory(problem_of("feddyn"), 1)
    assert set(run.state.h) == {name for name, _ in run.problem.copy_network().named_parameters()} < set(run.weights)
    assert all(int(value) > 0 for name, value in run.weights.items() if name.endswith("num_batches_tracked"))


def test_a_client_without_examples_has_no_say_and_no_change():
    with InMemoryFederation(remove_data(problem_of("feddyn"), 2)) as federation:
        poor = asyncio.run(federation.play(2))
        kept = Transaction(federation.clients.store(2)).get("gradient", Gradient)
    assert kept is not None
    assert not any(value.any() for value in kept.h.values())
    gone = run_in_memory(problem_of("feddyn"), 2, absent=lambda i, p, s, client: client == 2)
    assert same(poor.state, gone.state)


def test_clients_and_server_go_on_after_a_restart_between_rounds(tmp_path: Path) -> None:
    whole = run_in_memory(problem_of("feddyn", fraction=0.75), 4)
    state = None
    for index in range(4):
        problem = problem_of("feddyn", fraction=0.75)
        with InMemoryFederation(problem, tmp_path) as federation:
            federation.mailbox.durable = index
            state = federation.init() if state is None else stored.loads(State, stored.dumps(state))
            state = asyncio.run(problem.method.round(state, federation.stage(index)))
            federation.reach_durable_point()
    assert same(state, whole.state)


def test_clients_that_lost_their_stores_do_not_come_to_the_same(tmp_path: Path) -> None:
    """What the restart above proves: the result depends on what clients remember."""
    whole = run_in_memory(problem_of("feddyn"), 2)
    problem = problem_of("feddyn")
    with InMemoryFederation(problem, tmp_path) as federation:
        federation.mailbox.durable = 1
        state = asyncio.run(problem.method.round(whole.states[1], federation.stage(1)))
    assert not same(state, whole.state)


# With other parts of a run


def test_with_adam_at_the_server_its_model_stands_for_the_mean():
    adam = {"lr": 0.02, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    options = {"server_optimizer": "adam", "aggregation": {"adam": adam}}
    plain, run = (run_in_memory(problem_of("feddyn", build=mlp, **more), 1) for more in ({}, options))
    start, after = (ref.as_arrays(state.weights) for state in plain.states)
    for name, x in start.items():
        delta = (after[name] - x) / 2  # see the test of one round above
        v = adam["beta2"] * adam["tau"] ** 2 + (1 - adam["beta2"]) * delta**2
        step = adam["lr"] * (1 - adam["beta1"]) * delta / (np.sqrt(v) + adam["tau"])
        assert np.allclose(run.weights[name].numpy(), x + 2 * step, rtol=1e-5, atol=1e-6)
        assert np.allclose(run.state.h[name].numpy(), -0.01 * step, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("server_optimizer", ["none", "adam"])
def test_it_goes_on_from_checkpoints(server_optimizer):
    problem = problem_of("feddyn", server_optimizer=server_optimizer, fraction=0.75)
    again = run_in_memory(problem, 3, between=lambda state: stored.loads(type(state), stored.dumps(state)))
    assert same(again.state, run_in_memory(problem, 3).state)


def test_private_training_covers_all_that_leaves():
    problem = problem_of("feddyn", build=mlp, rounds=2, privacy={"dp_sgd": {"noise_multiplier": 1.0}})
    assert run_in_memory(problem, 2).privacy()["epsilon"] > 0


def test_it_learns():
    options = {"train_size": 400, "partition": "dirichlet:0.3", "params": {"alpha": 0.1}}
    problem = problem_of("feddyn", **options, train={"epochs": 2, "lr": 0.1})
    before, after = (run_in_memory(problem, rounds).evaluate() for rounds in (0, 6))
    assert after.accuracy > before.accuracy + 10


def test_alpha_is_above_0():
    with pytest.raises(ConfigError, match=r"params\.alpha"):
        problem_of("feddyn", params={"alpha": 0})
