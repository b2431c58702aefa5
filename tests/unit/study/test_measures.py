"""What is read off a run for an experiment, of records as runs leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedrpc.study.measures import MEASURES, STUDY_FILE
from fedrpc.study.reading import Run


def read(
    name: str, *rows: dict[str, Any], folder: Path = Path(), partition: dict[str, Any] | None = None, **summary: Any
) -> float | None:
    return MEASURES[name][1](Run(folder, {}, summary, rows, partition or {}))


def finished(index: int, **values: Any) -> dict[str, Any]:
    return {"event": "round_finished", "round": index, **values}


def evaluated(index: int, **values: Any) -> dict[str, Any]:
    return {"event": "evaluated", "round": index, **values}


def test_the_tail_is_the_last_ten_rounds_and_the_end_the_last_evaluation() -> None:
    rows = [evaluated(index, class_variance=index) for index in range(20)]
    assert read("class_variance", *rows, num_rounds=20) == pytest.approx(14.5)
    assert read("class_variance_end", *rows, evaluated(20)) == 19
    assert read("client_variance_end", *rows) is None


def test_early_rounds_are_6_to_20() -> None:
    assert read("early", *(finished(index, accuracy=index) for index in range(30))) == pytest.approx(12)
    assert read("early", finished(0, accuracy=5)) is None


def test_correlations_of_single_rounds_and_of_the_end() -> None:
    rows = [finished(index, dcor=index / 100) for index in range(20)]
    assert [read(name, *rows) for name in ("dcor_1", "dcor_10", "dcor")] == pytest.approx([0.0, 0.09, 0.145])
    assert read("dcor", finished(0)) is None


def test_the_middle_of_a_run_is_a_share_of_its_rounds() -> None:
    rows = [finished(index, accuracy=index) for index in range(20)]
    assert read("middle", *rows, num_rounds=20) == pytest.approx(10.5)
    assert read("middle", *rows[:8], num_rounds=20) is None


def test_the_swing_is_the_variance_of_the_last_ten_accuracies() -> None:
    rows = [finished(index, accuracy=0.0) for index in range(10)]
    late = [finished(index, accuracy=50.0 + 2 * (index % 2)) for index in range(10, 20)]
    assert read("swing", *rows, *late, num_rounds=20) == pytest.approx(1.0)
    assert read("swing", finished(19, accuracy=50.0), num_rounds=20) is None


def test_local_losses_are_of_the_last_ten_rounds() -> None:
    early = [finished(index, local_losses={"0": [9.0, 8.0]}) for index in range(5)]
    late = [finished(index, local_losses={"0": [2.0, 1.0, 0.5], "1": [4.0, 1.0, 0.5]}) for index in range(5, 15)]
    assert read("first_loss", *early, *late) == 3.0
    assert read("loss_drop", *early, *late) == 2.5
    assert read("train_loss", *early, *late) == 0.5
    assert read("train_loss", finished(0, local_losses={"0": [1.0, None], "1": [1.0, 0.5]})) == 0.5
    assert read("loss_drop", finished(0), finished(1, local_losses={})) is None


def test_exposure_is_that_of_the_kind_that_reached_most() -> None:
    assert read("exposure", exposure={"activations": 0.25, "samples": 0.5}) == 50
    assert read("exposure", exposure={}) is None


def test_what_filters_let_through() -> None:
    rates = {"3": {"0": 0.5, "1": 0.0}, "4": {"2": 1.0}}
    assert read("accepted", finished(0), finished(1, acceptance=rates)) == 50
    levels = {"0": {"acceptance_rate": 0.25, "label_histogram": [3, 0, 1]}, "1": {"acceptance_rate": 1.0}}
    assert read("accepted", finished(0, labelling=levels), finished(1, labelling=levels)) == 25
    assert read("classes_made", finished(0, labelling=levels)) == 2
    none_wanted = {"0": {"acceptance_rate": None, "label_histogram": [0, 0]}}
    assert read("accepted", finished(0, labelling=none_wanted)) is None
    first = {"0": {"acceptance_rate": 0.0, "label_histogram": [0, 0, 0]}}
    assert read("accepted", finished(0, labelling=first), finished(1, labelling=levels)) == 25, "it is tried again"
    assert read("accepted", finished(0)) is read("classes_made", finished(0)) is None


def test_values_of_a_study(tmp_path: Path) -> None:
    assert read("rebuilt_mse", folder=tmp_path) is None
    (tmp_path / STUDY_FILE).write_text(json.dumps({"values": {"mse": 0.5, "mark_few": None}}))
    assert read("rebuilt_mse", folder=tmp_path) == 0.5
    assert read("mark_few", folder=tmp_path) is None
    assert read("db_gap", folder=tmp_path) is None


def test_images_that_clients_were_given() -> None:
    def level(given: str) -> dict[str, Any]:
        return {"given_out": given}

    tried = finished(0, labelling={"0": level("no: too few")})
    assert read("given", finished(0)) is None
    assert read("given", finished(0, labelling={"0": level("none wanted")})) is None
    assert read("given", tried, finished(1, labelling={"0": level("no: too few")})) == 0
    assert read("given", tried, finished(1, labelling={"0": level("yes")})) == 100
    assert read("given", tried, finished(1, labelling={"0": level("yes"), "1": level("no: too few")})) == 50


def test_the_discriminators_loss_at_the_end_and_how_far_it_fell() -> None:
    losses = [5.0, 4.0, *[3.0] * 17, 1.0, 0.5]  # 21 windows: a tenth is three
    assert read("adversary", finished(0), finished(1, discriminator_losses=losses)) == pytest.approx(1.5)
    assert read("adversary_drop", finished(0, discriminator_losses=losses)) == pytest.approx(2.5)
    assert read("adversary_drop", finished(0, discriminator_losses=[2.0])) == 0
    assert read("adversary", finished(0, discriminator_losses=[None, 2.0])) == 2
    assert read("adversary", finished(0, discriminator_losses=[None])) is None
    assert read("adversary", finished(0)) is read("adversary_drop", finished(0, discriminator_losses=[])) is None


def test_the_skew_of_a_split_is_that_of_its_clients() -> None:
    assert read("skew", partition={"class_variance": {"mean": 0.04, "min": 0.01, "max": 0.09}}) == 0.04
