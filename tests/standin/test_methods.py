"""Every method's both halves on the stand-in: the CPU's states, bit for bit, and no wait that batches multiply."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from fedrpc.errors import ConfigError
from fedrpc.methods import METHODS
from fedrpc.methods.method import Method
from fedrpc.models.base import Model
from fedrpc.problem import Problem
from tests.contract.test_methods import ALL, OPTIONS, every_method
from tests.fakes import Played, problem_of, run_in_memory, tiny
from tests.standin.cuda import present
from tests.standin.syncs import count_host_work, count_reads, recorded
from tests.standin.twins import Twins, compute_twins
from tests.toys import TOYS
from tests.unit.wire.messages import same

# Beside those of the conformance suite: options that lead through code that small runs leave out.
MORE: dict[str, dict[str, Any]] = {
    "fedgen-img": {"params": {"start": 0, "steps": 2, "batch_size": 4, "noise_dim": 3}},
    "flea": {"params": {"alpha": 0.5, "measure": 4}},
}
# Loops of their own: a parameter that lengthens them.
LOOPS = {"fedgen": "steps", "fedgen-img": "steps", "fedzdac": "iterations", "fedzdas": "iterations"}
ON_HOST = "fedrpc/methods/flea/messages.py"  # runs an input of zeros through the network for the shape of an activation
PRIVATE = {"noise": "seeded", "dp_sgd": {"noise_multiplier": 1.0}}


def private() -> nn.Module:
    """The tiny network with a norm that keeps examples apart."""
    first = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 12), nn.GroupNorm(3, 12), nn.ReLU())
    return Model([first, nn.Sequential(nn.Linear(12, 8), nn.ReLU())], nn.Linear(8, 10))


def build_problem(method: type[Method[Any, Any]], build: Any = tiny, **values: Any) -> Problem:
    options = {"fraction": 0.75, "rounds": 2} | OPTIONS.get(method.name, {}) | MORE.get(method.name, {}) | values
    with contextlib.suppress(ConfigError):
        return problem_of(method, build=build, **options)
    return problem_of(method, build=None, **options)


def play(device: torch.device, *args: Any, **values: Any) -> Played:
    problem = build_problem(*args, **values)
    return run_in_memory(problem, problem.config.rounds, device=device)


def play_twins(*args: Any, **values: Any) -> Twins[Played]:
    return compute_twins(lambda device: play(device, *args, **values))


def count_all_reads(method: type[Method[Any, Any]], **values: Any) -> Counter[str]:
    with present() as device, recorded() as syncs:
        play(device, method, **values)
    return count_reads(syncs)


@every_method
def test_both_halves_on_the_device_give_the_cpus_states(method):
    twins = play_twins(method)
    assert method in TOYS or not [place for place in count_host_work(twins.syncs) if not place.startswith(ON_HOST)]
    assert all(map(same, twins.device.states, twins.host.states))
    assert twins.device.rows == twins.host.rows, "the same bytes were sent"
    assert twins.device.records == twins.host.records


# Parameters that lead through other code.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "labels of an oracle": ("mpgan", {"labels": "oracle", "oracle_epochs": 1}),
    "paths pushed apart": ("mpgan", {"diversity": 0.5}),
    "private means": ("feddpms", {"mode": "private", "m": 1}),
    "whole gradients": ("scaffold", {"option": "I"}),
    "diagonal spreads": ("ccvr", {"diagonal": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_on_the_device_give_the_cpus_states(variant):
    name, params = VARIANTS[variant]
    twins = play_twins(METHODS[name], params=OPTIONS.get(name, {}).get("params", {}) | params)
    assert not count_host_work(twins.syncs)
    assert all(map(same, twins.device.states, twins.host.states))


@pytest.mark.parametrize("method", [m for m in ALL if m.dp_sgd_stance().is_allowed], ids=lambda m: m.name)
def test_private_training_on_the_device_gives_the_cpus_states(method):
    twins = play_twins(method, private, rounds=1, privacy=PRIVATE)
    assert not count_host_work(twins.syncs)
    assert all(map(same, twins.device.states, twins.host.states))
    assert twins.device.released == twins.host.released


@every_method
def test_the_host_reads_no_more_often_when_there_are_more_batches(method):
    few, many = (count_all_reads(method, train={"batch_size": size}) for size in (12, 4))
    assert not many - few


@pytest.mark.parametrize(("name", "param"), LOOPS.items())
def test_the_host_reads_no_more_often_in_longer_loops(name, param):
    params = OPTIONS.get(name, {}).get("params", {}) | MORE.get(name, {}).get("params", {})
    few, many = (count_all_reads(METHODS[name], params=params | {param: length}) for length in (1, 3))
    assert not many - few
