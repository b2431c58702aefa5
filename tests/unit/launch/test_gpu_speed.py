"""Networks are measured each in a process of its own, whose failure or slowness costs one way and no more."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedrpc.config import TrainConfig, build
from fedrpc.errors import ConfigError
from fedrpc.launch import gpu_speed
from fedrpc.launch.gpu_speed import COMPILED, REFERENCE, Order, choose_compiled, measure_networks
from fedrpc.problem import Problem, list_networks

CPU = torch.device("cpu")
CONFIG = TrainConfig(epochs=1, batch_size=10)
# A process that does its tasks as the test says: it writes a line about each, crashes, or takes for ever.
SCRIPTED = """
import json, os, sys, time
print(json.dumps({{"started": True}}), flush=True)
script = {script!r}
for task in json.loads(sys.argv[1])[3]:
    answer = script.get(str(task), {{"speed": 100.0, "difference": 0.0}})
    if answer == "crash":
        os.abort()
    if answer == "stay":
        time.sleep(600)
    print(json.dumps(answer), flush=True)
"""


def order(folder: Path, **changes: Any) -> Order:
    values = {
        "device": "cpu",
        "networks": ["net"],
        "compiled": (),
        "num_examples": 40,
        "limit_s": 60.0,
        "log": folder / "log",
    }
    return Order(**(values | changes))


def follow_script(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(gpu_speed, "_WORKER", program)


def test_one_way_that_fails_crashes_or_stays_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = {"[10, 'fp32']": {"failed": "why"}, "[10, 'bf16']": "crash", "[256, 'fp32']": "stay"}
    follow_script(monkeypatch, SCRIPTED.format(script=script))
    told: list[str] = []
    small, large = measure_networks(order(tmp_path, limit_s=8.0), told.append)
    assert (small.difference, dict(small.speed), small.unfinished) == (0.0, {REFERENCE: 100.0}, [])
    assert small.failed["fp32"] == "why"
    assert small.failed["bf16"].startswith("its process ended with -6; ")
    assert (large.difference, dict(large.speed)) == (0.0, {REFERENCE: 100.0, "bf16": 100.0})
    assert (dict(large.failed), large.unfinished) == ({}, ["fp32"])
    assert told[0] == "1/1 net, batch 10, cpu: 100 examples a second"
    assert "1/1 net, batch 256, fp32: not finished in 8 s" in told


def test_a_process_that_does_not_start_fails_every_way_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow_script(monkeypatch, "raise SystemExit('no such GPU')")
    for result in measure_networks(order(tmp_path)):
        assert set(result.failed) == {REFERENCE, "fp32", "bf16"}
        assert all(why.startswith("its process ended with 1; ") for why in result.failed.values())
    assert (tmp_path / "log").read_text() == "no such GPU\n", "started once"


def test_what_a_process_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = (
        f"import subprocess; open({str(tmp_path / 'pid')!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    )
    follow_script(monkeypatch, waits + SCRIPTED.format(script={}))
    measure_networks(order(tmp_path))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and is_running(int((tmp_path / "pid").read_text())):
        time.sleep(0.05)
    assert not is_running(int((tmp_path / "pid").read_text()))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # nobody may have waited for it


def test_networks_are_compiled_only_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow_script(monkeypatch, SCRIPTED.format(script={}))
    found = measure_networks(order(tmp_path, device="cuda", networks=["one", "other"], compiled=["other"]))
    assert {result.network for result in found if COMPILED in result.speed} == {"other"}
    assert all("fp16" in result.speed for result in found)


def test_a_small_and_a_large_network_are_compiled_unless_others_are_named() -> None:
    networks = list_networks(gpu_speed.DATASET)
    assert "harnet" not in networks, "it takes no images"
    assert set(choose_compiled("", "cpu", networks)) < set(choose_compiled("", "cuda", networks)) < set(networks)
    assert choose_compiled("all", "cpu", networks) == networks
    assert choose_compiled("none", "cuda", networks) == ()
    assert choose_compiled("resnet34,audionet", "cuda", networks) == ["resnet34", "audionet"]
    with pytest.raises(ConfigError, match=r"cannot compile 'harnet'; expected all, none or some of .*zda-mnist"):
        choose_compiled("harnet", "cuda", networks)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(build({"device": "cpu", "model": "cnn-dropout", "clients": 1, "train_size": 40}))


def test_training_is_held_against_the_cpus_without_the_chance_of_dropout(problem: Problem) -> None:
    found = gpu_speed.measure(problem, CPU, 10, REFERENCE)
    assert found["difference"] == 0.0
    assert found["speed"] > 0
    _, with_dropout = gpu_speed._time_training(problem, data := problem.load_client_data(0).train, CONFIG, CPU)
    _, without = gpu_speed._time_training(problem, data, CONFIG, CPU, dropout=False)
    assert gpu_speed.compute_difference(problem.copy_network().state_dict(), with_dropout, without) > 0.1


def test_a_way_that_fails_says_why(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_speed.WAYS, "odd", {"precision": "int3"})
    assert "int3" in gpu_speed._measure(problem, CPU, 10, "odd")["failed"]


def test_a_process_measures_a_real_network(tmp_path: Path) -> None:
    for result in measure_networks(order(tmp_path, networks=["zda-mnist"])):
        assert (result.difference, dict(result.failed), result.unfinished) == (0.0, {}, [])
        assert set(result.speed) == {REFERENCE, "fp32", "bf16"}
        json.dumps(vars(result))
