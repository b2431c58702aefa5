"""The curves of an experiment's runs: accuracy, and what else it measures in every round, small enough to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedrpc.study.overhead import COSTS
from fedrpc.study.reading import Run

ACCURACY, CLASS_VARIANCE, TRAINING_LOSS = "accuracy", "class_variance", "train_loss"
_MEASURED = (CLASS_VARIANCE, TRAINING_LOSS)  # what has a curve where an experiment measures it
MAX_POINTS = 200  # of a run: longer ones are thinned
_OF_COSTS = frozenset({"overhead", "bytes", *COSTS})
_DIGITS = 4  # significant ones, more than a plot shows


def choose_curves(measures: Sequence[str]) -> list[str]:
    """Which curves tell something of these measures; none of costs."""
    if _OF_COSTS.issuperset(measures):
        return []
    return [ACCURACY, *(name for name in _MEASURED if name in measures)]


def read_curves(run: Run, names: Sequence[str]) -> dict[str, list[Any]]:
    """The evaluated rounds, counted from 1, and the values of each curve then; None where there is none."""
    rows = [row for row in run.records if row["event"] == "evaluated" and not row.get("final")]
    rows = rows[:: -(-len(rows) // MAX_POINTS) or 1]
    if TRAINING_LOSS in names:
        losses = {row["round"]: _read_training_loss(row) for row in run.rounds}
        rows = [{**row, TRAINING_LOSS: losses.get(row["round"])} for row in rows]
    return {
        "rounds": [int(row["round"]) + 1 for row in rows],
        **{name: [_shorten(row.get(name)) for row in rows] for name in names},
    }


def _read_training_loss(row: Mapping[str, Any]) -> float | None:
    """The mean over clients of the loss in their last local epoch."""
    values = [losses[-1] for losses in (row.get("local_losses") or {}).values() if None not in losses]
    return fmean(values) if values else None


def _shorten(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")
