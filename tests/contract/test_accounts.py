"""Every part that leaves has its privacy row, and an answer costs what its method expects it to cost."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import pytest

from fedrpc.methods import METHODS
from fedrpc.methods.method import Method
from fedrpc.privacy.ledger import read_history
from fedrpc.privacy.mechanisms import ZERO_OUT, History, merge_histories
from fedrpc.privacy.unaccounted import find_unaccounted
from fedrpc.study.facts import Facts
from fedrpc.study.privacy_rows import PrivacyRow, group_answers
from fedrpc.training.dpsgd_plan import plan_cost
from tests.contract.test_methods import OPTIONS, every_method, play
from tests.fakes import Played, problem_of, registered, run_in_memory

ROUNDS, NOISE = 2, 1.3
PRIVATE = [METHODS[name] for name in METHODS if METHODS[name].dp_sgd_stance().is_allowed]

Place = tuple[int, int, str]  # client, round, phase


def play_private(method: type[Method[Any, Any]], **values: Any) -> Played:
    options: dict[str, Any] = {"fraction": 0.75, "rounds": ROUNDS, "local_test": 0.2} | values
    network: dict[str, Any] = {"model": "dpms", "build": None} if OPTIONS.get(method.name, {}).get("model") else {}
    return run_in_memory(problem_of(method, **network, **options), options["rounds"])


def sum_charged(played: Played) -> dict[Place, History]:
    found: dict[Place, list[History]] = defaultdict(list)
    for row in played.released:
        found[row["client"], row["round"], row["phase"]].append(read_history(row))
    return {place: merge_histories(histories) for place, histories in found.items()}


def list_expected(played: Played) -> dict[Place, History]:
    problem, adjacencies = played.problem, {row["adjacency"] for row in played.released}
    config, sizes = problem.config, problem.env.num_examples()
    out = {}
    for index, phase, _, client in played.asked:
        training = plan_cost(config.privacy, config.train, sizes[client], config.rounds)
        costs = problem.method.expect_cost(phase, problem.env, {ZERO_OUT: training} if training else {})
        assert set(costs) <= adjacencies
        out[client, index, phase] = merge_histories(costs.values())
    return out


@pytest.mark.parametrize("method", PRIVATE, ids=lambda method: method.name)
@pytest.mark.parametrize("epochs", [1, 3])
def test_training_costs_what_is_expected(method: type[Method[Any, Any]], epochs: int) -> None:
    privacy = {"dp_sgd": {"noise_multiplier": NOISE}}
    played = play_private(method, privacy=privacy, train={"epochs": epochs, "batch_size": 4})
    charged = sum_charged(played)
    assert charged == list_expected(played)
    assert {index for _, index, _ in charged} == {0, 1}
    for (client, _, _), history in charged.items():
        batches = math.ceil(len(played.problem.load_client_data(client).train) / 4)  # by hand
        assert history == ((NOISE, 1 / batches, epochs * batches),)


def test_a_target_epsilon_costs_what_is_expected() -> None:
    played = play_private(
        METHODS["fedavg"],
        privacy={"dp_sgd": {"target_epsilon": 3.0}},
        partition="dirichlet:0.1",
        train_size=200,
        fraction=1.0,
    )
    charged = sum_charged(played)
    assert charged == list_expected(played)
    assert len({noise for ((noise, _, _),) in charged.values()}) > 1  # a client's own, by its number of examples


@pytest.mark.parametrize("changes", [{"train": {"epochs": 0}}, {"privacy": {}}])
def test_what_is_not_trained_privately_costs_nothing(changes: dict[str, Any]) -> None:
    played = play_private(METHODS["fedavg"], **{"privacy": {"dp_sgd": {"noise_multiplier": NOISE}}} | changes)
    assert set(sum_charged(played).values()) == {()}
    if "train" in changes:
        assert sum_charged(played) == list_expected(played)


@pytest.mark.parametrize("mode", ["private", "paper"])
def test_shared_means_cost_what_is_expected(mode: str) -> None:
    params = {"preliminary": 1, "alpha": 4, "tries": 3, "mode": mode, "m": 2, "sigma": 3.0, "clip": 0.5}
    played = play_private(METHODS["feddpms"], rounds=3, params=params)
    charged = sum_charged(played)
    assert charged == list_expected(played)
    shared = {history for (_, _, phase), history in charged.items() if phase == "share"}
    assert (shared == {()}) == (mode == "paper")
    assert {history for (_, _, phase), history in charged.items() if phase != "share"} == {()}


@every_method
def test_every_part_has_its_row(method: type[Method[Any, Any]]) -> None:
    played = play(method)
    assert find_unaccounted(played.rows.items(), played.released) == []


@every_method
def test_every_answer_is_found_in_the_rows(method: type[Method[Any, Any]]) -> None:
    """But for answers that may consist of nothing."""
    played, problem = play(method), play(method).problem
    with registered(method):
        facts = Facts(problem.config, problem.env.num_examples(), problem.env.shape, problem.env.num_classes, {})
    answers = group_answers(PrivacyRow(line, row) for line, row in enumerate(played.released))
    found = [(a.round, a.phase, a.rows[0].values["step"], a.client) for a in answers]
    assert len(set(found)) == len(found)
    assert {place for place in played.asked if facts.always_has_rows(place[1])} <= set(found) <= set(played.asked)
    assert all(facts.knows_phase(phase) for _, phase, _, _ in played.asked)
    asked = Counter((index, phase) for index, phase, _, _ in played.asked)
    stages = played.participation.items()
    counted = Counter({(index, phase): n for index, stage in stages for phase, n in stage["answers"].items()})
    assert counted <= asked
    saves = (
        "gan_step" in method.phases
    )  # in stages with durable points within, only what came after the last is counted
    assert saves or counted == asked
