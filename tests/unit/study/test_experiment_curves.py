"""The curves that an experiment's results keep of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedrpc.study.experiment_curves import MAX_POINTS, choose_curves, read_curves
from fedrpc.study.reading import Run


def play(num_rounds: int, **values: Any) -> Run:
    rows: list[dict[str, Any]] = []
    for index in range(num_rounds):
        rows.append({"event": "round_finished", "round": index, **values})
        rows.append({"event": "evaluated", "round": index, "accuracy": 50.123456})
    return Run(Path(), {}, {}, rows, {})


def test_the_training_loss_is_the_mean_of_the_clients_last_epochs() -> None:
    run = play(2, local_losses={"0": [3.0, 1.0], "1": [5.0, 2.0]})
    assert read_curves(run, ["accuracy", "train_loss"]) == {
        "rounds": [1, 2],
        "accuracy": [50.12, 50.12],
        "train_loss": [1.5, 1.5],
    }


@pytest.mark.parametrize("losses", [{}, {"local_losses": {"0": [1.0, None]}}], ids=["not recorded", "not finite"])
def test_a_round_without_a_training_loss_has_none(losses: dict[str, Any]) -> None:
    assert read_curves(play(1, **losses), ["train_loss"])["train_loss"] == [None]


def test_curves_are_those_of_the_measures() -> None:
    assert choose_curves(["last10", "train_loss"]) == ["accuracy", "train_loss"]
    assert choose_curves(["class_variance"]) == ["accuracy", "class_variance"]
    assert choose_curves(["overhead", "tensor_bytes"]) == []


def test_long_curves_are_thinned() -> None:
    assert len(read_curves(play(3 * MAX_POINTS), ["accuracy"])["rounds"]) <= MAX_POINTS
