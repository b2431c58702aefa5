"""A finished run directory of any method, played in memory: what `fedrpc attack` opens, without a process or socket."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from fedrpc.config import to_toml
from fedrpc.data.partition_summary import summarize_partition
from fedrpc.problem import Problem
from fedrpc.server.checkpoint import Checkpoint, CheckpointFolder
from fedrpc.server.summary import describe_run
from fedrpc.wire import stored
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


def contents(folder: Path) -> dict[str, str]:
    """Every file and its SHA-256."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
