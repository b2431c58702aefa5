"""`fedrpc paper` with real runs, in a size that tells nothing about the paper."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fedrpc.report.paper import write_report
from tests.e2e.programs import Programs

TINY = [
    "dataset=fmnist-mini",
    "partition=iid",
    "rounds=1",
    "train_size=120",
    "clients=2",
    "fraction=1",
    "train.epochs=1",
]


def test_an_experiment_is_run_judged_and_skipped_when_it_is_finished(tmp_path: Path, programs: Programs) -> None:
    words = [word for item in TINY for word in ("--set", item)]
    rows = [word for name in ("FedAvg", "Fed-ZDAC", "Fed-ZDAS") for word in ("--row", name)]
    command = ["paper", "zda-mnist", "--small", "--seeds", "3", *words, *rows, "--out", str(tmp_path / "out")]
    first = programs.start("fedrpc", *command)
    first.wait_for_success()
    results = json.loads((tmp_path / "out" / "results.json").read_bytes())
    assert results["seeds"] == [3]
    assert results["changes"]["rounds"] == 1
    assert [len(row["seeds"]) for row in results["rows"]] == [1, 1, 1, 0, 0], "the rows that were named"
    judged = {claim["verdict"] for claim in results["claims"] if claim["than"] == "FedAvg"}
    assert judged, "the claims about rows that ran have verdicts"
    assert judged <= {"partly", "not"}, "one seed reproduces nothing"
    told = first.out
    assert "fewer than 3 seeds" in told
    assert "reduced: 20,000 images" in told

    again = programs.start("fedrpc", *command)
    again.wait_for_success()
    assert json.loads((tmp_path / "out" / "results.json").read_bytes()) == results

    cost = results["cost"]
    assert 0 < cost["client_core_hours"] < cost["core_hours"], "the server's and the start are in it"
    assert cost["peak_bytes"] > 100_000_000, "torch alone is larger"

    write_report(tmp_path / "kept", [tmp_path / "out" / "results.json"])
    report = (tmp_path / "kept" / "README.md").read_text()
    assert results["command"] in report
    assert f"{results['rows'][0]['ours']['last10']['mean']:.2f}" in report

    gone = next((tmp_path / "out").glob("fedavg-seed=3"))
    shutil.rmtree(gone)
    shown = programs.start("fedrpc", *command, "--show")
    shown.wait_for_success()
    assert not gone.exists(), "nothing is started"
    partial = json.loads((tmp_path / "out" / "results.json").read_bytes())
    assert partial["missing"] == ["FedAvg, seed 3"]
    assert [len(row["seeds"]) for row in partial["rows"]] == [0, 1, 1, 0, 0]
    assert {claim["verdict"] for claim in partial["claims"]} == {None}
    assert f"without runs: {len(partial['claims'])} claims" in shown.out
    assert "missing: FedAvg, seed 3" in shown.out
