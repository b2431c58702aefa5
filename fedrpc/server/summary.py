"""summary.json: what a finished run came to, in one object that tools and people read."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

import fedrpc
from fedrpc.config import RunConfig
from fedrpc.methods.cost import Cost, Shapes
from fedrpc.methods.fedavg import FedAvg
from fedrpc.methods.tools import ReportedValue
from fedrpc.metrics import curve
from fedrpc.metrics.exposure import exposure_matrix, movements
from fedrpc.models.state import payload_bytes
from fedrpc.problem import Problem
from fedrpc.wire import ledger
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors


@runtime_checkable
class Reports(Protocol):
    """A method that names recorded figures which must be seen when a run ends."""

    def report_values(self, params: Any) -> Sequence[ReportedValue]:
        """The figures of a run with these parameters."""
        ...


@runtime_checkable
class HasCaveat(Protocol):
    """A method with something that must be said wherever a run of it is shown."""

    def describe_caveat(self, params: Any) -> str:
        """The caveat for a run with these parameters; "" when there is nothing to say."""
        ...


def reported_by(method: Any, params: Any) -> Sequence[ReportedValue]:
    """The figures that a method wants to be seen."""
    return method.report_values(params) if isinstance(method, Reports) else ()


def caveat_of(method: Any, params: Any) -> str:
    """The method's caveat for these parameters, or ""."""
    return method.describe_caveat(params) if isinstance(method, HasCaveat) else ""


# The newest of these in the records is the run's.
_FROM_RECORDS = ("per_class", "class_variance", "client_mean", "client_variance", "worst_decile", "jain", "features")
# What clients get of each other, and how many rounds later: a buffer in the next round, a pool in the same one.
_SHARED = {Kind.ACTIVATIONS: 1, Kind.SAMPLES: 0, Kind.MEAN_SAMPLES: 0}


def model_sha256(weights: Tensors) -> str:
    """One hash over names, dtypes, shapes and values, by name: equal hashes are equal models, bit for bit."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        hasher.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        hasher.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def shapes_of(problem: Problem, weights: Tensors, cohorts: Sequence[Sequence[int]]) -> Shapes:
    """What the method's cost formula is given."""
    return Shapes(
        weights_bytes=payload_bytes(weights),
        cohorts=cohorts,
        num_examples=problem.env.num_examples(),
        class_counts=problem.class_counts,
        env=problem.env,
    )


def fedavg_cost(problem: Problem, shapes: Shapes) -> Cost:
    """The yardstick: FedAvg with the configured network, without what a method may have added to it."""
    return FedAvg().cost(dataclasses.replace(shapes, weights_bytes=problem.base_bytes))


def accuracy(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The accuracy part: percent and percent squared."""
    evaluated = [row for row in records if row["event"] == "evaluated"]
    points = [(row["round"], row["accuracy"]) for row in evaluated if row.get("accuracy") is not None]
    if not points:
        return {}
    read = curve.summarise(points)
    last = {name: next((row[name] for row in reversed(evaluated) if name in row), None) for name in _FROM_RECORDS}
    return {
        "global": read.last,
        "last10": read.last10,
        "best": read.best,
        "best_round": read.best_round,
        "best_is": curve.Curve.best_label,
    } | {name: value for name, value in last.items() if value is not None}


def predict_cost(problem: Problem, shapes: Shapes) -> Cost:
    """The formula of the whole run: the method's, and those of the aggregators' own phases."""
    total = problem.method.cost(shapes)
    for layer in problem.aggregators:
        own = layer.cost(shapes)
        for kind, size in own.down.items():
            total.add("down", kind, size)
        for kind, size in own.up.items():
            total.add("up", kind, size)
    return total


def reported(wanted: Sequence[ReportedValue], records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures that a method wants seen, by their names in the records; what was never recorded is left out."""
    told = {}
    for figure in wanted:
        value, round_index = _newest(records, figure.record)
        if figure.spread:
            value = _spread(value)
        elif figure.columns and value is not None:
            value = _rows(value, figure.columns)
        if value is None:
            continue
        entry = {"words": figure.words, "about": figure.about, "value": value, "round": round_index}
        entry |= {"why": _newest(records, figure.why)[0]} if figure.why else {}
        told[figure.record] = entry | ({"columns": dict(figure.columns)} if figure.columns else {})
    return told


def _newest(records: Sequence[Mapping[str, Any]], path: str) -> tuple[Any, int | None]:
    """A record's newest value and the round it is of; a mapping has the newest of each key."""
    newest: Any = None
    round_index: int | None = None
    for row in records:
        value: Any = row
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            both = isinstance(value, Mapping) and isinstance(newest, Mapping)
            newest, round_index = {**newest, **value} if both else value, row["round"]
    return newest, round_index


def _spread(value: Any) -> dict[str, float | int] | None:
    numbers = list(_numbers(value))
    if not numbers:
        return None
    mean = math.fsum(numbers) / len(numbers)
    return {"mean": mean, "least": min(numbers), "greatest": max(numbers), "count": len(numbers)}


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)


def _rows(value: Any, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    rows = [{"key": key} | entry for key, entry in value.items()] if isinstance(value, Mapping) else value
    return [{name: row.get(name) for name in columns} for row in rows]


def exposure(rows: ledger.Rows, num_clients: int) -> dict[str, float]:
    """By kind of shared features or data, the share of all pairs of clients where one's has reached the other."""
    plain = [vars(key) | vars(sums) for key, sums in rows.items()]
    found = {}
    for kind, lag in _SHARED.items():
        matrix = exposure_matrix(movements(plain, {kind.label}), num_clients, lag=lag)
        if matrix.any():
            found[kind.label] = float(matrix.mean())
    return found


def bytes_part(rows: ledger.Rows, cost: Cost, fedavg: Cost, kernel: Mapping[str, int], note: str) -> dict[str, Any]:
    """The bytes part: three layers, the method's own by kind, the formula beside it."""
    sums = ledger.totals(rows)
    for direction in ("down", "up"):
        sums["total"][direction]["kernel"] = kernel[direction]
    message = sum(sums["total"][d]["message"] for d in ("down", "up"))
    predicted = {
        d: {kind.label: size for kind, size in sorted(side.items())}
        for d, side in (("down", cost.down), ("up", cost.up))
    }
    baseline = sum(fedavg.down.values()) + sum(fedavg.up.values())
    measured = sum(sums["method"][d]["tensor"] for d in ("down", "up"))
    return sums | {
        "transport": None if note else sum(kernel.values()) - message,
        "kernel_note": note,
        "predicted": {
            "total": sum(cost.down.values()) + sum(cost.up.values()),
            "by_kind": predicted,
        },
        "overhead_vs_fedavg": measured / baseline if baseline else None,
        "per_client": _per_client(rows),
    }


def _per_client(rows: ledger.Rows) -> dict[int, dict[str, int]]:
    """Who paid how many message bytes."""
    paid: dict[int, dict[str, int]] = {}
    for key, sums in sorted(rows.items(), key=lambda item: item[0].client):
        side = paid.setdefault(key.client, {"down": 0, "up": 0})
        side[key.direction] += sums.message_bytes
    return paid


def heading(config: RunConfig, run_id: str, num_rounds: int) -> dict[str, Any]:
    """What was run."""
    return {
        "method": config.method,
        "dataset": config.dataset,
        "partition": config.partition,
        "model": config.model,
        "num_clients": config.clients,
        "num_rounds": num_rounds,
        "seed": config.seed,
        "aggregators": list(config.layers),
        "version": fedrpc.__version__,
        "run_id": run_id,
        "config_hash": config.hash,
    }
