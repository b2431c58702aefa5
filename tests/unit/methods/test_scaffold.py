"""SCAFFOLD against a float64 reference of its algorithm, and what its control variates survive."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedrpc.client.store import Transaction
from fedrpc.errors import ConfigError
from fedrpc.methods.phases import on
from fedrpc.methods.scaffold import FIT, Control, ControlledUpdate, Scaffold, Start
from fedrpc.models.state import count_payload_bytes
from fedrpc.problem import Problem
from fedrpc.wire import stored
from tests.fakes import InMemoryFederation, mlp, problem_of, run_in_memory
from tests.unit.methods import reference as ref
from tests.unit.methods.test_fedzdac import Uniform, remove_data
from tests.unit.wire.messages import same


def reference_run(
    problem: Problem, cohorts: list[list[int]], option: str = "II", global_lr: float = 1.0
) -> list[tuple[ref.Arrays, ref.Arrays]]:
    """Model and server variate after each round, by the paper's algorithm."""
    x = ref.as_arrays(dict(problem.copy_network().state_dict()))
    c, own = ref.zeros(x), {client: ref.zeros(x) for client in range(problem.config.clients)}
    config, after = problem.config.train, []
    for index, cohort in enumerate(cohorts):
        models, changes = [], []
        lr = config.lr * config.lr_decay**index
        for client in cohort:
            y, steps = ref.train(problem, client, index, x, lambda _, c=c, k=client: ref.combine((1, c), (-1, own[k])))
            if option == "I":
                full = ref.gradient(x, *ref.examples(problem, client))
                new = ref.combine((1, full), (config.weight_decay, x))
            else:
                new = ref.combine((1, own[client]), (-1, c), (1 / (steps * lr), x), (-1 / (steps * lr), y))
            changes.append(ref.combine((1, new), (-1, own[client])))
            own[client] = new
            models.append(y)
        x = ref.combine((1 - global_lr, x), (global_lr, ref.mean(models)))
        c = ref.combine((1, c), *((1 / problem.config.clients, change) for change in changes))
        after.append((x, c))
    return after


@pytest.mark.parametrize(
    ("params", "train"),
    [
        ({}, {}),
        ({"option": "I"}, {}),
        ({"global_lr": 0.5}, {}),
        # Momentum makes steps ten times longer, and what rounding does to them.
        ({"option": "I", "global_lr": 1.5}, {"momentum": 0.9, "weight_decay": 0.01, "lr": 0.02}),
        ({}, {"weight_decay": 0.01}),
    ],
)
def test_three_rounds_are_the_papers(params: dict[str, Any], train: dict[str, Any]) -> None:
    problem = problem_of("scaffold", build=mlp, params=params, **ref.uneven(**train))
    run = run_in_memory(problem, 3)
    assert len({*run.cohorts[0]} & {*run.cohorts[1]}) > 0, "somebody takes part twice"
    steps = {len(list(ref.batches(problem, client, 0))) for client in run.cohorts[0]}
    assert len(steps) > 1, "clients differ in steps"
    for state, (x, c) in zip(run.states[1:], reference_run(problem, run.cohorts, **params), strict=True):
        assert ref.distance(state.weights, x) < 2e-6
        assert ref.distance(state.control, c) < 2e-5


@pytest.mark.parametrize("option", ["I", "II"])
def test_the_first_round_is_the_uniform_mean_bit_for_bit(option):
    ours, uniform, fedavg = (
        run_in_memory(problem_of(m, params=p, **ref.uneven()), 2)
        for m, p in (("scaffold", {"option": option}), (Uniform, {}), ("fedavg", {}))
    )
    assert same(ours.states[1].weights, uniform.states[1].weights)
    assert not same(ours.states[1].weights, fedavg.states[1].weights)
    assert not same(ours.states[2].weights, uniform.states[2].weights)
    assert ours.records[0] == fedavg.records[0], "the same local training"


def test_one_full_batch_step_makes_both_options_agree():
    train = {"epochs": 1, "batch_size": 1000, "lr": 0.5}
    one, two = (
        run_in_memory(problem_of("scaffold", build=mlp, params={"option": option}, train=train), 3)
        for option in ("I", "II")
    )
    for name, control in one.state.control.items():
        assert torch.allclose(control, two.state.control[name], rtol=1e-3, atol=1e-6)
    assert max(float(control.abs().max()) for control in one.state.control.values()) > 1e-3


def test_option_i_does_not_depend_on_batches(monkeypatch):
    problem = problem_of("scaffold", params={"option": "I"}, fraction=0.75)
    whole = run_in_memory(problem, 2)
    monkeypatch.setattr("fedrpc.methods.scaffold.BATCH_SIZE", 4)
    small = run_in_memory(problem, 2)
    for name, control in whole.state.control.items():
        assert torch.allclose(small.state.control[name], control, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_servers_variate_is_the_mean_of_all_clients(fraction):
    problem = problem_of("scaffold", fraction=fraction)
    with InMemoryFederation(problem) as federation:
        played = asyncio.run(federation.play(4))
        kept = [Transaction(federation.clients.store(client)).get("control", Control) for client in range(4)]
    for name, control in played.state.control.items():
        own = [k.value[name] if k else torch.zeros_like(control) for k in kept]
        assert torch.allclose(torch.stack(own).mean(0), control, rtol=1e-4, atol=1e-6)


# What travels


def test_variates_are_of_trainable_parameters_and_travel_under_their_own_kind():
    run = run_in_memory(problem_of("scaffold", fraction=0.5, train={"epochs": 2}), 3)
    learned = dict(run.problem.copy_network().named_parameters())
    assert set(run.state.control) == set(learned) < set(run.weights)
    fedavg = run_in_memory(problem_of("fedavg", fraction=0.5, train={"epochs": 2}), 3).measured()
    size = 3 * 2 * count_payload_bytes(learned)
    assert run.measured() == run.predicted()
    assert run.measured() == {side: fedavg[side] | {"control_variates": size} for side in ("down", "up")}


def test_releases_of_variates_have_rows():
    run = run_in_memory(problem_of("scaffold"), 2)
    assert run.privacy()["releases"]["control_variates"]["count"] == 2 * 4
    assert "control_variates" in run.privacy()["reason"]


WRONG = {
    "a missing tensor": lambda change: dict(list(change.items())[1:]),
    "another shape": lambda change: {name: tensor[..., :1] for name, tensor in change.items()},
    "another dtype": lambda change: {name: tensor.double() for name, tensor in change.items()},
    "NaN": lambda change: {name: tensor * torch.nan for name, tensor in change.items()},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_change_with_another_layout_counts_as_missing(what):
    class Careless(Scaffold):
        name = "careless"

        @on(FIT)
        def fit(self, ctx: Any, msg: Start) -> ControlledUpdate:
            update = super().fit(ctx, msg)
            return replace(update, control_change=WRONG[what](update.control_change)) if ctx.client == 1 else update

    [record] = run_in_memory(problem_of(Careless), 1).records
    assert set(record["local_losses"]) == {0, 2, 3}


@pytest.mark.parametrize("kept", [True, False])
def test_training_that_diverged_leaves_no_trace_in_the_store(kept):
    """A client whose answer is not finite fails, and goes on from the variate that it had."""
    problem = problem_of("scaffold", train={"lr": 0.05 if kept else 1e18})
    with InMemoryFederation(problem, quorum=0) as federation:
        asyncio.run(federation.problem.method.round(federation.init(), federation.stage(0)))
        store = Transaction(federation.clients.store(0))
        assert (store.get("control", Control) is not None) == kept


# Who trains, and who comes back


def test_a_client_without_examples_has_no_say_and_no_change():
    with InMemoryFederation(remove_data(problem_of("scaffold"), 2)) as federation:
        poor = asyncio.run(federation.play(2))
        kept = Transaction(federation.clients.store(2)).get("control", Control)
    assert kept is None or not any(value.any() for value in kept.value.values())
    gone = run_in_memory(problem_of("scaffold"), 2, absent=lambda i, p, s, client: client == 2)
    assert same(poor.state, gone.state)


def test_no_epochs_change_nothing():
    run = run_in_memory(problem_of("scaffold", train={"epochs": 0}), 2)
    assert same(run.state, run.states[0])


def test_clients_and_server_go_on_after_a_restart_between_rounds(tmp_path: Path) -> None:
    whole = run_in_memory(problem_of("scaffold", fraction=0.75), 4)
    state = None
    for index in range(4):
        problem = problem_of("scaffold", fraction=0.75)
        with InMemoryFederation(problem, tmp_path) as federation:
            federation.mailbox.durable = index
            state = federation.init() if state is None else stored.loads(Start, stored.dumps(state))
            state = asyncio.run(problem.method.round(state, federation.stage(index)))
            federation.reach_durable_point()
    assert same(state, whole.state)


def test_clients_that_lost_their_stores_do_not_come_to_the_same(tmp_path: Path) -> None:
    """What the restart above proves: the result depends on what clients remember."""
    whole = run_in_memory(problem_of("scaffold"), 2)
    problem = problem_of("scaffold")
    with InMemoryFederation(problem, tmp_path) as federation:
        federation.mailbox.durable = 1
        state = asyncio.run(problem.method.round(whole.states[1], federation.stage(1)))
    assert not same(state, whole.state)


# With other parts of a run


def test_adam_at_the_server_steps_along_the_uniform_mean():
    adam = {"lr": 0.02, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    options = {"server_optimizer": "adam", "aggregation": {"adam": adam}}
    plain, run = (
        run_in_memory(problem_of("scaffold", build=mlp, params={"global_lr": 0.5}, **more), 1) for more in ({}, options)
    )
    start, mean = (ref.as_arrays(state.weights) for state in plain.states)
    for name, x in start.items():
        delta = (mean[name] - x) / 0.5
        v = adam["beta2"] * adam["tau"] ** 2 + (1 - adam["beta2"]) * delta**2
        step = adam["lr"] * (1 - adam["beta1"]) * delta / (np.sqrt(v) + adam["tau"])
        assert np.allclose(run.weights[name].numpy(), x + 0.5 * step, rtol=1e-5, atol=1e-7)
    assert same(run.state.control, plain.state.control)


def test_adam_at_the_server_goes_on_from_checkpoints():
    problem = problem_of("scaffold", server_optimizer="adam", fraction=0.75)
    again = run_in_memory(problem, 3, between=lambda state: stored.loads(type(state), stored.dumps(state)))
    assert same(again.state, run_in_memory(problem, 3).state)


def test_it_learns():
    options = {"train_size": 400, "partition": "dirichlet:0.3", "train": {"epochs": 2, "lr": 0.1}}
    problem = problem_of("scaffold", **options)
    before, after = (run_in_memory(problem, rounds).evaluate() for rounds in (0, 6))
    assert after.accuracy > before.accuracy + 10


def test_a_step_depends_on_the_difference_of_variates():
    """A client whose variate is the server's takes FedAvg's steps."""

    class Agreeing(Scaffold):
        name = "agreeing"

        @on(FIT)
        def fit(self, ctx: Any, msg: Start) -> ControlledUpdate:
            ctx.store.put("control", Control(msg.control))
            return super().fit(ctx, msg)

    start = {name: torch.full_like(p, 0.3) for name, p in problem_of("fedavg").copy_network().named_parameters()}
    problem = problem_of(Agreeing)
    with InMemoryFederation(problem) as federation:
        weights = federation.init().weights
        ours = asyncio.run(problem.method.round(Start(weights, start), federation.stage(0)))
    assert same(ours.weights, run_in_memory(problem_of(Uniform), 1).weights)


# Refusals


@pytest.mark.parametrize("train", [{"optimizer": "adam"}, {"momentum": 0.9}])
def test_option_ii_needs_plain_sgd(train):
    with pytest.raises(ConfigError, match=r"plain SGD only, got .*; set .* train\.momentum=0, or params\.option=I"):
        problem_of("scaffold", train=train)
    problem_of("scaffold", train=train, params={"option": "I"})


def test_private_training_is_refused():
    with pytest.raises(ConfigError, match="scaffold refuses DP-SGD: with option I a gradient of all examples leaves"):
        problem_of("scaffold", privacy={"dp_sgd": {"noise_multiplier": 1.0}})


@pytest.mark.parametrize("params", [{"option": "III"}, {"global_lr": 0}])
def test_parameters_out_of_range_are_refused(params):
    with pytest.raises(ConfigError, match=r"params\."):
        problem_of("scaffold", params=params)
