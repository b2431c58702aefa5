"""What every method owes: one suite for all that are registered, and for the toys with the patterns of those to come.

A method that needs other options than the small problem's (a warm-up, a network of its own) says so in OPTIONS.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import pytest
import torch

from fedrpc import config as configuration
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.methods import METHODS
from fedrpc.methods.method import Method
from fedrpc.methods.runtime import SETUP_ROUND
from fedrpc.models.state import load
from fedrpc.problem import Problem
from fedrpc.report.words import describe_reported
from fedrpc.server.rounds import ServerRound
from fedrpc.server.summary import hash_model
from fedrpc.wire import stored
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import check_message
from tests.fakes import InMemoryFederation, Played, problem_of, registered, run_in_memory
from tests.toys import TOYS
from tests.unit.wire.messages import same

ROUNDS = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "ccvr": {"params": {"num_virtual": 50, "epochs": 2}},
    "feddpms": {"model": "dpms", "rounds": 4, "params": {"preliminary": 1, "alpha": 4, "tries": 3}},
    "fedgen": {"params": {"steps": 5}},
    "mpgan": {
        "params": {
            "steps": 2,
            "batch": 2,
            "width": 2,
            "a_f": "0.2",
            "warm_up": 1,
            "tau": 0,
            "min_pool": 0,
            "save_every": 1,
        }
    },
    "mpgan-ac": {"params": {"steps": 2, "batch": 2, "width": 2, "a_f": "0.2", "warm_up": 1, "save_every": 1}},
    "fedzdac": {"params": {"t_start": 1, "samples_per_class": 2, "iterations": 3}},
    "fedzdas": {"params": {"t_start": 1, "samples_per_class": 2, "iterations": 3}},
    "fedvae": {"model": "dpms"},
}
ALL = [*(METHODS[name] for name in METHODS), *TOYS]
SAID_WITHOUT = {Kind.WEIGHTS.label, Kind.SCALARS.label, Kind.ENVELOPE.label}

every_method = pytest.mark.parametrize("method", ALL, ids=lambda method: method.name)


def problem(method: type[Method[Any, Any]]) -> Problem:
    """A small problem; with the data set's own network for a method that can not work with a tiny one."""
    options = {"fraction": 0.75, "rounds": ROUNDS} | OPTIONS.get(method.name, {})
    with contextlib.suppress(ConfigError):
        return problem_of(method, **options)
    return problem_of(method, build=None, **options)


@cache
def played(method: type[Method[Any, Any]]) -> Played:
    """One run of a method that all tests look at."""
    return run_in_memory(problem(method), problem(method).config.rounds)


def kept(state: Any) -> Any:
    """A state as a checkpoint gives it back."""
    return stored.loads(type(state), stored.dumps(state))


@every_method
def test_it_is_named_and_documented(method):
    assert re.fullmatch(r"[a-z][a-z0-9-]*", method.name)
    assert method.__doc__
    assert method.dp_sgd_stance().is_allowed != bool(method.dp_sgd_stance().reason)
    assert method in TOYS or "dp_sgd" in vars(method), "a method says itself whether it can be trained privately"


@every_method
def test_its_phases_say_what_travels(method):
    assert method.phases
    for name, (phase, attribute) in method.phases.items():
        assert phase.name == name
        assert callable(getattr(method, attribute))
        check_message(phase.down)
        check_message(phase.up)


@every_method
def test_its_state_survives_a_checkpoint(method):
    for state in played(method).states:
        assert is_dataclass(state)
        assert same(kept(state), state)
        assert stored.dumps(kept(state)) == stored.dumps(state)


@every_method
def test_its_formula_is_what_was_measured_to_the_byte(method):
    assert played(method).measured() == played(method).predicted()


@every_method
def test_its_model_fits_the_network_and_is_finite(method):
    run = played(method)
    for state in run.states:
        weights = run.problem.method.model(state)
        load(run.problem.network(), weights)
        assert all(torch.isfinite(tensor).all() for tensor in weights.values() if tensor.is_floating_point())


@every_method
def test_it_learns_something(method):
    first, last = (
        played(method).problem.method.model(state) for state in (played(method).states[0], played(method).state)
    )
    assert any(not torch.equal(first[name], last[name]) for name in first)


@every_method
def test_the_same_seed_gives_the_same_result_also_from_checkpoints(method):
    again = run_in_memory(problem(method), problem(method).config.rounds, between=kept)
    assert again.sha256 == played(method).sha256
    assert again.asked == played(method).asked
    assert all(map(same, again.states, played(method).states))
    assert again.rows == played(method).rows


@every_method
def test_every_phase_is_asked_and_answered(method):
    assert {phase for _, phase, _, _ in played(method).asked} == set(method.phases)


@every_method
def test_what_it_reports_can_be_written_down_and_read(method):
    told = played(method).reported()
    assert json.loads(json.dumps(told)) == told
    assert all(len(entry["words"]) <= 20 and describe_reported(entry) for entry in told.values())


@every_method
def test_it_says_what_leaves_a_client(method):
    leaves = {key.kind for key, sums in played(method).rows.items() if key.direction == "up" and sums.tensor_bytes}
    assert bool(leaves - SAID_WITHOUT) == bool(method.shares), f"{leaves} leave a client; shares = {method.shares!r}"


@every_method
def test_it_knows_its_parameters_and_no_others(method):
    with registered(method):
        plain = configuration.build({"method": method.name})
        assert configuration.build({"method": method.name, "params": plain.params}).hash == plain.hash
        with pytest.raises(UnknownName, match=f"unknown parameter of {method.name} 'params.no_such_name'"):
            configuration.build({"method": method.name, "params": {"no_such_name": 1}})


@every_method
def test_a_round_that_is_played_again_asks_the_same_and_charges_nobody(method):
    async def twice(federation: InMemoryFederation) -> tuple[Any, Any, list[int], list[int]]:
        state, half = federation.init(), federation.problem.method
        if type(half).overrides("setup"):
            state = await half.setup(state, federation.stage(SETUP_ROUND))
            federation.reach_durable_point()
        first = await half.round(state, unsaved(federation))
        charged = rows(federation)
        return first, await half.round(kept(state), unsaved(federation)), charged, rows(federation)

    def unsaved(federation: InMemoryFederation) -> ServerRound:
        """A round whose saves come to nothing, as when the server dies before the first of them."""
        rnd = federation.stage(0)
        rnd._save = lambda *_: asyncio.sleep(0)
        return rnd

    def rows(federation: InMemoryFederation) -> list[int]:
        clients = range(federation.problem.config.clients)
        return [len(federation.clients.store(client).read_privacy_rows(0)) for client in clients]

    with InMemoryFederation(problem(method)) as federation:
        first, second, before, after = asyncio.run(twice(federation))
    assert same(first, second)
    assert after == before


@every_method
def test_a_client_that_does_not_answer_does_not_end_the_run(method):
    whole = played(method)
    gone = whole.cohorts[1][0]
    run = run_in_memory(problem(method), 2, absent=lambda index, phase, step, client: (index, client) == (1, gone))
    weights = run.problem.method.model(run.state)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values() if tensor.is_floating_point())
    assert run.sha256 != model_after(whole, 2)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_round_in_which_everybody_abstains_leaves_the_state_and_goes_on(name):
    """As when nobody has any privacy budget left: no failure, so nothing that a run should end for."""
    method = METHODS[name]
    whole = played(method)
    with InMemoryFederation(problem(method)) as federation:
        half = federation.problem.method
        half.answer = lambda phase, ctx, message: ctx.abstain("the budget is spent")
        rounds = range(len(whole.cohorts))
        after = [asyncio.run(half.round(whole.states[index], federation.stage(index))) for index in rounds]
    assert all(same(half.model(after[index]), half.model(whole.states[index])) for index in rounds)


def model_after(run: Played, rounds: int) -> str:
    return hash_model(run.problem.method.model(run.states[rounds]))


def test_the_registry_and_the_toys_are_all_here():
    names = [method.name for method in ALL]
    assert len(set(names)) == len(names)
    assert "fedavg" in names
    assert sum(name.startswith("toy-") for name in names) == len(TOYS)
