"""What `fedrpc paper` tells when not all of its runs are there."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedrpc.errors import ConfigError, UnknownName
from fedrpc.launch import paper, usage
from fedrpc.launch.compare import SomeFailed
from fedrpc.launch.jobs import Interrupted, Workshop
from fedrpc.launch.paper import PaperRequest, collect_results, plan_experiment, run_experiment
from fedrpc.launch.usage import USAGE_FILE, sum_usage
from fedrpc.report.paper_words import list_circumstances
from fedrpc.study.cells import Failure
from fedrpc.study.experiment import Experiment, Row
from fedrpc.study.reading import Run

REQUEST = PaperRequest("mine", "small", "0-2")
EXPERIMENT = Experiment(
    title="a title",
    paper="a paper",
    where="Table 1",
    reduced="rounds",
    measures=["last10", "best"],
    setting={"rounds": 2},
    small={},
    rows=[
        {"name": "FedAvg, two shards", "method": "fedavg", "set": {"partition": "shards:2"}},
        {"name": "FedAvg, IID", "method": "fedavg"},
        {"name": "FedProx", "method": "fedprox"},
    ],
    claims=[
        {"says": "it falls", "measure": "last10", "lower": "FedAvg, two shards", "than": "FedAvg, IID", "by": 30.0}
    ],
)
DONE = ("fedavg-two-shards-seed=0", "fedavg-iid-seed=0", "fedavg-iid-seed=1")


def finished_run(folder: Path) -> Run:
    last = 60.0 if "two-shards" in folder.name else 97.0
    tasks = {"cpu": 36.0, "peak_bytes": 1000}
    summary = {"accuracy": {"last10": last, "best": last}, "seconds": 72.0, "time": {"tasks": tasks}, "version": "1"}
    summary["commit"] = "0123456789ab" if "two-shards" in folder.name else None
    records = [{"event": "evaluated", "round": index, "accuracy": last + index} for index in range(2)]
    return Run(folder, {}, summary, records, {})


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], str]]:
    """Runs the experiment with some of its runs finished; gives results.json, and what was printed."""

    def call(
        run_and_show: Callable[..., Any], request: PaperRequest = REQUEST, **options: Any
    ) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr(paper, "read_experiment", lambda _: EXPERIMENT)
        monkeypatch.setattr(paper, "run_and_show", run_and_show)
        monkeypatch.setattr(paper, "is_finished", lambda run: run.out.name in DONE)
        monkeypatch.setattr(paper, "read_run", finished_run)
        out = io.StringIO()
        try:
            run_experiment(request, tmp_path, None, "warning", Console(file=out, width=200), **options)
        except (Interrupted, SomeFailed) as error:
            print(f"raised: {type(error).__name__}", file=out)
        return json.loads((tmp_path / "results.json").read_text()), out.getvalue()

    return call


def check(results: dict[str, Any], told: str) -> None:
    assert [[*row["seeds"]] for row in results["rows"]] == [["0"], ["0", "1"], []]
    assert len(results["missing"]) == 6
    [claim] = results["claims"]
    assert (claim["verdict"], claim["difference"]["n"], claim["difference"]["mean"]) == ("partly", 1, 7.0)
    assert results["curves"]["FedAvg, IID"]["1"] == {"rounds": [1, 2], "accuracy": [97.0, 98.0]}
    assert results["cost"] == {"hours": 0.06, "core_hours": None, "client_core_hours": 0.03, "peak_bytes": 1000}
    assert results["version"] == "1 and 1 (0123456789ab)"
    assert "partly, one seed only: it falls" in told
    assert "FedAvg, two shards, seed 1" in told, "it is missing"


def test_a_signal_leaves_what_there_is(play: Callable[..., tuple[dict[str, Any], str]]) -> None:
    def stop(*_: Any) -> list[Failure]:
        raise Interrupted("stopped", 130)

    results, told = play(stop)
    check(results, told)
    assert "raised: Interrupted" in told


def test_a_failed_run_leaves_the_others(play: Callable[..., tuple[dict[str, Any], str]]) -> None:
    results, told = play(lambda runs, *_: [Failure(run.cell, "odd") for run in runs if run.cell.run.name not in DONE])
    check(results, told)
    assert "raised: SomeFailed" in told


def test_show_starts_nothing(play: Callable[..., tuple[dict[str, Any], str]]) -> None:
    def never(*_: Any) -> list[Failure]:
        raise AssertionError("something was started")

    check(*play(never, show=True))


def test_a_parameter_is_changed_where_a_method_has_it() -> None:
    changed = PaperRequest("mine", "small", "0", {"rounds": 3, "params": {"mu": 0.5}})
    runs = plan_experiment(EXPERIMENT, changed)
    assert [(run.config.method, run.config.rounds, run.config.params.get("mu")) for run in runs] == [
        ("fedavg", 3, None),
        ("fedavg", 3, None),
        ("fedprox", 3, 0.5),
    ]


def test_a_parameter_that_no_method_has_is_refused() -> None:
    with pytest.raises(
        UnknownName, match=r"parameter of fedavg, fedprox 'params\.muu'; .* Did you mean 'params\.mu'\?$"
    ):
        plan_experiment(EXPERIMENT, PaperRequest("mine", "small", "0", {"params": {"muu": 0.5}}))
    with pytest.raises(ConfigError, match="params is a table, got 5"):
        plan_experiment(EXPERIMENT, PaperRequest("mine", "small", "0", {"params": 5}))


def test_only_some_rows() -> None:
    request = PaperRequest("mine", "small", "0", rows=["FedProx", "FedAvg, IID"])
    assert [run.cell.note for run in plan_experiment(EXPERIMENT, request)] == ["FedAvg, IID", "FedProx"]
    assert request.command == "fedrpc paper mine --small --seeds 0 --row FedProx --row 'FedAvg, IID'"
    with pytest.raises(UnknownName, match=r"unknown row 'FedProxx'; .* Did you mean 'FedProx'\?$"):
        plan_experiment(EXPERIMENT, PaperRequest("mine", "small", "0", rows=["FedProxx"]))


def test_extra_rows_run_in_small_only_when_they_are_named() -> None:
    rows = [row.model_copy(update={"extra": row.name == "FedProx"}) for row in EXPERIMENT.rows]
    experiment = EXPERIMENT.model_copy(update={"rows": rows})

    def list_rows(request: PaperRequest) -> list[str]:
        return [run.cell.note for run in plan_experiment(experiment, request)]

    assert list_rows(PaperRequest("mine", "small", "0")) == ["FedAvg, two shards", "FedAvg, IID"]
    assert list_rows(PaperRequest("mine", "small", "0", rows=["FedProx"])) == ["FedProx"]
    assert list_rows(PaperRequest("mine", "paper", "0")) == [row.name for row in rows]


def test_a_row_brings_the_one_whose_generator_it_takes() -> None:
    rows = [{"name": "GAN", "method": "mpgan"}, {"name": "with", "method": "mpgan", "gan": "GAN"}]
    experiment = EXPERIMENT.model_copy(update={"rows": [Row(**row) for row in rows], "setting": {}})
    chosen = plan_experiment(experiment, PaperRequest("mine", "small", "0", rows=["with"]))
    assert [run.cell.note for run in chosen] == ["GAN", "with"]


def test_changes_of_the_classifier_leave_a_row_alone_whose_generator_others_take() -> None:
    rows = [{"name": "GAN", "method": "mpgan"}, {"name": "with", "method": "mpgan", "gan": "GAN"}]
    experiment = EXPERIMENT.model_copy(update={"rows": [Row(**row) for row in rows], "setting": {}})
    changes = {
        "train": {"epochs": 3, "threads": 2},  # threads change what any network comes to
        "model": "cnn-dropout",
        "rounds": 9,
        "partition": "iid",
        "params": {"steps": 7},
    }
    giver, taker = (
        run.config for run in plan_experiment(experiment, PaperRequest("mine", "small", "0", changes=changes))
    )
    assert (taker.train.epochs, taker.train.threads, taker.model, taker.rounds) == (3, 2, "cnn-dropout", 9)
    plain = plan_experiment(experiment, PaperRequest("mine", "small", "0"))[0].config
    assert giver == plain.model_copy(
        update={
            "partition": "iid",
            "params": plain.params | {"steps": 7},
            "train": plain.train.model_copy(update={"threads": 2}),
        }
    )
    with pytest.raises(ConfigError, match="epoch"):  # where it does not apply, too
        plan_experiment(experiment, PaperRequest("mine", "small", "0", changes={"train": {"epoch": 3}}, rows=["GAN"]))


def test_results_name_the_rows_that_changes_of_the_classifier_leave_alone(tmp_path: Path) -> None:
    rows = [{"name": "GAN", "method": "mpgan"}, {"name": "with", "method": "mpgan", "gan": "GAN"}]
    experiment = EXPERIMENT.model_copy(update={"rows": [Row(**row) for row in rows], "setting": {}, "claims": []})
    for changes, told in (
        ({"train": {"lr": 0.5}}, "changed: train.lr=0.5; row GAN has only those that its images depend on"),
        ({"params": {"steps": 7}}, "changed: params.steps=7"),
    ):
        found = collect_results(experiment, replace(REQUEST, changes=changes), Workshop(tmp_path, None, "info"), [])
        assert told in list_circumstances(found | {"cost": found["cost"] | {"peak_bytes": 0}})


def test_nothing_is_written_of_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paper, "read_experiment", lambda _: EXPERIMENT)
    monkeypatch.setattr(paper, "is_finished", lambda _: False)
    out = io.StringIO()
    run_experiment(REQUEST, tmp_path / "new", None, "warning", Console(file=out), show=True)
    assert "is finished" in out.getvalue()
    assert not [*tmp_path.iterdir()]


def test_a_part_is_told_beside_the_other_finished_runs_of_the_folder(
    play: Callable[..., tuple[dict[str, Any], str]], tmp_path: Path
) -> None:
    for name in (*DONE, "fedprox-seed=0", "fedprox-seed=odd", "stray-seed=0"):
        (tmp_path / name).mkdir()
    whole, _ = play(lambda *_: [], show=True)
    assert play(lambda *_: [], show=True)[0] == whole, "the same again"
    assert whole["command"] == "fedrpc paper mine --small --seeds 0-2"
    part = replace(REQUEST, seeds="1", rows=["FedAvg, IID"])
    found, told = play(lambda *_: [], show=True, request=part)
    for name in ("rows", "curves", "claims", "cost", "version"):
        assert found[name] == whole[name], name
    assert found["missing"] == []
    rows = "--row 'FedAvg, two shards' --row 'FedAvg, IID'"
    assert found["command"] == f"fedrpc paper mine --small --seeds 0-1 {rows}"
    (tmp_path / DONE[0]).rmdir()
    found, told = play(lambda *_: [], show=True, request=replace(REQUEST, seeds="2", rows=["FedProx"]))
    assert [[*row["seeds"]] for row in found["rows"]] == [[], ["0", "1"], []]
    assert found["missing"] == ["FedProx, seed 2"]
    assert "without runs: 1 claim\n" in told


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "other"}, "has results of mine, small, not of other, small; give"),
        ({"size": "paper"}, "has results of mine, small, not of mine at the paper's size; give"),
        ({"changes": {"train": {"lr": 0.5}}}, "not of mine, small, with train.lr=0.5; give"),
    ],
)
def test_a_folder_of_other_results_is_refused_before_anything_starts(
    play: Callable[..., tuple[dict[str, Any], str]], change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    def never(*_: Any) -> list[Failure]:
        raise AssertionError("something was started")

    play(lambda *_: [])
    play(lambda *_: [], request=replace(REQUEST, **change))  # it has no run
    play(lambda *_: [])
    (tmp_path / DONE[0]).mkdir()
    with pytest.raises(ConfigError, match=said):
        play(never, request=replace(REQUEST, **change))


def test_changes_in_another_order_are_the_same_settings(
    play: Callable[..., tuple[dict[str, Any], str]], tmp_path: Path
) -> None:
    (tmp_path / DONE[0]).mkdir()
    play(lambda *_: [], request=replace(REQUEST, changes={"rounds": 3, "seed": 1}))
    play(lambda *_: [], request=replace(REQUEST, changes={"seed": 1, "rounds": 3}))


def test_usage_is_summed_over_every_start_and_unknown_of_a_run_without(tmp_path: Path) -> None:
    for name in ("a", "b", "a"):
        usage.note_usage(tmp_path / name)
    rows = [json.loads(line) for line in (tmp_path / USAGE_FILE).read_text().splitlines()]
    found = sum_usage(tmp_path, [tmp_path / "a"])
    assert found is not None
    assert found.cpu_s == pytest.approx(rows[0]["cpu_s"] + rows[2]["cpu_s"])
    assert found.peak_bytes == max(row["peak_bytes"] for row in rows) > 10_000_000
    assert sum_usage(tmp_path, [tmp_path / "a", tmp_path / "c"]) is None
    assert sum_usage(tmp_path / "nowhere", [tmp_path / "a"]) is None
