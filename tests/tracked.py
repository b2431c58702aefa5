"""A run directory as a server leaves it while it runs, with two clients, for tests of what follows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedrpc.config import build, to_toml

CLIENTS = (0, 1)


def begin_run(folder: Path, **values: Any) -> None:
    """Claims the directory."""
    (folder / "config.toml").write_text(to_toml(build({"clients": len(CLIENTS), **values})))
    (folder / "run_id").write_text("0123456789abcdef-00000000")


def add_round(folder: Path, index: int, accuracy: float | None = 50.0, seconds: float = 1.5) -> None:
    """Ends a round: first its rows of the ledger, then its records."""
    rows = [
        _row(index, client, *row)
        for client in CLIENTS
        for row in (("down", "weights", 100, 110), ("down", "envelope", 0, 7), ("up", "weights", 90, 95))
    ]
    record = {"event": "round_finished", "round": index, "num_clients": 2, "planned_rounds": 9, "seconds": seconds}
    record |= {"local_losses": {"0": [1.0]}} | ({} if accuracy is None else {"accuracy": accuracy, "loss": 1.0})
    _append(folder / "ledger.jsonl", rows)
    _append(folder / "records.jsonl", [record, {"event": "evaluated", "round": index, "per_class": [50.0]}])


def add_setup(folder: Path) -> None:
    """Ends the set-up of a method that has one."""
    _append(folder / "ledger.jsonl", [_row(-1, client, "up", "images", 30, 33) for client in CLIENTS])
    _append(folder / "records.jsonl", [{"event": "setup_finished", "round": -1, "seconds": 2.5}])


def rewrite_ledger(folder: Path, late: dict[int, int]) -> None:
    """Has rows of rounds that are over come in, as after a late answer: the file is replaced by one with more bytes.

    Args:
        late: The message bytes that each row gains, by its round.
    """
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    (folder / "new").touch()
    _append(folder / "new", [row | {"message_bytes": row["message_bytes"] + late.get(row["round"], 0)} for row in rows])
    (folder / "new").replace(folder / "ledger.jsonl")


def finish_run(folder: Path, num_rounds: int) -> None:
    """Writes what a finished run leaves; the ledger has rows of the time after the last round, too."""
    summary = {
        "method": "fedavg",
        "num_rounds": num_rounds,
        "accuracy": {"global": 50.0, "per_client": {"0": 1.0}},
        "bytes": {"total": {"down": {"kernel": 500}}, "per_client": {"0": 1}},
        "privacy": {"epsilon": None, "reason": "no guarantee"},
    }
    _append(folder / "ledger.jsonl", [_row(num_rounds, 0, "up", "envelope", 0, 900)])
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "report.html").write_text("<p>a page</p>")
    (folder / "model.safetensors").write_bytes(b"a model")


def _row(index: int, client: int, direction: str, kind: str, tensors: int, messages: int) -> dict[str, Any]:
    key = {"round": index, "phase": "fit", "kind": kind, "direction": direction, "client": client, "attempt": 0}
    return key | {"aborted": False, "tensor_bytes": tensors, "message_bytes": messages, "messages": 1}


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
