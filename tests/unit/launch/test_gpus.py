"""Sharing GPUs: as many clients at work as fit beside everybody's context, each with its part of the memory."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opacus.optimizers import DPOptimizer

from fedrpc.config import build
from fedrpc.errors import ConfigError
from fedrpc.launch import gpus
from fedrpc.launch.gpus import CONTEXT_BYTES, Gpu, Sharing, look_at_gpus, plan_sharing, share_gpus

GIB = 1 << 30
SMALL = build({"device": "cpu", "train_size": 60, "clients": 2, "train": {"epochs": 1}})


def make_gpus(count: int = 1, free: int = 24 * GIB, total: int = 24 * GIB) -> list[Gpu]:
    return [Gpu("a GPU", free, total)] * count


def test_a_process_for_each_client_pays_a_context_for_each():
    sharing = plan_sharing(make_gpus(), GIB, num_processes=20, parallel=0, cores=8)
    left = 24 * GIB - 21 * CONTEXT_BYTES
    assert sharing == Sharing(8, left / 8 / (24 * GIB))


def test_memory_limits_how_many_work_at_a_time_but_not_what_was_asked_for():
    assert plan_sharing(make_gpus(), 8 * GIB, 10, 0, 64).parallel == 2
    assert plan_sharing(make_gpus(2), 8 * GIB, 10, 0, 64).parallel == 4
    assert plan_sharing(make_gpus(), 8 * GIB, 10, 5, 64).parallel == 5


def test_a_host_for_each_gpu_may_have_all_of_it():
    assert plan_sharing(make_gpus(2), GIB, 2, 0, 8).share == 1.0


def test_runs_with_one_process_each_do_not_take_each_others_memory():
    shares = [plan_sharing(make_gpus(), GIB, 1, 0, 8, num_runs).share * 24 * GIB for num_runs in (2, 3)]
    assert shares == pytest.approx([12 * GIB - 2 * CONTEXT_BYTES, 8 * GIB - 2 * CONTEXT_BYTES])


def test_contexts_that_leave_no_room_lead_to_hosts():
    with pytest.raises(ConfigError, match=r"100 client processes on 2 GPUs need about .* --hosts 2 runs all clients"):
        plan_sharing(make_gpus(2, free=16 * GIB), GIB, 100, 0, 8)


@pytest.mark.parametrize(
    ("processes", "at_a_time", "gigabytes"), [(20, 15, 15.6 / 15), (50, 3, 3.6 / 3), (4, 4, 5.5), (1, 1, 24)]
)
def test_the_arithmetic_of_deploys_readme(processes, at_a_time, gigabytes):
    """24 GB free, 1 GB needed, cores enough."""
    found = plan_sharing([Gpu("a GPU", 24 * 10**9, 24 * 10**9)], 10**9, processes, 0, 64)
    assert min(found.parallel, processes) == at_a_time
    assert found.share * 24 == pytest.approx(gigabytes)


def test_the_refusal_of_deploys_readme():
    with pytest.raises(ConfigError, match="--hosts 1 "):
        plan_sharing([Gpu("a GPU", 24 * 10**9, 24 * 10**9)], 10**9, 100, 0, 64)


@given(
    count=st.integers(1, 8),
    free=st.integers(4, 80),
    need=st.integers(1, 40),
    processes=st.integers(1, 200),
    parallel=st.integers(0, 64),
    cores=st.integers(1, 64),
)
def test_who_works_never_takes_more_than_is_free(count, free, need, processes, parallel, cores):
    total = 80 * GIB
    try:
        found = plan_sharing(make_gpus(count, free * GIB, total), need * GIB // 4, processes, parallel, cores)
    except ConfigError:
        return
    assert 0 < found.share <= 1
    assert found.parallel >= 1
    at_one = -(-processes // count)
    if at_one > 1:
        at_work = -(-min(found.parallel, processes) // count)
        assert at_work * found.share * total + (at_one + 1) * CONTEXT_BYTES <= free * GIB + at_work
        if not parallel:
            assert found.share * total >= need * GIB // 4 - 1


@pytest.mark.parametrize(("device", "driver"), [("cpu", True), ("auto", False), ("cuda", False)])
def test_without_a_gpu_nobody_looks_for_one(device, driver, monkeypatch, tmp_path):
    (tmp_path / "driver").touch()
    monkeypatch.setattr(gpus, "_DRIVERS", (str(tmp_path / "driver"),) if driver else (str(tmp_path / "none"),))
    monkeypatch.setattr(gpus, "look_at_gpus", lambda *_: pytest.fail("looked"))
    assert share_gpus(build({"device": device}), None, 10) == Sharing(os.cpu_count() or 1, 1.0)
    assert share_gpus(build({"device": device, "parallel": 3}), None, 10) == Sharing(3, 1.0)


def test_runs_that_are_under_way_together_share_cores_and_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(gpus, "_DRIVERS", ())
    assert share_gpus(build({}), None, 10, num_runs=4).parallel == 4
    monkeypatch.setattr(gpus, "_DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(gpus, "preload", lambda config: None)
    monkeypatch.setattr(gpus, "look_at_gpus", lambda *_: (make_gpus(), 2 * GIB))
    assert share_gpus(build({}), None, 4, num_runs=1).parallel == 11
    assert share_gpus(build({}), None, 4, num_runs=2).parallel == 5


def test_a_machine_with_a_driver_is_looked_at(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "_DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(gpus, "preload", lambda config: None)
    monkeypatch.setattr(gpus, "look_at_gpus", lambda *_: (make_gpus(), 20 * GIB))
    assert share_gpus(build({}), None, 4).parallel == 1
    monkeypatch.setattr(gpus, "look_at_gpus", lambda *_: ([], 0))  # a driver, but no GPU for us
    assert share_gpus(build({}), None, 4) == Sharing(os.cpu_count() or 1, 1.0)


def test_a_child_looks_and_its_end_is_no_news(monkeypatch):
    found = {"gpus": [{"name": "a GPU", "free": 5, "total": 7}], "need": 3 * GIB}
    monkeypatch.setattr(gpus, "_look", lambda config, data_dir: found)
    assert look_at_gpus(SMALL, None) == ([Gpu("a GPU", 5, 7)], 6 * GIB)
    monkeypatch.setattr(gpus, "_look", lambda config, data_dir: os._exit(3))  # a driver that crashes
    assert look_at_gpus(SMALL, None)[0] == []


def test_what_a_client_needs_is_measured_by_training(monkeypatch):
    import torch

    trained = []
    monkeypatch.setattr("fedrpc.training.loop.train", lambda *args, **options: trained.append(options["draw"]))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 123)
    assert gpus._measure_need(SMALL, None, torch.device("cpu")) == 123
    assert trained == [2 * SMALL.train.batch_size]


def test_with_dp_sgd_private_training_is_measured(monkeypatch):
    import torch

    sizes = []
    step = DPOptimizer.step
    monkeypatch.setattr(DPOptimizer, "step", lambda self: (sizes.append(len(self.grad_samples[0])), step(self))[1])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 123)
    private = build({"device": "cpu", "train_size": 60, "clients": 2, "privacy": {"dp_sgd": {"noise_multiplier": 1.0}}})
    assert gpus._measure_need(private, None, torch.device("cpu")) == 123
    assert len(sizes) >= 2


def test_one_named_gpu_is_the_only_one(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (number, 10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    monkeypatch.setattr(gpus, "_measure_need", lambda *_: 5)
    names = {
        wanted: [gpu["name"] for gpu in gpus._look(build({"device": wanted}), None)["gpus"]]
        for wanted in ("cuda", "cuda:1")
    }
    assert names == {"cuda": ["GPU 0", "GPU 1", "GPU 2"], "cuda:1": ["GPU 1"]}
    assert gpus._look(build({"device": "cpu"}), None) == {"gpus": [], "need": 0}
