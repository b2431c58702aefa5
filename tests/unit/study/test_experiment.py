"""Experiments of papers: their files, what is planned for each, and verdicts on claims."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import ValidationError

from fedrpc import config
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.launch.paper import PaperRequest, plan_experiment
from fedrpc.study.experiment import Claim, Experiment, judge, read_experiment, summarize_rows

NAMES = list(config.list_experiments())
MINIMAL: dict[str, Any] = {
    "title": "a title",
    "paper": "a paper",
    "where": "Table 1",
    "reduced": "rounds",
    "measures": ["last"],
    "setting": {"rounds": 9, "train": {"epochs": 4}},
    "small": {"rounds": 2},
    "rows": [
        {"name": "one", "method": "fedavg", "paper": {"last": 50}},
        {"name": "two", "method": "fedprox", "set": {"params": {"mu": 0.5}}, "small": {"params": {"mu": 0.25}}},
    ],
    "claims": [{"says": "two is better", "measure": "last", "higher": "two", "than": "one"}],
}


def of(one: list[float], two: list[float]) -> dict[str, dict[int, dict[str, float | None]]]:
    return {name: {seed: {"last": v} for seed, v in enumerate(vs)} for name, vs in (("one", one), ("two", two))}


@pytest.mark.parametrize("name", NAMES)
def test_what_claims_are_about_runs_at_both_sizes(name: str) -> None:
    experiment = read_experiment(name)
    claimed = {row for claim in experiment.claims for row in claim.rows}
    assert not [row.name for row in experiment.rows if row.extra and row.name in claimed]


@pytest.mark.parametrize("size", ["paper", "small"])
@pytest.mark.parametrize("name", NAMES)
def test_every_file_gives_valid_runs(name: str, size: Literal["paper", "small"]) -> None:
    experiment = read_experiment(name)
    runs = plan_experiment(experiment, PaperRequest(name, size, "0-2", rows=[row.name for row in experiment.rows]))
    assert len({run.cell.run for run in runs}) == len(runs) == 3 * len(experiment.rows)
    assert [run.cell.seed for run in runs] == sorted(run.config.seed for run in runs), "a whole seed after the other"
    assert experiment.claims
    assert experiment.reduced


def test_small_values_apply_in_small_alone_and_changes_to_everything() -> None:
    experiment = Experiment(**MINIMAL)
    request = PaperRequest("x", "small", "7", {"train": {"lr": 0.5}}, ["train.lr=0.5"])
    one, two = (run.config for run in plan_experiment(experiment, request))
    assert (one.method, one.rounds, one.seed, one.train.epochs, one.train.lr) == ("fedavg", 2, 7, 4, 0.5)
    assert two.params["mu"] == 0.25
    assert request.command == "fedrpc paper x --small --seeds 7 --set train.lr=0.5"
    _, two = (run.config for run in plan_experiment(experiment, PaperRequest("x", "paper", "0")))
    assert (two.rounds, two.params["mu"]) == (9, 0.5)


@pytest.mark.parametrize(
    ("one", "two", "by", "verdict"),
    [
        ([50, 51, 52], [55, 56.5, 57], 0, "reproduced"),
        ([50, 51, 52], [55, 56.5, 57], 4, "reproduced"),
        ([50, 51, 52], [55, 56.5, 57], 5, "partly"),  # beyond the margin in the mean, and not beyond chance
        ([50, 51, 52], [55, 56.5, 57], 6, "not"),
        ([50, 51, 52], [49, 53, 60], 0, "partly"),
        ([50, 51], [55, 56], 0, "partly"),  # two seeds are too few, whatever their interval
        ([50], [55], 0, "partly"),
        ([50, 51, 52], [50, 51, 52], 0, "not"),
        ([55, 56, 57], [50, 51, 52], 0, "not"),
        ([55, 56, 57], [54.5, 55.4, 56.6], -1, "reproduced"),  # at most a point less
        ([], [], 0, None),
    ],
)
def test_verdicts(one: list[float], two: list[float], by: float, verdict: str | None) -> None:
    higher = Claim(says="", measure="last", higher="two", than="one", by=by)
    assert judge(higher, of(one, two))["verdict"] == verdict
    lower = Claim(says="", measure="last", lower="two", than="one", by=by)
    mirrored = of([-value for value in one], [-value for value in two])
    assert judge(lower, mirrored)["verdict"] == verdict


@pytest.mark.parametrize(("values", "verdict"), [([1.0, 1.1, 0.9], "reproduced"), ([-1.0, -1.1, -0.9], "not")])
def test_a_claim_without_another_row_is_held_against_0(values: list[float], verdict: str) -> None:
    claim = Claim(says="it rises", measure="last", higher="one")
    found = judge(claim, of(values, []))
    assert (found["verdict"], found["difference"]["mean"]) == (verdict, pytest.approx(values[0]))
    assert judge(Claim(says="it falls", measure="last", lower="one"), of(values, []))["verdict"] != verdict


def test_only_seeds_that_both_rows_have_are_compared() -> None:
    values = of([50, 51, 52, 99], [55, 56, 57])
    found = judge(Claim(says="", measure="last", higher="two", than="one"), values)["difference"]
    assert (found["n"], found["mean"]) == (3, 5)


def test_a_seed_whose_run_lacks_what_a_claim_needs_does_not_count() -> None:
    values = of([50, 51, 52], [55, 56, 57])
    for seed, given in enumerate((100.0, 0.0, None)):
        values["two"][seed]["given"] = given
    claim = Claim(says="", measure="last", higher="two", than="one", needs="given")
    found = judge(claim, values)
    assert (found["difference"]["n"], found["left_out"], found["with_left_out"]["n"]) == (2, [1], 3)
    for seed in values["two"]:
        values["two"][seed]["given"] = 50.0
    found = judge(claim, values)
    assert (found["verdict"], found["difference"], found["left_out"]) == (None, None, [0, 1, 2])
    assert found["with_left_out"]["mean"] == 5
    assert judge(claim.model_copy(update={"needs": None}), values)["with_left_out"] is None


def test_rows_have_the_papers_figures_beside_ours() -> None:
    first, second = summarize_rows(Experiment(**MINIMAL).papers, ["last"], of([50, 52], [60]))
    assert first["paper"] == {"last": 50}
    assert first["ours"]["last"] == {"mean": 51, "sd": pytest.approx(2**0.5), "n": 2}
    assert second["seeds"] == {"0": {"last": 60}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"claims": [{"says": "", "measure": "last", "higher": "three", "than": "one"}]}, "there is no row 'three'"),
        ({"claims": [{"says": "", "measure": "last", "than": "one"}]}, "either higher or lower"),
        ({"claims": [{"says": "", "measure": "lats", "higher": "two", "than": "one"}]}, "unknown measure 'lats'"),
        ({"measures": ["nothing"]}, "unknown measure 'nothing'"),
        (
            {"claims": [{"says": "", "measure": "last", "higher": "two", "than": "one", "needs": "nothing"}]},
            "unknown measure 'nothing'",
        ),
        ({"rows": [MINIMAL["rows"][0]] * 2, "claims": []}, "two rows have one name"),
        ({"rows": [{"name": name, "method": "fedavg"} for name in ("a", "A!")], "claims": []}, "or one folder"),
        (
            {"rows": [{"name": name, "method": "mpgan", "gan": "a"} for name in ("a", "b")], "claims": []},
            "row 'a' takes the generator of 'a', which takes one itself",
        ),
        ({"tables": 1}, "Extra inputs are not permitted"),
    ],
)
def test_files_that_do_not_fit_together(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Experiment(**MINIMAL | change)


def test_names_and_seeds_that_are_wrong_are_told() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'flea-har'"):
        read_experiment("flea-hra")
    with pytest.raises(ConfigError, match="--seeds takes seeds and ranges"):
        plan_experiment(Experiment(**MINIMAL), PaperRequest("x", "small", "a-b"))
