"""The check of a GPU finds what is wrong there, and says nothing of what is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer.testing
from safetensors.torch import save_file

from fedrpc.cli import app
from fedrpc.config import build, list_recipes, read_recipe, to_toml
from fedrpc.errors import ConfigError, FedrpcError
from fedrpc.launch import gpu_check
from fedrpc.launch.gpu_check import MethodResult, check_gpu, list_faults
from fedrpc.launch.gpu_speed import DATASET, NetworkResult
from fedrpc.launch.plan import Request, plan_runs
from fedrpc.methods import METHODS
from fedrpc.problem import Problem, list_networks
from fedrpc.report.gpu_check import render_report

FOLDERS = ("device", "device-again", "cpu", "cpu-nudged")
WELL = MethodResult("fedavg", repeats=True, difference=1e-4, seconds=(1.0, 2.0))
TRAINED = NetworkResult("net", 10, 1e-5, {"cpu": 100.0, "fp32": 1234.5}, {})


def test_a_machine_without_a_gpu_is_told_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^no GPU to check: .* 0 CUDA devices found; nvidia-smi shows .*$"):
        check_gpu("cuda", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_right_is_no_fault() -> None:
    assert list_faults([WELL], [TRAINED]) == []


@pytest.mark.parametrize(
    ("ran", "trained", "said"),
    [
        ([MethodResult("moon", failed="out of memory")], [], "moon failed: out of memory"),
        ([MethodResult("moon", repeats=False, difference=0.0)], [], "moon came to another model the second time"),
        ([MethodResult("moon", repeats=True, difference=0.2)], [], "moon differs from the CPU's model by 0.2"),
        ([MethodResult("moon", repeats=True, difference=float("nan"))], [], "moon differs from the CPU's model by nan"),
        (
            [],
            [NetworkResult("net", 10, 0.02, {}, {})],
            "net (batch 10) trains to weights that differ",
        ),
        ([], [NetworkResult("net", 10, None, {}, {"fp16": "no"})], "net (batch 10) does not train in fp16: no"),
        ([], [NetworkResult("net", 10, None, {}, {}, ["cpu"])], "net (batch 10) was not held against the CPU"),
    ],
)
def test_each_fault_is_named(ran: list[MethodResult], trained: list[NetworkResult], said: str) -> None:
    [fault] = list_faults([WELL, *ran], [TRAINED, *trained])
    assert fault.startswith(said)


def test_a_method_that_carries_any_rounding_far_may_differ_by_more() -> None:
    def judge(nudged: float) -> list[str]:
        return list_faults([MethodResult("fedbr", repeats=True, difference=0.2, nudged=nudged)], [])

    assert judge(0.1) == []
    assert len(judge(0.05)) == 1


def test_a_way_that_was_not_finished_is_no_fault_if_it_is_not_the_comparison() -> None:
    assert list_faults([], [NetworkResult("net", 10, 0.0, {}, {}, ["bf16, compiled"])]) == []


def test_a_folder_with_results_of_before_is_refused(tmp_path: Path) -> None:
    (tmp_path / "summary.json").touch()
    with pytest.raises(ConfigError, match="has files, which could be taken for results; choose another --out"):
        check_gpu("cpu", tmp_path)


def make_run(folder: Path, move: float, seconds: float, digest: str = "a") -> None:
    """A finished run whose model moved by `move` in every weight."""
    folder.mkdir(parents=True)
    config = build({"device": "cpu"})
    network = Problem(config).copy_network().state_dict()
    moved = {name: value + move if value.is_floating_point() else value for name, value in network.items()}
    save_file(moved, folder / "model.safetensors")
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "summary.json").write_text(json.dumps({"model_sha256": digest, "seconds": seconds}))


def run_as(monkeypatch: pytest.MonkeyPatch, moves: dict[str, float], digests: dict[str, str], said: str = "") -> None:
    def compare(folder: Path, options: list[str], say: object) -> str:
        if folder.name in moves:
            make_run(folder / "fedavg", moves[folder.name], 3.0, digests.get(folder.name, "a"))
        return said

    monkeypatch.setattr(gpu_check, "_compare", compare)


def run_methods(out: Path) -> list[MethodResult]:
    return gpu_check._run_methods("cuda", out, "fedavg", lambda _: None)


def test_models_are_held_against_the_cpus_by_how_far_those_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as(monkeypatch, {"device": 0.101, "device-again": 0.101, "cpu": 0.1, "cpu-nudged": 0.102}, {})
    [found] = run_methods(tmp_path)
    assert (found.method, found.failed, found.repeats, found.seconds) == ("fedavg", "", True, (3.0, 3.0))
    assert found.difference == pytest.approx(0.01, rel=1e-3)
    assert found.nudged == pytest.approx(0.02, rel=1e-3)


def test_a_second_run_with_other_bits_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(monkeypatch, dict.fromkeys(FOLDERS, 0.1), {"device-again": "b"})
    [found] = run_methods(tmp_path)
    assert not found.repeats


def test_a_run_without_a_result_is_a_failure_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(monkeypatch, {"cpu": 0.1}, {}, said="error: the GPU's memory is full")
    [found] = run_methods(tmp_path)
    assert "no result in" in found.failed
    assert "memory is full" in found.failed
    run_as(monkeypatch, {}, {}, said="error: all is lost")
    with pytest.raises(FedrpcError, match="no method ran: error: all is lost"):
        run_methods(tmp_path / "none")


def test_a_run_that_takes_too_long_is_ended_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_RUN_S", 0.0)
    (tmp_path / "cpu").mkdir()
    assert gpu_check._compare(tmp_path / "cpu", ["--methods", "fedavg"], lambda _: None) == "not finished in 0 s"


def test_every_run_is_told_of_once_when_it_is_over(tmp_path: Path) -> None:
    told, said = set[Path](), list[str]()
    for name in ("fedavg", "moon"):
        make_run(tmp_path / name, 0.1, 3.0)
        gpu_check._tell_finished(tmp_path, told, said.append)
    assert said == ["fedavg took 3.0 s, 1", "moon took 3.0 s, 2"]


def test_the_report_is_a_table_for_methods_and_one_for_networks() -> None:
    shown = render_report(
        {
            "device": {"name": "a GPU", "torch": "2", "cuda": "13"},
            "context_bytes": 400 << 20,
            "methods": [vars(WELL), vars(MethodResult("moon", failed="why"))],
            "networks": [
                vars(TRAINED),
                vars(NetworkResult("other", 10, None, {"cpu": 1.0}, {"fp32": "no"})),
                vars(NetworkResult("slow", 10, None, {"cpu": 1.0}, {}, ["fp32"])),
            ],
            "faults": ["moon failed: why"],
            "limit_s": 60.0,
            "ways": ["cpu", "fp32", "bf16"],
            "compiled": [],
        }
    )
    assert "# a GPU, torch 2, CUDA 13" in shown
    assert "- moon failed: why" in shown
    assert "400 MiB" in shown
    assert "| fedavg | yes | yes | 0.0001 | 0 | 1.0 | 2.0 |" in shown
    assert "| moon | no | - | - | - | - | - |" in shown
    assert "| net | 10 | 1e-05 | 100 | 1,234 |" in shown
    assert "| other | 10 | - | 1 | failed |" in shown
    assert "| slow | 10 | - | 1 | not finished in 60 s |" in shown
    assert "Compiled: none" in shown


@pytest.mark.parametrize(("methods", "expected"), [("all", set(METHODS)), ("moon,mpgan", {"fedavg", "moon", "mpgan"})])
def test_the_recipe_is_every_method_in_little_or_those_that_are_named(methods: str, expected: set[str]) -> None:
    assert gpu_check.RECIPE in list_recipes()
    plan = plan_runs(Request([methods], True, [read_recipe(gpu_check.RECIPE)], {}, []))
    assert {planned.cell.method for planned in plan.runs} == expected
    assert all(planned.config.rounds == 2 for planned in plan.runs)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_check_itself_runs_where_there_is_no_gpu(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["gpu-check", "--device", "cpu", "--methods", "fedavg", "--examples", "40", "--out", str(out)]
    ended = typer.testing.CliRunner().invoke(app, command)
    assert ended.exit_code == 0, ended.output
    assert "Everything is as it should be." in ended.output
    found = json.loads((out / "gpu-check.json").read_text())
    assert [each["method"] for each in found["methods"]] == ["fedavg"]
    assert found["methods"][0]["difference"] == 0.0
    assert found["methods"][0]["repeats"]
    assert [(each["network"], each["batch_size"]) for each in found["networks"]] == [
        (name, batch_size) for name in list_networks(DATASET) for batch_size in (10, 256)
    ]
    for each in found["networks"]:
        assert each["difference"] == 0.0, "the CPU against itself"
        assert {"cpu", "fp32", "bf16"} <= {*each["speed"], *each["unfinished"]}
    [small, _] = [each for each in found["networks"] if each["network"] == "zda-mnist"]
    assert "bf16, compiled" in {*small["speed"], *small["unfinished"]}
