"""`fedrpc.run` comes to the model of `fedrpc run` from scripts, threads and event loops, and leaves no process."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from fedrpc.config import parse_set
from fedrpc.errors import ConfigError
from tests.e2e.programs import NUM_CLIENTS, Gates, Program, Programs, settings, wait_for
from tests.e2e.rundir import RunDir
from tests.e2e.test_faults import gone

pytestmark = pytest.mark.timeout(240)

# No `if __name__ == "__main__"`: whatever is started must not run this again.
ANYWHERE = """
import asyncio, json, sys, threading
import fedrpc
assert "torch" not in sys.modules, "import fedrpc is light"
import torch
torch.ones(300, 300) @ torch.ones(300, 300)  # its threads are there: this process must not be forked
settings = json.loads(sys.argv[1])
found = {}

async def call():
    found["run"] = fedrpc.run(out="run", **settings)  # where an event loop is running

thread = threading.Thread(target=lambda: asyncio.run(call()))
thread.start()
thread.join()
run = found["run"]
try:
    fedrpc.run(**settings, partition="group", out="other")
except fedrpc.errors.ConfigError as error:
    wrong = str(error)
print(json.dumps({"sha256": run.model_sha256, "wrong": wrong, "page": run.page().exists(), "repr": repr(run)}))
"""
GATED = """
import json, sys
import fedrpc
fedrpc.run("gated", out="run", **json.loads(sys.argv[1]))
"""


def start(programs: Programs, folder: Path, source: str, words: list[str]) -> Program:
    """Starts a script in a folder of its own."""
    values: dict[str, Any] = parse_set(words[1::2])
    source = f"import os\nos.chdir({str(folder)!r})\n{source}"
    (folder / "script.py").write_text(source)
    return programs.start("python", folder / "script.py", json.dumps(values))


def test_a_script_comes_to_the_same_model_from_a_thread_with_an_event_loop(
    tmp_path: Path, scripts: Programs, finished: RunDir
) -> None:
    script = start(scripts, tmp_path, ANYWHERE, settings())
    script.wait_for_success()
    told = json.loads(script.out.splitlines()[-1])
    assert told["sha256"] == finished.model_sha256
    assert told["wrong"].startswith("unknown partition 'group'; registered: "), "found by the server, raised here"
    assert told["page"]
    assert told["repr"].startswith("fedavg on fmnist-mini\n  accuracy")
    assert f"all {NUM_CLIENTS} clients have joined" in script.err
    for name in ("ledger.jsonl", "summary.json", "report.html"):
        assert (tmp_path / "run" / name).exists()


def test_an_interrupted_call_ends_every_process_and_goes_on(
    tmp_path: Path, scripts: Programs, gates: Gates, finished: RunDir
) -> None:
    words = settings(params__gates=str(gates.folder), params__batch_s=0.05)
    script = start(scripts, tmp_path, GATED, words)
    gates.wait("client-1-1")
    everybody = script.descendants()
    assert len(everybody) == NUM_CLIENTS + 4, "the script, the launcher, server, fork server and clients"
    script.send(signal.SIGINT)
    assert script.wait() != 0
    wait_for("every process ends", lambda: gone(everybody))
    assert script.err.rstrip().endswith("KeyboardInterrupt")
    assert not list(tmp_path.rglob("store.db-wal")), "clients were asked to end, and closed their stores"
    start(scripts, tmp_path, GATED, words).wait_for_success()
    assert RunDir(tmp_path / "run").model_sha256 == finished.model_sha256


def test_a_comparison_has_the_numbers_of_the_command_line(
    tmp_path: Path, programs: Programs, finished: RunDir, monkeypatch: pytest.MonkeyPatch, env: dict[str, str]
) -> None:
    import fedrpc

    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    values: dict[str, Any] = parse_set(settings()[1::2])
    found = fedrpc.compare("fedprox", out=tmp_path / "compared", progress=False, **values)
    assert (list(found.runs), dict(found.failed)) == (["fedavg", "fedprox"], {})
    fedavg = found.runs["fedavg"]
    assert fedavg.model_sha256 == finished.model_sha256, "the same run as by `fedrpc run`"
    assert fedavg.values["bytes"]["method"] == finished.summary["bytes"]["method"]
    assert fedavg.ledger["tensor_bytes"].sum() == sum(row["tensor_bytes"] for row in finished.ledger)
    assert len(fedavg.records.query("event == 'round_finished'")) == finished.summary["num_rounds"]

    told = json.loads((tmp_path / "compared" / "compare.json").read_text())
    words = ["--methods", "fedprox", "--out", tmp_path / "compared", *settings()]
    programs.start("fedrpc", "compare", *words).wait_for_success()
    assert json.loads((tmp_path / "compared" / "compare.json").read_text()) == told, "nothing was run again"
    assert found.values == told
    with (tmp_path / "compared" / "compare.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["name"] for line in lines] == list(found.table.index)
    for line, row in zip(lines, found.table.to_dict("records"), strict=True):
        assert row["accuracy"] == pytest.approx(float(line["accuracy_last"]))
        for name in ("tensor_bytes", "message_bytes", "kernel_bytes"):
            assert row[name] == int(line[name])
    assert "fedprox" in repr(found)
    assert found.page().read_text().startswith("<!doctype html>")


def test_a_run_within_one_process_comes_to_the_same_model_and_the_same_bytes(
    tmp_path: Path, programs: Programs, finished: RunDir
) -> None:
    import fedrpc

    values: dict[str, Any] = parse_set(settings()[1::2])
    run = fedrpc.run(out=tmp_path / "run", in_process=True, **values)
    assert run.model_sha256 == finished.model_sha256
    assert run.values["config_hash"] == finished.summary["config_hash"]
    ours, theirs = run.values["bytes"], finished.summary["bytes"]
    assert ours["method"] == theirs["method"], "tensor and message bytes by kind, both ways"
    assert run.values["ledger_check"]["differing"] == 0
    assert [ours["total"][direction]["kernel"] for direction in ("down", "up")] == [None, None]
    assert "no wire carried them" in ours["kernel_note"]
    assert "no wire: one process" in run.page().read_text()
    whatif = programs.start("fedrpc", "whatif", tmp_path / "run", "--link", "3g")
    assert whatif.wait() == ConfigError.exit_code
    assert "no wire was measured" in whatif.err
    assert len(whatif.err.splitlines()) == 1
