"""Devices: chosen by name and client id, with a fraction of the memory, or refused with a remedy."""

from __future__ import annotations

import pytest
import torch

from fedrpc.device import choose
from fedrpc.errors import ConfigError


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[tuple[float, int]]:
    """Makes torch see `count` GPUs; returns the memory fractions that are set, with the GPU's number."""
    fractions: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: fractions.append((fraction, device.index)),
    )
    return fractions


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    assert choose("auto", 3, 10) == torch.device("cpu")


def test_the_cpu_by_name_queries_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("a CUDA query"))
    assert choose("cpu") == torch.device("cpu")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_clients_are_spread_over_the_gpus_and_share_their_memory(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    fractions = with_gpus(monkeypatch, 2)
    assert [choose(wanted, client, 10).index for client in range(4)] == [0, 1, 0, 1]
    assert fractions == [(0.2, 0), (0.2, 1), (0.2, 0), (0.2, 1)]


def test_a_gpu_for_each_client_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions = with_gpus(monkeypatch, 4)
    assert choose("cuda:3", 0, 4) == torch.device("cuda", 3)
    assert fractions == []


@pytest.mark.parametrize(("wanted", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, wanted: str, count: int) -> None:
    with_gpus(monkeypatch, count)
    with pytest.raises(ConfigError, match=f"{count} CUDA devices found; use --device auto or cpu"):
        choose(wanted)


@pytest.mark.parametrize("wanted", ["", "gpu", "cuda:", "cuda:x", "CPU"])
def test_other_names_are_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match="expected auto, cpu, cuda or cuda:N"):
        choose(wanted)


@pytest.mark.cuda
def test_a_client_trains_on_the_gpu() -> None:
    device = choose("cuda", 0, 2)
    layer = torch.nn.Linear(4, 2).to(device)
    layer(torch.ones(3, 4, device=device)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.device == device
