"""Makes run directories without running anything: small arithmetic, so that tests know every number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrpc.config import RunConfig, to_toml
from fedrpc.data.partition import make_partition
from fedrpc.data.partition_summary import summarize_partition
from fedrpc.metrics.timing import PhaseRow, summarise_time
from fedrpc.study.cells import Cell
from fedrpc.study.comparison import Goals
from fedrpc.study.comparison_reading import read_comparison
from fedrpc.wire.ledger import Key, Sums, compute_totals, to_json

MakeRun = Callable[..., Path]


def ledger(clients: int, rounds: int, per_round: int, weights: int) -> Iterator[tuple[Key, Sums]]:
    """A join, `per_round` participations a round, an evaluation of all, and the end, with client-dependent sizes."""
    for client in range(clients):
        yield Key(-1, "session", "envelope", "down", client, 0), Sums(0, 900 + client, 1)
    for index in range(rounds):
        for place in range(per_round):
            client = (index * per_round + place) % clients
            for direction in ("down", "up"):
                yield Key(index, "fit", "weights", direction, client, 0), Sums(weights, weights + 20, 1)
                yield Key(index, "fit", "envelope", direction, client, 0), Sums(0, 600, 1)
            yield Key(index, "fit", "scalars", "up", client, 0), Sums(16, 40, 1)
            if client == 0:
                yield Key(index, "fit", "weights", "up", client, 1, aborted=True), Sums(500, 500, 1)
    for client in range(clients):
        yield Key(rounds, "session", "envelope", "up", client, 0), Sums(0, 2000, 2)


def records(
    clients: int, rounds: int, per_round: int, epochs: int, num_classes: int, **on: bool
) -> Iterator[dict[str, Any]]:
    for index in range(rounds):
        row: dict[str, Any] = {"event": "round_finished", "round": index, "num_clients": per_round, "seconds": 1.5}
        share = (index + 1) / rounds
        if on["evaluated"]:
            row |= {"loss": 2.3 - 2 * share, "accuracy": 10 + 81.25 * share}
        row["local_losses"] = {
            str((index * per_round + place) % clients): [
                3 - share - epoch / epochs + place / 100 for epoch in range(epochs)
            ]
            for place in range(per_round)
        }
        yield row
        evaluated: dict[str, Any] = {"event": "evaluated", "round": index}
        if on["evaluated"]:
            evaluated["per_class"] = [50 + 40 * share * c / num_classes for c in range(num_classes)]
        if on["local_test"]:
            evaluated["per_client"] = {str(c): {"correct": 50 + c % 50, "of": 100} for c in range(clients)}
        if len(evaluated) > 2:
            yield evaluated


def timing(rounds: int) -> Iterator[PhaseRow]:
    for index in range(rounds):
        fit = {"compute_s": 8.125, "upload_s": 0.25, "read_s": 0.0625}
        yield PhaseRow(index, "fit", index, 0, 8.4375, **fit)
        yield PhaseRow(index, "session", index, 0, 0.5, checkpoint_s=0.5)


def make_summary(config: RunConfig, rows: list[tuple[Key, Sums]], history: list[dict[str, Any]]) -> dict[str, Any]:
    sums = compute_totals(dict(rows))
    for direction, extra in (("down", 1234), ("up", 4321)):
        sums["total"][direction]["kernel"] = sums["total"][direction]["message"] + extra
    finished = [row for row in history if row["event"] == "round_finished" and "accuracy" in row]
    accuracy: dict[str, Any] = {}
    if finished:
        per_class = next(row["per_class"] for row in reversed(history) if row.get("per_class"))
        accuracy = {"global": finished[-1]["accuracy"], "last10": 55.5, "best": 91.25, "best_round": len(finished) - 1}
        accuracy |= {"best_is": "test-selected", "per_class": per_class, "class_variance": 12.34}
        if any("per_client" in row for row in history):
            accuracy |= {"client_mean": 77.77, "client_variance": 33.3, "worst_decile": 51.5, "jain": 0.9876}
    by_kind = {
        d: {k: s["tensor"] for k, s in sums["method"][d]["by_kind"].items() if s["tensor"]} for d in ("down", "up")
    }
    reason = "no guarantee: scalars, weights left clients uncovered"
    return {
        "method": config.method,
        "dataset": config.dataset,
        "partition": config.partition,
        "model": config.model,
        "num_clients": config.clients,
        "num_rounds": config.rounds,
        "seed": config.seed,
        "version": "0.0.0",
        "run_id": "feedc0de-1",
        "config_hash": config.hash,
        "accuracy": accuracy,
        "privacy": {"epsilon": None, "delta": 1e-5, "accountant": None, "reason": reason, "releases": {}},
        "seconds": 321.0,
        "time": summarise_time(timing(config.rounds)),
        "model_sha256": "ab" * 32,
        "bytes": sums
        | {
            "transport": 5555,
            "kernel_note": "",
            "predicted": {"total": sum(sum(side.values()) for side in by_kind.values()), "by_kind": by_kind},
            "overhead_vs_fedavg": 1.25,
        },
        "ledger_check": {
            "compared": 4242,
            "differing": 0,
            "only_server": 0,
            "only_client": 0,
            "clients": config.clients,
            "missing": 0,
        },
    }


def release(client: int, index: int, kind: str, mechanism: str | None = None) -> dict[str, Any]:
    covers = "Theorem 1" if mechanism else "no guarantee: released without noise"
    coverage = "covered" if mechanism else "none"
    parameters = {"sigma": 0.5} if mechanism else {}
    row = {"index": index, "client": client, "round": index, "phase": "fit", "kind": kind, "parts": [kind]}
    return row | {"mechanism": mechanism, "parameters": parameters, "covers": covers, "coverage": coverage}


def lines(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_run(
    folder: Path,
    clients: int = 4,
    rounds: int = 3,
    per_round: int | None = None,
    epochs: int = 2,
    num_classes: int = 10,
    weights: int = 116_536,
    *,
    evaluated: bool = True,
    local_test: bool = True,
) -> Path:
    """A whole run directory."""
    per_round = clients if per_round is None else per_round
    config = RunConfig(
        method="fedavg",
        partition="dirichlet:1,min_size=1",
        model="zda-mnist",
        clients=clients,
        rounds=rounds,
        fraction=per_round / clients,
        seed=7,
        local_test=0.2 if local_test else 0.0,
    )
    y = np.arange(max(6000, 20 * clients)) % num_classes
    rows = list(ledger(clients, rounds, per_round, weights))
    history = list(records(clients, rounds, per_round, epochs, num_classes, evaluated=evaluated, local_test=local_test))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "records.jsonl").write_text(lines(history))
    (folder / "ledger.jsonl").write_text("".join(to_json(*row) + "\n" for row in rows))
    partition = make_partition(config.partition, y, clients, 0)
    (folder / "partition.json").write_text(json.dumps(summarize_partition(partition, y, num_classes)))
    (folder / "privacy.jsonl").write_text(
        lines(
            release(client, index, kind)
            for index in range(rounds)
            for client in range(per_round)
            for kind in ("weights", "scalars")
        )
    )
    (folder / "summary.json").write_text(json.dumps(make_summary(config, rows, history)))
    return folder


def write_comparison(folder: Path, finals: Mapping[str, Sequence[float]], *targets: float) -> dict[str, Any]:
    """compare.json of a run for each method and seed, whose final accuracies these are."""
    cells = []
    for method, values in finals.items():
        for seed, value in enumerate(values):
            run = write_run(folder / f"{method}-{seed}", local_test=False)
            config = (run / "config.toml").read_text().replace('method = "fedavg"', f'method = "{method}"')
            (run / "config.toml").write_text(config.replace("seed = 7", f"seed = {seed}"))
            summary = json.loads((run / "summary.json").read_text()) | {"method": method, "seed": seed}
            summary["accuracy"]["global"] = value
            (run / "summary.json").write_text(json.dumps(summary))
            cells.append(Cell(method, seed, Path(run.name)))
    found = read_comparison(folder, cells, goals=Goals(targets=targets))
    assert not found.failures
    return found.document


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Called as make_run(**options): a run directory in a folder of its own."""
    numbers = iter(range(1000))
    return lambda **options: write_run(tmp_path / f"run{next(numbers)}", **options)
