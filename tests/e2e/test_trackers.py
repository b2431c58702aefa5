"""`--tracker`: the README's own tracker follows real runs; one that fails, or hangs, costs a line and no run."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import fedrpc.tracking
from fedrpc.launch.trackers import tracking
from tests.e2e.programs import Programs, environment, find_free_port, settings, wait_for
from tests.e2e.rundir import RunDir, read_rows
from tests.tracked import add_round, begin_run

pytestmark = pytest.mark.timeout(240)

[SOURCE] = re.findall(r"```python\n(.*?)```", Path(fedrpc.tracking.__file__).with_name("README.md").read_text(), re.S)
OTHERS = """
class Whole(Lines):
    def finish(self, summary, artifacts):
        super().finish(summary, artifacts)
        self._write(dict(summary))

class Hanging(Lines):
    def log(self, step, values):
        import os, signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        helper = subprocess.Popen(["sleep", "600"])
        Path(self.target + ".new").write_text(f"{os.getpid()} {helper.pid}")
        Path(self.target + ".new").rename(Path(self.target).with_name("pids"))
        time.sleep(600)

class Broken(Tracker):
    def log(self, step, values):
        raise OSError("the disk of the\\ntool is full")
"""
POINTS = "[fedrpc.trackers]\nlines = my_package:Lines\nwhole = my_package:Whole\nbroken = my_package:Broken\n"
POINTS += "hanging = my_package:Hanging\n"


@pytest.fixture
def around(tmp_path: Path) -> dict[str, str]:
    """An environment in which the package with the trackers is found."""
    package = tmp_path / "package"
    info = package / "my_package-0.1.dist-info"
    info.mkdir(parents=True)
    (package / "my_package.py").write_text(SOURCE + OTHERS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(POINTS)
    env = environment(tmp_path / "env")
    env["PYTHONPATH"] = os.pathsep.join([str(package), env["PYTHONPATH"]])
    return env


@pytest.fixture
def programs(tmp_path: Path, around: dict[str, str]) -> Iterator[Programs]:
    """Console scripts in that environment."""
    programs = Programs(tmp_path / "programs", around)
    yield programs
    programs.end()


def figures(address: str) -> str | None:
    """What Prometheus reads there; None while nobody serves it."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, ConnectionError):
        return None


def test_a_run_that_is_stopped_and_resumed_is_tracked_once_and_a_broken_tracker_costs_a_line(
    tmp_path: Path, programs: Programs
) -> None:
    run, lines, metrics = RunDir(tmp_path / "run"), tmp_path / "lines", f"127.0.0.1:{find_free_port()}"
    words = ["run", "--out", run.path, "--tracker", f"whole:{lines}", "--tracker", "broken", *settings(rounds=40)]
    first = programs.start("fedrpc", *words, "--metrics-listen", metrics)
    wait_for("a round is tracked", lambda: lines.exists() and '"round": 1' in lines.read_text())
    served = wait_for("metrics are served", lambda: figures(metrics))
    assert "fedrpc_message_bytes_total" in served
    assert "fedrpc_rounds 40.0" in served
    first.send(signal.SIGINT)
    assert first.wait(60) == 130
    reached = len([row for row in read_lines(lines) if "round" in row])

    fewer = [word if word != "rounds=40" else f"rounds={reached + 2}" for word in words]
    second = programs.start("fedrpc", *fewer).wait_for_success()
    head, *rounds, tail, summary = read_lines(lines)
    assert head["method"] == "fedavg"
    assert [row["round"] for row in rounds] == list(range(1, reached + 3))
    assert tail["model"] == run.model_sha256
    assert {"report.html", "model.safetensors"} <= set(tail["files"])
    last = [row for row in read_rows(run.path / "records.jsonl") if row["event"] == "round_finished"][-1]
    assert rounds[-1]["accuracy"] == last["accuracy"]
    for name, layer, direction, kind in list_series(run):
        logged = sum(row.get(name, 0) for row in rounds) + summary.get(f"after_last_round/{name}", 0)
        booked = run.sums(direction=direction, **({} if kind == "all" else {"kind": kind}))[layer]
        assert logged == booked, f"{name}: nothing is lost or doubled by the stop"
        if kind == "all":
            assert booked == run.summary["bytes"]["total"][direction][layer.removesuffix("_bytes")]
            assert booked > 0
    for program in (first, second):
        said = [line for line in program.err.splitlines() if "broken failed" in line]
        assert len(said) == 1
        assert "the disk of the tool is full" in said[0]
        assert "Traceback" not in program.err


def list_series(run: RunDir) -> set[tuple[str, str, str, str]]:
    """The curves of bytes that a tracker has of this run: name, layer, direction and kind."""
    found = {(row["direction"], kind) for row in read_rows(run.path / "ledger.jsonl") for kind in ("all", row["kind"])}
    layers = ("tensor_bytes", "message_bytes")
    return {(f"{layer}/{direction}/{kind}", layer, direction, kind) for layer in layers for direction, kind in found}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [("line", "Did you mean 'lines'?"), ("wandb:on", "expected wandb, wandb:offline or wandb:online")],
)
def test_a_wrong_tracker_is_told_before_anything_starts(
    spec: str, remedy: str, tmp_path: Path, programs: Programs
) -> None:
    if spec.startswith("wandb"):
        pytest.importorskip("wandb", reason="wandb is not installed; `make trackers` installs it")
    ended = programs.start("fedrpc", "run", "--out", tmp_path / "run", "--tracker", spec, *settings())
    assert ended.wait(60) == 78
    assert remedy in ended.err
    assert not (tmp_path / "run").exists()


def is_alive(pid: str) -> bool:
    """Whether a process is there, and no mere entry that its parent has not read yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_tracker_that_hangs_is_killed_with_all_that_it_started(
    tmp_path: Path, around: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", around["PYTHONPATH"])
    spec, run = f"hanging:{tmp_path / 'lines'}", tmp_path / "run"
    run.mkdir()
    begin_run(run)
    add_round(run, 0)
    with capture_logs() as said, tracking([spec], run, patience_s=0.2):
        pids = wait_for("it hangs", lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().split())
        assert len([pid for pid in pids if is_alive(pid)]) == 2
    wait_for("the kernel has ended them", lambda: not any(map(is_alive, pids)))
    assert [row["event"] for row in said] == [
        f"the run is over; waiting for {spec}, 0.2 s at most",
        f"{spec} did not end within 0.2 s of the run; `fedrpc track {run} --tracker {spec}` adds what is missing",
    ]


def test_every_run_of_a_comparison_is_tracked(tmp_path: Path, programs: Programs) -> None:
    lines = tmp_path / "lines"
    words = ["--methods", "fedprox", "--jobs", "1", "--tracker", f"lines:{lines}", *settings(rounds=1)]
    programs.start("fedrpc", "compare", "--out", tmp_path / "compared", *words).wait_for_success()
    found = [row["method"] for row in read_lines(lines) if "method" in row]
    assert sorted(found) == ["fedavg", "fedprox"]
