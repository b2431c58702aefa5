"""Describes a run, and a row of runs that differ only in their seed, as compare.json has them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedrpc.privacy.words import describe_epsilon
from fedrpc.registry import METHODS
from fedrpc.study.cells import Cell
from fedrpc.study.reading import Run
from fedrpc.study.statistics import compare_pairs, summarize_values
from fedrpc.study.targets import Point, find_at_budget, find_target, list_points
from fedrpc.study.whatif import Prediction, predict_over
from fedrpc.wire.kinds import DIRECTIONS, Kind

_SOURCES = ("measured", "predicted")
_COSTS = ("rounds", "bytes", "seconds", "predicted")  # of a target


def sum_tensor_bytes(run: Run) -> int:
    """The tensor bytes of the method's own phases, both ways."""
    return sum(int(run.summary["bytes"]["method"][direction]["tensor"]) for direction in DIRECTIONS)


# A run


def describe_run(
    cell: Cell,
    run: Run,
    folder: Path,
    baseline: Run | None,
    targets: Sequence[float],
    byte_budget: int | None,
    link: str | None,
) -> dict[str, Any]:
    """One run of a row.

    Args:
        folder: What its run directory is named relative to.
        baseline: FedAvg's run of the same seed, network and settings.
        link: Over which its time is predicted; its own when None.
    """
    predicted = predict_over(run, link)
    summary, points = run.summary, list_points(run)
    part, accuracy = summary["bytes"], summary["accuracy"]
    measured = sum_tensor_bytes(run)
    time = summary.get("time", {})
    tasks = time.get("tasks", {})
    return {
        "run": Path(os.path.relpath(run.folder, folder)).as_posix(),
        "seed": cell.seed,
        "accuracy": {"last": accuracy["global"]}
        | {name: accuracy[name] for name in ("last10", "best", "best_round", "best_is")}
        if accuracy
        else None,
        "bytes": {
            "by_kind": _sum_by_kind(part),
            "tensor": {"measured": measured, "predicted": part["predicted"]["total"]},
            "message": sum(part["method"][direction]["message"] for direction in DIRECTIONS),
            "kernel": None if run.summary.get("in_process") else sum(part["total"][d]["kernel"] for d in DIRECTIONS),
            "kernel_note": part["kernel_note"],
        },
        "formula": summary.get("formula", {}),
        "overhead": _compute_overhead(run, baseline),
        "seconds": summary["seconds"],
        "cpu_seconds": tasks.get("cpu"),
        "peak_bytes": tasks.get("peak_bytes"),
        "predicted": _describe_prediction(*predicted, points) if predicted else None,
        "parts": time.get("parts"),
        "emulated": summary.get("emulated"),
        "reproducible": summary.get("reproducible"),
        "num_rounds": summary["num_rounds"],
        "stopped": summary.get("stopped"),
        "privacy": _summarize_privacy(summary["privacy"]),
        "model_sha256": summary["model_sha256"],
        "curve": [[point.round, point.num_bytes, point.accuracy, point.seconds] for point in points],
        "targets": [
            _describe_target(points, target, summary["num_rounds"], predicted[1] if predicted else None)
            for target in targets
        ],
        "at_budget": None if byte_budget is None else find_at_budget(points, byte_budget),
    }


def _describe_prediction(link: str, predicted: Prediction, points: Sequence[Point]) -> dict[str, Any]:
    return {"link": link, "seconds": predicted.seconds, "until": [predicted.until(point.round) for point in points]}


def _compute_overhead(run: Run, baseline: Run | None) -> float | None:
    """Tensor bytes over those of FedAvg's run, or of its formula when that had other rounds, as under a byte budget."""
    if baseline is None or baseline.summary["num_rounds"] != run.summary["num_rounds"]:
        found: float | None = run.summary["bytes"]["overhead_vs_fedavg"]
        return found
    beside = sum_tensor_bytes(baseline)
    return sum_tensor_bytes(run) / beside if beside else None


def _describe_target(
    points: Sequence[Point], target: float, num_rounds: int, predicted: Prediction | None
) -> dict[str, Any]:
    found = find_target(points, target, num_rounds) or dict.fromkeys(("rounds", "bytes", "seconds"))
    seconds = predicted.until(found["rounds"] - 1) if predicted and found["rounds"] else None
    return {"target": target} | found | {"predicted": seconds}


def _sum_by_kind(part: Mapping[str, Any]) -> dict[str, Any]:
    """Tensor bytes by kind, direction and source, of the kinds that have any."""
    found = {}
    for kind in Kind:
        sides = {
            direction: {
                "measured": part["method"][direction]["by_kind"].get(kind.label, {"tensor": 0})["tensor"],
                "predicted": part["predicted"]["by_kind"][direction].get(kind.label, 0),
            }
            for direction in DIRECTIONS
        }
        if any(value for side in sides.values() for value in side.values()):
            found[kind.label] = sides
    return found


def _summarize_privacy(privacy: Mapping[str, Any]) -> dict[str, Any]:
    text = str(privacy["reason"]) if privacy["epsilon"] is None else describe_epsilon(privacy)
    return {name: privacy[name] for name in ("epsilon", "delta", "reason")} | {"text": text}


def shows_raw_data(run: Run) -> bool:
    """Whether raw data leaves clients by design or by what was sent, or the run used an oracle trained on it."""
    method = run.summary["method"]
    shares = method in METHODS and METHODS[method].shares_raw_data
    sends = Kind.SAMPLES.label in _sum_by_kind(run.summary["bytes"])
    return shares or sends or any("oracle" in row for row in run.records)


def describe_sharing(run: Run) -> str:
    """What leaves a client besides weights and scalars, with the method's caveat."""
    method = run.summary["method"]
    shares = METHODS[method].shares if method in METHODS else "not known: the method is not installed here"
    return str(shares) + (f"; {run.summary['caveat']}" if run.summary.get("caveat") else "")


# A row


def describe_row(
    cell: Cell, first: Run, runs: Sequence[Mapping[str, Any]], baseline: str | None, beside: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The runs of one row together.

    Args:
        cell: Any of the row's.
        first: The run of its first seed.
        runs: What `describe_run` gave for each seed.
        baseline: The name of FedAvg's row on the same network and at the same point.
        beside: The runs of that row.
    """
    statistics = _summarize(runs)
    others = _summarize(beside)
    num_bytes = statistics["message"], statistics["kernel"]
    method = cell.method
    return {
        "name": cell.row,
        "labels": cell.labels,
        "method": method,
        "model": cell.model,
        "needs_model": method in METHODS and bool(cell.model) and METHODS[method].needs_model == cell.model,
        "point": dict(cell.point),
        "note": cell.note,
        "params": dict(first.config.get("params", {})),
        "shares": describe_sharing(first),
        "raw_data": shows_raw_data(first),
        "runs": list(runs),
        "baseline": baseline,
        "accuracy": _average_accuracy(runs, statistics),
        "bytes": {
            "by_kind": _average_kinds(runs),
            "tensor": {s: round(fmean(run["bytes"]["tensor"][s] for run in runs)) for s in _SOURCES},
            "message": round(num_bytes[0]["mean"]),
            "kernel": round(num_bytes[1]["mean"]) if num_bytes[1] else None,
            "kernel_note": next((run["bytes"]["kernel_note"] for run in runs if run["bytes"]["kernel_note"]), ""),
        },
        "formula": _join_formulas(runs),
        "overhead": _get_mean(statistics, "overhead"),
        "seconds": statistics["seconds"]["mean"],
        "privacy": max((run["privacy"] for run in runs), key=_rank_privacy),
        "model_sha256": runs[0]["model_sha256"] if len(runs) == 1 else None,
        "curve": _average_curve([run["curve"] for run in runs]),
        "parts": _average_parts([run["parts"] for run in runs]),
        "statistics": statistics,
        "difference": {
            name: None if baseline == cell.row else _compare(runs, beside, name) for name in ("last", "last10")
        },
        "cost": {
            "communication": _relate(statistics, others, "tensor") | {"ratio": _get_mean(statistics, "overhead")},
            "computation": _relate(statistics, others, "cpu_seconds"),
            "memory": _relate(statistics, others, "peak_bytes"),
        },
        "time": _describe_time(runs, statistics),
        "targets": _join_targets(runs),
        "at_budget": summarize_values(run["at_budget"] and run["at_budget"]["accuracy"] for run in runs),
    }


def _describe_time(runs: Sequence[Mapping[str, Any]], statistics: Mapping[str, Any]) -> dict[str, Any]:
    predicted = [run["predicted"] for run in runs if run["predicted"]]
    return {
        "measured": statistics["seconds"]["mean"],
        "predicted": fmean(each["seconds"] for each in predicted) if predicted else None,
        "link": predicted[0]["link"] if predicted else None,
    }


def _summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{mean, sd, n} of every value of a run that has one."""
    read = {
        **{name: [_get_accuracy(run, name) for run in runs] for name in ("last", "last10", "best")},
        "tensor": [run["bytes"]["tensor"]["measured"] for run in runs],
        **{name: [run["bytes"][name] for run in runs] for name in ("message", "kernel")},
        **{name: [run[name] for run in runs] for name in ("overhead", "seconds", "cpu_seconds", "peak_bytes")},
        "num_rounds": [run["num_rounds"] for run in runs],
    }
    return {name: summarize_values(values) for name, values in read.items()}


def _get_accuracy(run: Mapping[str, Any], name: str) -> float | None:
    return run["accuracy"][name] if run["accuracy"] else None


def _average_accuracy(runs: Sequence[Mapping[str, Any]], statistics: Mapping[str, Any]) -> dict[str, Any] | None:
    """The mean accuracies; the round of the best one only of a single run."""
    if not statistics["last"]:
        return None
    evaluated = [run["accuracy"] for run in runs if run["accuracy"]]
    return {name: statistics[name]["mean"] for name in ("last", "last10", "best")} | {
        "best_round": evaluated[0]["best_round"] if len(evaluated) == 1 else None,
        "best_is": evaluated[0]["best_is"],
    }


def _average_kinds(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tables = [run["bytes"]["by_kind"] for run in runs]

    def average(kind: str, direction: str, source: str) -> int:
        return round(fmean(table[kind][direction][source] if kind in table else 0 for table in tables))

    return {
        kind.label: {d: {source: average(kind.label, d, source) for source in _SOURCES} for d in DIRECTIONS}
        for kind in Kind
        if any(kind.label in table for table in tables)
    }


def _join_formulas(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where any run differs from its formula."""
    formulas = [run["formula"] for run in runs if run["formula"]]
    if not formulas:
        return {}
    return {
        "not_compared": next((found["not_compared"] for found in formulas if found["not_compared"]), ""),
        "differs": [entry for found in formulas for entry in found["differs"]],
    }


def _rank_privacy(privacy: Mapping[str, Any]) -> tuple[bool, float]:
    return privacy["epsilon"] is None, privacy["epsilon"] or 0.0


def _average_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """The mean of all runs at each round that every one of them has evaluated."""
    tables = [{point[0]: point for point in curve} for curve in curves]
    rounds = sorted(set.intersection(*(set(table) for table in tables)))
    return [
        [index, *(fmean(table[index][place] for table in tables) for place in (1, 2, 3))]
        if len(tables) > 1
        else list(tables[0][index])
        for index in rounds
    ]


def _average_parts(tables: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    """The mean seconds of each part, over the runs that measured them."""
    known = [table for table in tables if table]
    return {part: fmean(table[part] for table in known) for part in known[0]} if known else None


def _compare(
    runs: Sequence[Mapping[str, Any]], beside: Sequence[Mapping[str, Any]], name: str
) -> dict[str, Any] | None:
    """The differences in accuracy to FedAvg's run of the same seed."""
    others = {run["seed"]: _get_accuracy(run, name) for run in beside}
    pairs = [(_get_accuracy(run, name), others.get(run["seed"])) for run in runs]
    return compare_pairs([(one, two) for one, two in pairs if one is not None and two is not None])


def _relate(statistics: Mapping[str, Any], others: Mapping[str, Any], name: str) -> dict[str, float | None]:
    """A value of a row, and its ratio to the baseline's; none where they had other rounds, as under a byte budget."""
    value, other = (_get_mean(found, name) for found in (statistics, others))
    is_fair = _get_mean(statistics, "num_rounds") == _get_mean(others, "num_rounds")
    return {"value": value, "ratio": value / other if value is not None and other and is_fair else None}


def _get_mean(statistics: Mapping[str, Any], name: str) -> float | None:
    return statistics[name]["mean"] if statistics[name] else None


def _join_targets(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each target what it cost the runs that reached it."""
    found = []
    for place, first in enumerate(runs[0]["targets"]):
        reached = [run["targets"][place] for run in runs if run["targets"][place]["rounds"] is not None]
        costs = {name: summarize_values(each[name] for each in reached) for name in _COSTS}
        found.append({"target": first["target"], "reached": len(reached), "of": len(runs)} | costs)
    return found
