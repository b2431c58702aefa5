"""The loop on a CUDA device that is not there: the CPU's batches and steps, and one wait for the device at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedrpc.config import TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.training import batches
from fedrpc.training.loop import TrainReport, build_optimizer, train
from fedrpc.training.losses import cross_entropy
from tests.standin.cuda import present
from tests.standin.syncs import Sync, recorded
from tests.standin.tensor import DeviceTensor

CPU = torch.device("cpu")
COUNT = 103


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The stand-in, which has no streams for memory to be recorded with."""
    monkeypatch.setattr(DeviceTensor, "record_stream", lambda tensor, stream: None, raising=False)
    monkeypatch.setattr(batches, "RESIDENT", batches.ResidentData())
    with present() as device:
        yield device


def run(device: torch.device, data: Examples, **settings: Any) -> tuple[TrainReport, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 5)).to(device)
    config, order = TrainConfig(batch_size=10, momentum=0.9, **settings), np.random.default_rng(1)
    report = train(model, cross_entropy, data, config, lr=0.05, order=order, device=device)
    return report, [parameter.detach().cpu() for parameter in model.parameters()]


def make_examples() -> Examples:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(COUNT, 1, 6, 6)).astype(np.float32))
    return Examples.of(x, torch.from_numpy(rng.integers(0, 5, COUNT)))


@pytest.mark.parametrize("share", [0.5, 0.0], ids=["resident", "copied ahead"])
@pytest.mark.parametrize("settings", [{}, {"optimizer": "adam"}, {"channels_last": True}], ids=str)
def test_it_comes_to_the_cpus_model(cuda, monkeypatch, share, settings):
    expected, weights = run(CPU, make_examples(), epochs=2, **settings)
    monkeypatch.setattr(batches.RESIDENT, "_share", share)
    found, moved = run(cuda, make_examples(), epochs=2, **settings)
    assert found.epoch_losses == pytest.approx(expected.epoch_losses, rel=1e-5)
    assert found.num_steps == expected.num_steps
    for one, two in zip(weights, moved, strict=True):
        assert torch.allclose(one, two, atol=1e-4)


def list_waits(cuda: torch.device, **settings: Any) -> list[Sync]:
    """Where the host waits within the loop; not for moving the network, nor for reading its weights."""
    data = make_examples()
    with recorded() as syncs:
        run(cuda, data, **settings)
    return [sync for sync in syncs if sync.place.startswith("fedrpc/training/")]


@pytest.mark.parametrize("share", [0.5, 0.0], ids=["resident", "copied ahead"])
def test_the_host_waits_once_whatever_the_number_of_batches(cuda, monkeypatch, share):
    monkeypatch.setattr(batches.RESIDENT, "_share", share)
    for epochs in (1, 4):
        waits = list_waits(cuda, epochs=epochs)
        assert [sync.place.split(":")[0] for sync in waits if sync.kind == "read"] == ["fedrpc/training/loop.py"]
        uploads = [sync for sync in waits if sync.kind == "upload"]
        assert len(uploads) == (2 if share else 0), "inputs and labels, once; what is copied ahead is pinned"


def test_optimizers_are_fused_there(cuda):
    model = nn.Linear(2, 2).to(cuda)
    for name in ("sgd", "adam"):
        [group] = build_optimizer(TrainConfig(optimizer=name), model, 0.1).param_groups
        assert group["fused"] is True
