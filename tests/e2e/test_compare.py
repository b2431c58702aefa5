"""`fedrpc compare`: real runs of two methods, stopped and taken up again, and what goes wrong beside them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.programs import Gates, Program, Programs, settings
from tests.e2e.rundir import RunDir, find_repeated_ledger_keys

pytestmark = pytest.mark.timeout(240)

NUM_ROUNDS = 2


class Compared(NamedTuple):
    """A comparison that was stopped in its second method, and what the same command made of it."""

    out: Path
    words: list[str]
    stopped: Program
    first: dict[str, bytes]  # the first method's files when the comparison was stopped
    done: Program

    @property
    def figures(self) -> dict[str, Any]:
        return json.loads((self.out / "compare.json").read_text())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, shared_programs: Programs) -> Compared:
    """FedAvg, added by itself, and a method that is FedAvg with gates: the two must come to the same model."""
    folder = tmp_path_factory.mktemp("compare")
    gates, out = Gates(folder / "gates"), folder / "out"
    words = [*settings(rounds=NUM_ROUNDS, fraction=0.67), "--set", f"gated.params.gates={gates.folder}"]
    gates.shut("server-1")
    stopped = shared_programs.start("fedrpc", "compare", "--methods", "gated", "--out", out, *words)
    gates.wait("server-1")
    first = files(out / "fedavg")
    stopped.send(signal.SIGTERM)
    stopped.wait()
    gates.open_all()
    done = shared_programs.start("fedrpc", "compare", "--methods", "gated", "--out", out, *words)
    return Compared(out, words, stopped, first, done.wait_for_success())


def test_a_stopped_comparison_ends_at_once_and_compares_nothing(compared: Compared) -> None:
    assert compared.stopped.code == 128 + signal.SIGTERM
    assert "compare.json" not in compared.stopped.out
    assert compared.stopped.out.splitlines()[-1] == (
        "stopped in gated after 1 of 2 rounds; 1 of 2 runs are left: the same command again goes on from there"
    )


def test_the_same_command_leaves_what_is_finished_and_goes_on_with_the_rest(compared: Compared) -> None:
    assert [row["method"] for row in compared.stopped.read_log("starts")] == ["fedavg", "gated"]
    assert [row["method"] for row in compared.done.read_log("finished_already")] == ["fedavg"]
    assert [row["method"] for row in compared.done.read_log("resumes")] == ["gated"]
    played = [(row["method"], row["round"]) for row in compared.done.read_log("round_finished")]
    assert played == [("gated", 1)], "round 0 was durable"
    assert files(compared.out / "fedavg") == compared.first
    assert find_repeated_ledger_keys(RunDir(compared.out / "gated")) == []


def test_all_start_from_the_same_model_split_and_cohorts(compared: Compared) -> None:
    figures = compared.figures
    assert [entry["method"] for entry in figures["methods"]] == ["fedavg", "gated"]
    assert figures["same"]["cohorts"] == {"agree": True, "rounds_apart": {}}
    assert (figures["setting"]["clients_a_round"], figures["setting"]["num_clients"]) == (2, 3)
    fedavg, gated = figures["methods"]
    assert fedavg["model_sha256"] == gated["model_sha256"]
    assert gated["overhead"] == fedavg["overhead"] == 1.0
    assert gated["params"]["gates"]
    for entry in figures["methods"]:
        [run] = entry["runs"]
        summary = RunDir(compared.out / run["run"]).summary
        assert entry["accuracy"]["last"] == summary["accuracy"]["global"]
        assert entry["bytes"]["tensor"]["measured"] == entry["bytes"]["tensor"]["predicted"]
        assert entry["bytes"]["kernel"] > entry["bytes"]["message"] > entry["bytes"]["tensor"]["measured"]
        assert len(entry["curve"]) == NUM_ROUNDS
        assert entry["privacy"]["text"].startswith("no guarantee: ")
        assert (compared.out / run["run"] / "report.html").exists()


def test_the_table_and_the_page_are_there(compared: Compared) -> None:
    for words in ("2 methods on fmnist-mini", "same cohorts in every round", "exact", "no guarantee", "compare.html"):
        assert words in compared.done.out
    html = (compared.out / "compare.html").read_text()
    assert html.startswith("<!doctype html>")
    assert "Accuracy over bytes" in html


def test_a_method_that_fails_does_not_stop_the_others(compared: Compared, programs: Programs) -> None:
    """Its folder has something else in it, so its server refuses; the two finished ones are shown all the same."""
    (compared.out / "fedprox").mkdir()
    (compared.out / "fedprox" / "notes.txt").touch()
    program = programs.start("fedrpc", "compare", "--methods", "fedprox,gated", "--out", compared.out, *compared.words)
    assert program.wait() == 78
    figures = compared.figures
    assert [entry["method"] for entry in figures["methods"]] == ["fedavg", "gated"]
    [failure] = figures["failed"]
    assert (failure["method"], failure["exit_code"]) == ("fedprox", 78)
    assert "is not empty and holds no run" in failure["reason"]
    assert "is not empty and holds no run" in program.out
    assert program.err.splitlines()[-1] == "error: 1 of 3 methods failed: fedprox"
    assert "Traceback" not in program.err


# Seeds


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory, shared_programs: Programs) -> tuple[Path, Program]:
    """Two methods with two seeds, two runs at a time, and one that the network does not suit."""
    out = tmp_path_factory.mktemp("seeded") / "out"
    words = ["--methods", "fedprox", "--methods", "fedvae", "--model", "zda-mnist", "--target", "5", "--target", "100"]
    program = shared_programs.start(
        "fedrpc", "compare", *words, "--seeds", "0-1", "--jobs", "2", "--out", out, *settings(rounds=1)
    )
    program.wait()
    return out, program


def test_every_method_runs_with_every_seed_and_one_that_is_refused_stops_none(seeded: tuple[Path, Program]) -> None:
    out, program = seeded
    assert program.code == 78
    assert program.err.splitlines()[-1] == "error: 2 of 6 runs failed: fedvae"
    assert len(program.read_log("refused")) == 2
    figures = json.loads((out / "compare.json").read_text())
    assert figures["seeds"] == [0, 1]
    fedavg, fedprox = figures["methods"]
    assert [run["run"] for run in fedprox["runs"]] == ["fedprox,seed=0", "fedprox,seed=1"]
    assert fedprox["difference"]["last"]["n"] == 2
    assert fedprox["statistics"]["last"]["sd"] > 0
    low, high = fedprox["targets"]
    assert (low["reached"], low["rounds"]["mean"], high["reached"], high["rounds"]) == (2, 1.0, 0, None)
    assert {(failure["name"], failure["refused"]) for failure in figures["failed"]} == {("fedvae", True)}
    assert "2 of 2" in program.out
    assert "never, best" in program.out
    assert len((out / "compare.csv").read_text().splitlines()) == 1 + 4
    assert "toprule" in (out / "compare.tex").read_text()
    assert fedavg["runs"][0]["model_sha256"] != fedavg["runs"][1]["model_sha256"]


def test_a_run_is_the_same_alone(seeded: tuple[Path, Program], tmp_path: Path, programs: Programs) -> None:
    words = ["--method", "fedprox", "--model", "zda-mnist", "--seed", "1"]
    programs.start("fedrpc", "run", *words, "--out", tmp_path / "run", *settings(rounds=1)).wait_for_success()
    assert RunDir(tmp_path / "run").model_sha256 == RunDir(seeded[0] / "fedprox,seed=1").model_sha256


def test_finished_runs_of_any_folders_stand_side_by_side(
    seeded: tuple[Path, Program], compared: Compared, programs: Programs
) -> None:
    folders = [seeded[0] / "fedavg,seed=0", compared.out]
    shown = programs.start("fedrpc", "compare", *folders).wait_for_success()
    assert "warning: different fraction: 1.0, 0.67" in shown.out
    assert "warning: different rounds: 1, 2" in shown.out
    nothing = programs.start("fedrpc", "compare")
    assert nothing.wait() == 78
    assert "expected --methods to run, or folders" in nothing.err


# Mistakes


@pytest.mark.parametrize(
    ("methods", "item", "words"),
    [
        ("fedprox,fedavgg", "seed=0", "unknown method 'fedavgg'"),
        ("fedprox", "params.muu=1", "Did you mean 'params.mu'?"),
    ],
)
def test_a_wrong_name_is_one_line_and_nothing_starts(
    tmp_path: Path, programs: Programs, methods: str, item: str, words: str
) -> None:
    out = tmp_path / "out"
    program = programs.start("fedrpc", "compare", "--methods", methods, "--out", out, "--set", item)
    assert program.wait() == 78
    starting, line = program.err.splitlines()
    assert "starting a comparison" in starting
    assert line.startswith("error: ")
    assert words in line
    assert not out.exists()
