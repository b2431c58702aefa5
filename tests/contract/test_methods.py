"""What every method must do: one suite for all registered methods and the toys.

OPTIONS has the options of methods that need others than the small problem's (a warm-up, a network of their own).
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
from fedrpc.server.summary import Advises, HasCaveat, Reports, hash_model
from fedrpc.study.attack import SharesItems
from fedrpc.study.generated import MakesPictures
from fedrpc.wire import stored
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import check_message
from tests.fakes import InMemoryFederation, Played, problem_of, registered, run_in_memory
from tests.toys import TOYS
from tests.unit.wire.messages import same

ROUNDS = 2
GAN = {"steps": 2, "batch": 2, "width": 2, "a_f": "0.2", "warm_up": 1, "save_every": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "ccvr": {"params": {"num_virtual": 50, "epochs": 2}},
    "feddpms": {"model": "dpms", "rounds": 4, "params": {"preliminary": 1, "alpha": 4, "tries": 3}},
    "fedgen": {"params": {"steps": 5}},
    "mpgan": {"params": GAN | {"tau": 0, "min_pool": 0}},
    "mpgan-ac": {"params": GAN | {"discriminators": "shared", "cohort_steps": 1}},
    "fedzdac": {"params": {"t_start": 1, "samples_per_class": 2, "iterations": 3}},
    "fedzdas": {"params": {"t_start": 1, "samples_per_class": 2, "iterations": 3}},
    "fedvae": {"model": "dpms"},
}
ALL = [*(METHODS[name] for name in METHODS), *TOYS]
NEED_NO_MENTION = {Kind.WEIGHTS.label, Kind.SCALARS.label, Kind.ENVELOPE.label}

# The methods with each optional ability, which a tool looks for; README.md in fedrpc/methods says which tool.
ABILITIES: dict[type, set[str]] = {
    SharesItems: {"fedbr", "feddata", "fedmix", "flea", "naivemix"},
    MakesPictures: {"feddpms", "mpgan", "mpgan-ac"},
    Reports: {"feddpms", "fedzdac", "fedzdas", "mpgan", "mpgan-ac"},
    HasCaveat: {"ccvr", "mpgan", "mpgan-ac"},
    Advises: {"fedgen", "flea"},
}
# The methods whose server looks at single clients' updates, which some aggregators hide.
LOOK_AT_UPDATES = {"fedgen", "fedzdas", "qffl", "toy-loyal"}

every_method = pytest.mark.parametrize("method", ALL, ids=lambda method: method.name)


def build_problem(method: type[Method[Any, Any]]) -> Problem:
    """A small problem; with the data set's own network for a method that cannot work with a tiny one."""
    options = {"fraction": 0.75, "rounds": ROUNDS} | OPTIONS.get(method.name, {})
    with contextlib.suppress(ConfigError):
        return problem_of(method, **options)
    return problem_of(method, build=None, **options)


@cache
def play(method: type[Method[Any, Any]]) -> Played:
    """One run of a method, for all tests."""
    return run_in_memory(build_problem(method), build_problem(method).config.rounds)


def reload(state: Any) -> Any:
    """A state after a checkpoint."""
    return stored.loads(type(state), stored.dumps(state))


@every_method
def test_it_is_named_and_documented(method):
    assert re.fullmatch(r"[a-z][a-z0-9-]*", method.name)
    assert method.__doc__
    assert method.dp_sgd_stance().is_allowed != bool(method.dp_sgd_stance().reason)
    assert method in TOYS or "dp_sgd" in vars(method), "every method declares its own stance on DP-SGD"


@every_method
def test_its_phases_have_valid_messages(method):
    assert method.phases
    for name, (phase, attribute) in method.phases.items():
        assert phase.name == name
        assert callable(getattr(method, attribute))
        check_message(phase.down)
        check_message(phase.up)


@every_method
def test_its_state_survives_a_checkpoint(method):
    for state in play(method).states:
        assert is_dataclass(state)
        assert same(reload(state), state)
        assert stored.dumps(reload(state)) == stored.dumps(state)


@every_method
def test_its_formula_equals_the_measured_bytes(method):
    assert play(method).measured() == play(method).predicted()


@every_method
def test_its_model_fits_the_network_and_is_finite(method):
    run = play(method)
    for state in run.states:
        weights = run.problem.method.model(state)
        load(run.problem.copy_network(), weights)
        assert all(torch.isfinite(tensor).all() for tensor in weights.values() if tensor.is_floating_point())


@every_method
def test_it_changes_the_model(method):
    first, last = (play(method).problem.method.model(state) for state in (play(method).states[0], play(method).state))
    assert any(not torch.equal(first[name], last[name]) for name in first)


@every_method
def test_the_same_seed_gives_the_same_result_through_checkpoints(method):
    again = run_in_memory(build_problem(method), build_problem(method).config.rounds, between=reload)
    assert again.sha256 == play(method).sha256
    assert again.asked == play(method).asked
    assert all(map(same, again.states, play(method).states))
    assert again.rows == play(method).rows


@every_method
def test_every_phase_is_asked_and_answered(method):
    unasked = {"gan_return"} if method.name == "mpgan" else set()  # its discriminators stay; mpgan-ac's do not
    assert {phase for _, phase, _, _ in play(method).asked} == set(method.phases) - unasked


@every_method
def test_its_reported_values_can_be_serialised_and_shown(method):
    values = play(method).reported()
    assert json.loads(json.dumps(values)) == values
    assert all(len(entry["words"]) <= 20 and describe_reported(entry) for entry in values.values())


@every_method
def test_it_declares_what_leaves_a_client(method):
    leaves = {key.kind for key, sums in play(method).rows.items() if key.direction == "up" and sums.tensor_bytes}
    assert bool(leaves - NEED_NO_MENTION) == bool(method.shares), f"{leaves} leave a client; shares = {method.shares!r}"


@every_method
def test_it_knows_its_parameters_and_no_others(method):
    with registered(method):
        plain = configuration.build({"method": method.name})
        assert configuration.build({"method": method.name, "params": plain.params}).hash == plain.hash
        with pytest.raises(UnknownName, match=f"unknown parameter of {method.name} 'params.no_such_name'"):
            configuration.build({"method": method.name, "params": {"no_such_name": 1}})


@every_method
def test_a_replayed_round_asks_the_same_and_charges_no_client(method):
    async def play_twice(federation: InMemoryFederation) -> tuple[Any, Any, list[int], list[int]]:
        state, half = federation.init(), federation.problem.method
        if type(half).overrides("setup"):
            state = await half.setup(state, federation.stage(SETUP_ROUND))
            federation.reach_durable_point()
        first = await half.round(state, stage_without_saves(federation))
        charged = count_rows(federation)
        return first, await half.round(reload(state), stage_without_saves(federation)), charged, count_rows(federation)

    def stage_without_saves(federation: InMemoryFederation) -> ServerRound:
        """A round whose saves have no effect, as when the server dies before the first of them."""
        rnd = federation.stage(0)
        rnd._save = lambda *_: asyncio.sleep(0)
        return rnd

    def count_rows(federation: InMemoryFederation) -> list[int]:
        clients = range(federation.problem.config.clients)
        return [len(federation.clients.store(client).read_privacy_rows(0)) for client in clients]

    with InMemoryFederation(build_problem(method)) as federation:
        first, second, before, after = asyncio.run(play_twice(federation))
    assert same(first, second)
    assert after == before


@every_method
def test_a_client_that_does_not_answer_does_not_end_the_run(method):
    whole = play(method)
    gone = whole.cohorts[1][0]
    run = run_in_memory(
        build_problem(method), 2, absent=lambda index, phase, step, client: (index, client) == (1, gone)
    )
    weights = run.problem.method.model(run.state)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values() if tensor.is_floating_point())
    assert run.sha256 != hash_after(whole, 2)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_round_in_which_all_clients_abstain_keeps_the_model(name):
    """As when no client has any privacy budget left: no failure, so the run goes on."""
    method = METHODS[name]
    whole = play(method)
    with InMemoryFederation(build_problem(method)) as federation:
        half = federation.problem.method
        half.answer = lambda phase, ctx, message: ctx.abstain("the budget is spent")
        rounds = range(len(whole.cohorts))
        after = [asyncio.run(half.round(whole.states[index], federation.stage(index))) for index in rounds]
    assert all(same(half.model(after[index]), half.model(whole.states[index])) for index in rounds)


def hash_after(run: Played, rounds: int) -> str:
    return hash_model(run.problem.method.model(run.states[rounds]))


def test_all_methods_and_toys_have_names_of_their_own():
    names = [method.name for method in ALL]
    assert len(set(names)) == len(names)
    assert "fedavg" in names
    assert sum(name.startswith("toy-") for name in names) == len(TOYS)


@pytest.mark.parametrize("ability", ABILITIES, ids=lambda ability: ability.__name__)
def test_optional_abilities_are_those_of_the_table(ability):
    assert {method.name for method in ALL if issubclass(method, ability)} == ABILITIES[ability]


@every_method
def test_it_declares_needs_each_update_exactly_if_it_looks_at_updates(method, monkeypatch):
    """`ask` and `mean` check the declaration before they give a method a client's own update."""
    looks: list[str] = []
    monkeypatch.setattr(ServerRound, "_check_may_see_updates", lambda self, phase: looks.append(phase.name))
    run_in_memory(build_problem(method), build_problem(method).config.rounds)
    assert bool(looks) == bool(method.needs_each_update) == (method.name in LOOK_AT_UPDATES)
