"""Builds summary.json: the results of a finished run in one object, for tools and people."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

import fedrpc
from fedrpc.config import RunConfig
from fedrpc.emulation.tun import name_congestion_control
from fedrpc.methods.cost import Cost, Shapes
from fedrpc.methods.fedavg import FedAvg
from fedrpc.methods.tools import ReportedValue
from fedrpc.metrics import curve
from fedrpc.metrics.exposure import exposure_matrix, list_movements
from fedrpc.models.state import count_payload_bytes
from fedrpc.problem import Problem
from fedrpc.wire import ledger
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors


@runtime_checkable
class Reports(Protocol):
    """A method that names recorded values to show when a run ends."""

    def report_values(self, params: Any) -> Sequence[ReportedValue]:
        """The values to show for a run with these parameters."""
        ...


@runtime_checkable
class HasCaveat(Protocol):
    """A method with a caveat that is shown with every run of it."""

    def describe_caveat(self, params: Any) -> str:
        """The caveat for a run with these parameters, or ""."""
        ...


@runtime_checkable
class Advises(Protocol):
    """A method that says before the first round where the run's training does not suit it."""

    def advise(self, env: Any) -> str:
        """What is wrong, and the remedy; "" where nothing is."""
        ...


def list_reported(method: Any, params: Any) -> Sequence[ReportedValue]:
    """Lists the recorded values that a method wants shown."""
    return method.report_values(params) if isinstance(method, Reports) else ()


def get_caveat(method: Any, params: Any) -> str:
    """Returns the method's caveat for these parameters, or ""."""
    return method.describe_caveat(params) if isinstance(method, HasCaveat) else ""


def get_advice(method: Any, env: Any) -> str:
    """Returns what the method has to say about the run's training, or ""."""
    return method.advise(env) if isinstance(method, Advises) else ""


# The latest recorded value of each goes into the summary.
_FROM_RECORDS = ("per_class", "class_variance", "client_mean", "client_variance", "worst_decile", "jain", "features")
# What clients receive of each other, and how many rounds later: a buffer in the next round, a pool in the same one.
_SHARED = {Kind.ACTIVATIONS: 1, Kind.SAMPLES: 0, Kind.MEAN_SAMPLES: 0}


def hash_model(weights: Tensors) -> str:
    """Hashes names, dtypes, shapes and values, sorted by name: equal hashes are equal models, bit for bit."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        hasher.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        hasher.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def build_shapes(problem: Problem, weights: Tensors, cohorts: Sequence[Sequence[int]]) -> Shapes:
    """Builds the input of a method's cost formula."""
    return Shapes(
        weights_bytes=count_payload_bytes(weights),
        cohorts=cohorts,
        num_examples=problem.env.num_examples(),
        class_counts=problem.class_counts,
        env=problem.env,
    )


def compute_fedavg_cost(problem: Problem, shapes: Shapes) -> Cost:
    """Computes FedAvg's cost with the configured network, without parts that a method added to it."""
    return FedAvg().cost(dataclasses.replace(shapes, weights_bytes=problem.base_bytes))


def summarise_accuracy(records: Sequence[Mapping[str, Any]], tested_on: str = "test") -> dict[str, Any]:
    """Builds the accuracy part, in percent and percent squared.

    Args:
        tested_on: "test", or "validation" when a part of the training set took the test set's place.
    """
    evaluated = [row for row in records if row["event"] == "evaluated"]
    points = [(row["round"], row["accuracy"]) for row in evaluated if row.get("accuracy") is not None]
    if not points:
        return {}
    read = curve.summarize_curve(points)
    last = {name: next((row[name] for row in reversed(evaluated) if name in row), None) for name in _FROM_RECORDS}
    return {
        "global": read.last,
        "last10": read.last10,
        "best": read.best,
        "best_round": read.best_round,
        "best_is": f"{tested_on}-selected",
    } | {name: value for name, value in last.items() if value is not None}


def describe_unanswered(records: Sequence[Mapping[str, Any]]) -> str:
    """Says in how many rounds no client answered, as when all of them abstained, and why; "" when there was none."""
    rounds = [row for row in records if row["event"] == "round_finished"]
    reasons = [row["unanswered"] for row in rounds if "unanswered" in row]
    if not reasons:
        return ""
    untrained = ", so nothing was learned" if len(reasons) == len(rounds) else ""
    return f"no client answered in {len(reasons)} of {len(rounds)} rounds{untrained}: {reasons[0]}"


def describe_missing_wire(records: Sequence[Mapping[str, Any]], *, has_wire: bool) -> str:
    """Says that server and clients were one process, if they were in any round; "" when there always was a wire."""
    rounds = [row for row in records if row["event"] == "round_finished"]
    without = sum(1 for row in rounds if row.get("in_process"))
    if not without and has_wire:
        return ""
    how_many = "" if without == len(rounds) else f" in {without} of {len(rounds)} rounds"
    return f"server and clients were one process{how_many}: messages were encoded, but no wire carried them"


def predict_cost(problem: Problem, shapes: Shapes) -> Cost:
    """The formula of the whole run: the method's, and those of the aggregators' own phases."""
    total = problem.method.cost(shapes)
    for layer in problem.aggregators:
        own = layer.cost(shapes)
        for kind, size in own.down.items():
            total.add("down", kind, size)
        for kind, size in own.up.items():
            total.add("up", kind, size)
        total.at_most |= own.at_most
    return total


def collect_reported(
    wanted: Sequence[ReportedValue], records: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Collects the values that a method wants shown, by their names in the records; unrecorded ones are left out."""
    values = {}
    for item in wanted:
        value, round_index = _find_latest(records, item.record)
        if item.spread:
            value = _compute_spread(value)
        elif item.columns and value is not None:
            value = _select_columns(value, item.columns)
        if value is None:
            continue
        entry = {"words": item.words, "about": item.about, "value": value, "round": round_index}
        entry |= {"why": _find_latest(records, item.why)[0]} if item.why else {}
        values[item.record] = entry | ({"columns": dict(item.columns)} if item.columns else {})
    return values


def _find_latest(records: Sequence[Mapping[str, Any]], path: str) -> tuple[Any, int | None]:
    """Finds the latest recorded value and its round; a mapping gets the latest value of each key."""
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


def _compute_spread(value: Any) -> dict[str, float | int] | None:
    numbers = list(_iter_numbers(value))
    if not numbers:
        return None
    mean = math.fsum(numbers) / len(numbers)
    return {"mean": mean, "least": min(numbers), "greatest": max(numbers), "count": len(numbers)}


def _iter_numbers(value: Any) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _iter_numbers(item)


def _select_columns(value: Any, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    rows = [{"key": key} | entry for key, entry in value.items()] if isinstance(value, Mapping) else value
    return [{name: row.get(name) for name in columns} for row in rows]


def compute_exposure(rows: ledger.Rows, num_clients: int) -> dict[str, float]:
    """Computes, for each kind that clients share, the fraction of client pairs where one's data reached the other."""
    plain = [vars(key) | vars(sums) for key, sums in rows.items()]
    found = {}
    for kind, lag in _SHARED.items():
        matrix = exposure_matrix(list_movements(plain, {kind.label}), num_clients, lag=lag)
        if matrix.any():
            found[kind.label] = float(matrix.mean())
    return found


def summarise_bytes(
    rows: ledger.Rows, cost: Cost, fedavg: Cost, kernel: Mapping[str, int] | None, note: str
) -> dict[str, Any]:
    """Builds the bytes part: three layers, the method's own bytes by kind, and its formula.

    Args:
        kernel: The kernel's bytes by direction; None when no wire carried them.
        note: Why the kernel's bytes are not exact; then they are at least those of the messages that they carried. Or
            why there are none.
    """
    sums = ledger.compute_totals(rows)
    for direction in ("down", "up"):
        total = sums["total"][direction]
        counted = kernel[direction] if kernel else None
        total["kernel"] = max(counted, total["message"]) if counted is not None and note else counted
    message = sum(sums["total"][d]["message"] for d in ("down", "up"))
    predicted = {
        d: {kind.label: size for kind, size in sorted(side.items())}
        for d, side in (("down", cost.down), ("up", cost.up))
    }
    baseline = sum(fedavg.down.values()) + sum(fedavg.up.values())
    measured = sum(sums["method"][d]["tensor"] for d in ("down", "up"))
    return sums | {
        "transport": None if note or kernel is None else sum(kernel.values()) - message,
        "kernel_note": note,
        "predicted": {
            "total": sum(cost.down.values()) + sum(cost.up.values()),
            "by_kind": predicted,
        },
        "overhead_vs_fedavg": measured / baseline if baseline else None,
        "per_client": _sum_by_client(rows),
    }


def _sum_by_client(rows: ledger.Rows) -> dict[int, dict[str, int]]:
    """Sums message bytes by client and direction."""
    paid: dict[int, dict[str, int]] = {}
    for key, sums in sorted(rows.items(), key=lambda item: item[0].client):
        side = paid.setdefault(key.client, {"down": 0, "up": 0})
        side[key.direction] += sums.message_bytes
    return paid


def describe_run(config: RunConfig, run_id: str, num_rounds: int, commit: str | None = None) -> dict[str, Any]:
    """Describes what was run: the first keys of summary.json.

    Args:
        commit: Of fedrpc itself, where the server ran from a checkout.
    """
    emulated = {name: getattr(config, name) for name in ("link", "shaper", "speed") if getattr(config, name)}
    if config.shaper in ("tun", "netem"):  # what losses cost is its doing
        emulated["tcp"] = name_congestion_control()
    return {
        "method": config.method,
        "dataset": config.dataset,
        "partition": config.partition,
        "model": config.model,
        "num_clients": config.clients,
        "num_rounds": num_rounds,
        "seed": config.seed,
        "aggregators": list(config.layers),
        "computing": {name: getattr(config.train, name) for name in ("precision", "tf32", "deterministic", "compile")},
        "version": fedrpc.__version__,
        "commit": commit,
        "run_id": run_id,
        "config_hash": config.hash,
        "reproducible": config.is_reproducible,
    } | ({"emulated": emulated} if config.is_emulated else {})
