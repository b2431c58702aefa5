"""Studies of finished runs for experiments: what they compute, when again, and rows that take a generator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedrpc.errors import ConfigError
from fedrpc.launch import studies
from fedrpc.launch.paper import PaperRequest, plan_experiment
from fedrpc.launch.studies import study_finished
from fedrpc.study import local_round
from fedrpc.study.experiment import Experiment, Row
from fedrpc.study.local_round import average, draw_clients, study_local_round
from fedrpc.study.measures import STUDY_FILE
from tests.fakes import problem_of
from tests.finished import finished_run
from tests.unit.study.test_experiment import MINIMAL


def test_a_study_is_computed_once_for_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def count(folder: Path, data_dir: Path | None, **options: Any) -> dict[str, Any]:
        asked.append(options)
        return {"mse": 1.0}

    monkeypatch.setattr(studies, "STUDIES", {"attack": count})
    computed = [study_finished(tmp_path, "attack", {"aux": aux}, None) for aux in (5, 5, 6)]
    assert (computed, asked) == ([True, False, True], [{"aux": 5}, {"aux": 6}])
    assert json.loads((tmp_path / STUDY_FILE).read_bytes()) == {
        "name": "attack",
        "options": {"aux": 6},
        "values": {"mse": 1.0},
    }


def test_options_of_a_study_by_row_and_size() -> None:
    study = {"name": "attack", "options": {"aux": 10, "epochs": 1}, "small": {"aux": 5}}
    experiment = Experiment(**MINIMAL | {"study": study})
    row = Row(name="x", method="flea", study={"epochs": 2}, small_study={"samples": 3})
    assert experiment.choose_options(row, "paper") == {"aux": 10, "epochs": 2}
    assert experiment.choose_options(row, "small") == {"aux": 5, "epochs": 2, "samples": 3}


def test_rows_take_the_generator_of_the_same_seed_and_come_after_it() -> None:
    rows = [
        {"name": "With it", "method": "mpgan", "gan": "The GAN", "set": {"params": {"a_f": "0.5"}}},
        {"name": "The GAN", "method": "mpgan"},
    ]
    experiment = Experiment(**MINIMAL | {"rows": rows, "claims": []})
    runs = plan_experiment(experiment, PaperRequest("x", "small", "0,1"), Path("there"))
    taken = {run.label: run.config.params["gan"] for run in runs}
    assert taken["With it, seed 1"] == "there/the-gan-seed=1"
    assert taken["The GAN, seed 1"] is None
    needed = {run.label: run.after for run in runs}
    assert needed["With it, seed 1"] == next(run.cell.run for run in runs if run.label == "The GAN, seed 1")
    assert needed["The GAN, seed 1"] is None


def test_one_more_local_round_of_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_round, "MEASURED", 100)
    finished_run(tmp_path, "fedavg", train_size=200)
    found = study_local_round(tmp_path, None, clients=2, examples=20, shared=10)
    assert found["gap"] == found["local_test"] - found["local_train"]  # type: ignore[operator]
    assert found["change"] == found["after"] - found["before"]  # type: ignore[operator]
    assert found == study_local_round(tmp_path, None, clients=2, examples=20, shared=10)
    assert found["local_train"] != study_local_round(tmp_path, None, clients=2, examples=20)["local_train"]
    with pytest.raises(ConfigError, match="3 clients of 70 examples and 0 shared ones need 210, but the run has"):
        study_local_round(tmp_path, None, clients=3, examples=70)


def test_drawn_clients_are_disjoint_but_for_what_they_share() -> None:
    problem = problem_of("fedavg", train_size=100)
    one, two = draw_clients(problem, 2, 30, 5)
    x, y = (data.batch(np.arange(35))[0].flatten(1) for data in (one, two))
    same = (x[:, None] == y[None]).all(-1)
    assert (len(one), int(same.sum())) == (35, 5)
    assert bool(same[30:, 30:].diagonal().all())


def test_models_are_averaged_and_counters_kept() -> None:
    models = [
        {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)},
        {"w": torch.tensor([3.0, 4.0]), "n": torch.tensor(5)},
    ]
    found = average(models)
    assert found["w"].tolist() == [2.0, 3.0]
    assert int(found["n"]) == 5


def test_an_inversion_says_how_often_an_oracle_agrees(tmp_path: Path) -> None:
    finished_run(tmp_path, "fedavg", train_size=200)
    assert study_finished(tmp_path, "inversion", {"per_class": 2, "iterations": 2, "oracle_epochs": 1}, None)
    values = json.loads((tmp_path / STUDY_FILE).read_bytes())["values"]
    assert 0 <= values["oracle_on_made"] <= 100
    assert (tmp_path / "synthetic.png").is_file()
