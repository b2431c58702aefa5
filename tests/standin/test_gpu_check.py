"""The check of a GPU, with the stand-in as the GPU: it finds nothing wrong, and finds what is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedrpc.config import build, read_recipe
from fedrpc.launch import gpu_check, gpu_speed
from fedrpc.launch.plan import Request, plan_runs
from fedrpc.problem import Problem
from tests.e2e.in_process import play
from tests.standin.cuda import present
from tests.standin.syncs import count_host_work, recorded

FOLDERS = {"device": "cuda", "device-again": "cuda", "cpu": "cpu", "cpu-nudged": "cpu"}


@pytest.fixture(autouse=True)
def set_up_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that were set up, in place of what that changes for the whole process."""
    kinds: list[str] = []
    for place in ("fedrpc.launch.gpu_speed", "fedrpc.client.app", "fedrpc.server.run"):
        monkeypatch.setattr(f"{place}.set_up", lambda device, **_: kinds.append(device.type))
    return kinds


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(build({"device": "cpu", "model": "cnn-dropout", "clients": 1, "train_size": 40}))


def test_a_network_trains_on_the_device_as_on_the_cpu(
    problem: Problem, cuda: torch.device, set_up_on: list[str]
) -> None:
    with recorded() as syncs:
        found = gpu_speed.measure(problem, cuda, 10, gpu_speed.REFERENCE)
    assert found["difference"] == 0.0
    assert set_up_on == ["cpu", "cuda"]
    assert count_host_work(syncs), "the CPU's own training, which this test can tell"


def test_every_way_that_is_no_compilation_is_timed_on_the_device(problem: Problem, cuda: torch.device) -> None:
    for way in ("fp32", "tf32", "fp32, any bits"):
        with recorded() as syncs:
            assert gpu_speed.measure(problem, cuda, 10, way)["speed"] > 0
        assert not count_host_work(syncs)


def test_a_device_that_computes_something_else_is_found_out(
    problem: Problem, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gpu_speed.train

    def train(network: Any, *args: Any, device: torch.device, lr: float, **kwargs: Any) -> Any:
        return plain(network, *args, device=device, lr=lr * (1.1 if device.type == "cuda" else 1.0), **kwargs)

    monkeypatch.setattr(gpu_speed, "train", train)
    found = gpu_speed.measure(problem, cuda, 10, gpu_speed.REFERENCE)
    assert found["difference"] > gpu_check.TRAINING_TOLERANCE


@pytest.mark.parametrize("method", ["fedavg", "fedvae"])  # the second draws noise for every batch
def test_runs_on_the_device_are_held_against_the_cpus(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = Problem.load_external_test
    monkeypatch.setattr(Problem, "load_external_test", lambda problem: few(problem).subset(np.arange(40)))
    values = {"rounds": 1, "clients": 1, "train_size": 40}  # clients of one process would share a generator
    [planned] = plan_runs(Request([method], False, [read_recipe(gpu_check.RECIPE)], values, [])).runs

    def compare(folder: Path, options: list[str], say: object) -> str:
        config = planned.config.model_copy(update={"device": FOLDERS[folder.name]})
        if FOLDERS[folder.name] == "cuda":
            with present():
                play(folder / planned.cell.run, config)
        else:
            play(folder / planned.cell.run, config)
        return ""

    monkeypatch.setattr(gpu_check, "_compare", compare)
    found = gpu_check._run_methods("cuda", tmp_path, method, lambda _: None)
    ours = next(each for each in found if not each.failed)
    assert (ours.repeats, ours.difference, ours.nudged) == (True, 0.0, 0.0)
    assert gpu_check.list_faults([ours], []) == []
