"""A server and a client over loopback that train, evaluate and draw on the stand-in for CUDA: the CPU's run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedrpc import config as configuration
from fedrpc.metrics.records import read_records
from fedrpc.problem import Problem
from tests.e2e.in_process import play
from tests.standin.syncs import count, count_host_work
from tests.standin.twins import compute_twins

CONFIG: dict[str, Any] = {
    "dataset": "fmnist-mini",
    "model": "cnn-dropout",  # draws from the device's own generator
    "clients": 1,  # more in one process would share that generator
    "rounds": 2,
    "client_eval_every": 1,
    "train_size": 24,
    "local_test": 0.25,
    "train": {"epochs": 1, "batch_size": 8, "lr": 0.05},
}


def test_a_run_on_the_device_is_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, set_up_on = Problem.load_external_test, list[str]()
    monkeypatch.setattr("fedrpc.client.app.set_up", lambda device, **_: set_up_on.append(device.type))
    monkeypatch.setattr(Problem, "load_external_test", lambda problem: few(problem).subset(np.arange(40)))

    def compute(device: torch.device) -> Any:
        out = tmp_path / device.type
        summary = play(out, configuration.build(CONFIG | {"device": device.type}))
        [said] = summary["client_devices"]
        assert said["clients"] == 1
        assert said["said"].startswith(f"{device.type} ")
        evaluated = [record for record in read_records(out / "records.jsonl") if record["event"] == "evaluated"]
        return summary["model_sha256"], [(each["accuracy"], each["loss"]) for each in evaluated]

    twins = compute_twins(compute)
    assert twins.device == twins.host
    assert set_up_on == ["cpu", "cuda"], "the client's process"
    assert not count_host_work(twins.syncs)
    seeded = {place.partition(":")[0] for place in count(twins.syncs, "seed")}
    assert seeded == {"fedrpc/client/answer.py", "fedrpc/server/coordinator.py"}
