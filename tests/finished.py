"""Finished run directories of any method, played in memory, for `fedrpc attack` and `audit`; and forged ones."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from fedrpc.config import to_toml
from fedrpc.data.partition_summary import summarize_partition
from fedrpc.files import CHECKSUMS
from fedrpc.privacy.heads import HEADS_FILE, HeadsFile
from fedrpc.privacy.ledger import GENESIS, PrivacyFile, hash_row
from fedrpc.privacy.signing import Signer
from fedrpc.privacy.summary import summarise
from fedrpc.problem import Problem
from fedrpc.server.checkpoint import Checkpoint, CheckpointFolder
from fedrpc.server.summary import describe_run
from fedrpc.wire import stored
from fedrpc.wire.ledger import to_json
from tests.fakes import Played, problem_of, run_in_memory

RUN_ID = "a-finished-run"


def finished_run(folder: Path, method: str, rounds: int = 1, **values: Any) -> Played:
    """Plays a run with the data set's own network and leaves its directory in `folder`."""
    problem = problem_of(method, build=None, rounds=rounds, **values)
    played = run_in_memory(problem, rounds, folder=folder / "stores")
    for store in sorted((folder / "stores").iterdir()):
        (folder / "clients" / store.name).mkdir(parents=True)
        store.rename(folder / "clients" / store.name / RUN_ID)
    write_run(folder, problem, played, rounds)
    return played


def write_run(folder: Path, problem: Problem, played: Played, rounds: int) -> None:
    """The files of the run directory that the attacks read."""
    (folder / "config.toml").write_text(to_toml(problem.config))
    summary = describe_run(problem.config, RUN_ID, rounds) | {"model_sha256": played.sha256}
    (folder / "summary.json").write_text(json.dumps(summary))
    partition = summarize_partition(problem.partition, problem.dataset.train.y, problem.dataset.num_classes)
    (folder / "partition.json").write_text(json.dumps(partition))
    for name in ("records.jsonl", "ledger.jsonl"):
        (folder / name).touch()
    state = stored.dumps(played.state)
    CheckpointFolder(folder / "checkpoints").save(Checkpoint(rounds + 1, rounds - 1, None, state, {}, [], [0, 0], 1.0))
    save_file({name: tensor.contiguous() for name, tensor in played.weights.items()}, folder / "model.safetensors")


def write_accounts(folder: Path, played: Played) -> None:
    """The files of the run directory that an audit reads, beside the clients' stores."""
    problem = played.problem
    (folder / "config.toml").write_text(to_toml(problem.config))
    table = summarize_partition(problem.partition, problem.dataset.train.y, problem.dataset.num_classes)
    table |= {"num_train": problem.env.num_examples(), "shape": problem.dataset.shape}
    (folder / "partition.json").write_text(json.dumps(table))
    records = [
        {"event": "round_finished", "round": index, "participation": found, "planned_rounds": problem.config.rounds}
        for index, found in played.participation.items()
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = [to_json(key, sums) + "\n" for key, sums in played.rows.items()]
    (folder / "ledger.jsonl").write_text("".join(lines))
    by_client: dict[int, list[str]] = defaultdict(list)
    for row in played.released:
        by_client[row["client"]].append(json.dumps(row, separators=(",", ":")))
    file = PrivacyFile(folder / "privacy.jsonl")
    for client, rows in by_client.items():
        file.extend(client, 0, rows)
    file.close()
    (folder / "summary.json").write_text(json.dumps({"privacy": played.privacy()}))
    (folder / "run_id").write_text(RUN_ID)
    sign_rows(folder)


def sign_rows(folder: Path) -> None:
    """Has every client sign its rows, with a key that it registers now."""
    run_id = (folder / "run_id").read_text().strip()
    (folder / HEADS_FILE).unlink(missing_ok=True)
    rows = [json.loads(line) for line in (folder / "privacy.jsonl").read_text().splitlines()]
    last = {row["client"]: row for row in rows}
    file = HeadsFile(folder / HEADS_FILE, run_id)
    for client, row in last.items():
        signer, count, head = Signer.from_bytes(Signer.create()), row["index"] + 1, bytes.fromhex(row["hash"])
        file.register(client, signer.public_key, 0)
        file.add(client, count, head, signer.sign_head(run_id, client, count, head))
    file.close()


Change = Callable[[dict[str, Any]], dict[str, Any] | None]  # a privacy row to another one, or to none


def forge(folder: Path, change: Change) -> None:
    """Changes privacy rows, chains and signs all of them anew, and reports what they give now.

    A server and its clients could do that together, or a server that replaces the clients' keys.
    """
    path = folder / "privacy.jsonl"
    heads: dict[int, tuple[int, bytes]] = {}
    rows = []
    for line in path.read_text().splitlines():
        row = change(json.loads(line))
        if row is not None:
            count, head = heads.get(row["client"], (0, GENESIS))
            row |= {"index": count, "previous": head.hex()}
            row.pop("hash")
            head = hash_row(head, json.dumps(row, separators=(",", ":")))
            heads[row["client"]] = count + 1, head
            rows.append(row | {"hash": head.hex()})
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    summary = json.loads((folder / "summary.json").read_text())
    summary["privacy"] = summarise(rows, summary["privacy"]["delta"])
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / CHECKSUMS).unlink(missing_ok=True)
    sign_rows(folder)


def contents(folder: Path) -> dict[str, str]:
    """Every file and its SHA-256."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
