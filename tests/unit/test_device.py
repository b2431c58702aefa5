"""Devices: chosen by name and number, with a share of the memory, set up explicitly, or refused with a remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from fedrpc import device
from fedrpc.device import choose
from fedrpc.errors import ConfigError


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[tuple[float, int]]:
    """Makes torch see `count` GPUs; returns the memory fractions that are set, with the GPU's number."""
    fractions: list[tuple[float, int]] = []
    monkeypatch.setattr(device, "_SHARES", {})
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
    assert choose("auto", 3, 0.1) == torch.device("cpu")


def test_the_cpu_by_name_queries_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("a CUDA query"))
    assert choose("cpu") == torch.device("cpu")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_clients_are_spread_over_the_gpus_and_share_their_memory(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    fractions = with_gpus(monkeypatch, 2)
    assert [choose(wanted, client, 0.2).index for client in range(4)] == [0, 1, 0, 1]
    assert fractions == [(0.2, 0), (0.2, 1), (0.2, 0), (0.2, 1)]


def test_a_gpu_of_ones_own_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions = with_gpus(monkeypatch, 4)
    assert choose("cuda:3", 0) == torch.device("cuda", 3)
    assert fractions == []
    assert not device.is_shared(torch.device("cuda", 3))


def read_settings() -> dict[str, object]:
    backends = torch.backends
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "benchmark": backends.cudnn.benchmark,
        "matmul": backends.cuda.matmul.fp32_precision,
        "conv": backends.cudnn.conv.fp32_precision,
        "rnn": backends.cudnn.rnn.fp32_precision,
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


@pytest.fixture
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts torch's settings back."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before, fill = read_settings(), torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before["deterministic"])
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.backends.cudnn.benchmark = before["benchmark"]
    torch.backends.cuda.matmul.fp32_precision = before["matmul"]
    torch.backends.cudnn.conv.fp32_precision = before["conv"]
    torch.backends.cudnn.rnn.fp32_precision = before["rnn"]
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # set by what was tested


@pytest.mark.usefixtures("_settings")
def test_a_gpu_computes_the_same_bits_each_time_and_without_tf32_unless_told() -> None:
    device.set_up(torch.device("cuda", 0), deterministic=True, tf32=False)
    assert read_settings() == {
        "deterministic": True,
        "fill": False,
        "benchmark": False,
        "matmul": "ieee",
        "conv": "ieee",
        "rnn": "ieee",
        "cublas": ":4096:8",
    }


@pytest.mark.usefixtures("_settings")
def test_a_gpu_may_be_faster_when_told() -> None:
    device.set_up(torch.device("cuda", 0), deterministic=False, tf32=True)
    found = read_settings()
    assert (found["deterministic"], found["benchmark"], found["cublas"]) == (False, True, None)
    assert [found[name] for name in ("matmul", "conv", "rnn")] == ["tf32"] * 3


@pytest.mark.usefixtures("_settings")
def test_on_a_cpu_no_setting_is_touched() -> None:
    before = read_settings()
    device.set_up(torch.device("cpu"), deterministic=True, tf32=True)
    device.give_back_gpu_memory(torch.device("cpu"))
    assert read_settings() == before


def test_what_a_device_is_tells_what_its_results_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = device.describe(torch.device("cpu"))
    assert cpu == {"type": "cpu", "name": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda found: f"GPU {found.index}")
    gpu = device.describe(torch.device("cuda", 1))
    assert (gpu["type"], gpu["name"], gpu["cuda"]) == ("cuda", "GPU 1", torch.version.cuda)


def test_room_is_what_is_free_and_what_is_held_unused_within_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda found: (300, 1000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda found: 100)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda found: 150)
    assert device.measure_room(gpu) == 350
    monkeypatch.setitem(device._SHARES, gpu, 0.2)
    assert device.is_shared(gpu)
    assert device.measure_room(gpu) == 100
    monkeypatch.setitem(device._SHARES, gpu, 0.05)
    assert device.measure_room(gpu) == 0


def test_a_full_gpu_is_explained_in_one_line_with_what_helps() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")
    said = device.explain_full_gpu(error)
    assert "the GPU's memory is full (CUDA out of memory)" in said
    for remedy in ("train.batch_size", "--parallel", "--hosts", "--device cpu"):
        assert remedy in said
    assert "\n" not in said


def test_an_operation_without_a_deterministic_form_leads_to_the_setting() -> None:
    error = RuntimeError("adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set")
    assert "--set train.deterministic=false" in device.explain_nondeterminism(error)


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
    chosen = choose("cuda", 0, 0.5)
    layer = torch.nn.Linear(4, 2).to(chosen)
    layer(torch.ones(3, 4, device=chosen)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.device == chosen
