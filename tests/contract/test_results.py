"""Holds README and plots of docs/results against the files that they are made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedrpc.catalog import read_catalog
from fedrpc.report.paper import PLOTS, VARIATIONS, make_report, name_results
from fedrpc.study.experiment import is_experiment, read_experiment
from fedrpc.study.overhead import COSTS

FOLDER = Path(__file__).parents[2] / "docs" / "results"
FILES = [*FOLDER.glob("*.json"), *(FOLDER / VARIATIONS).glob("*.json")]
MAX_BYTES = 60_000  # of a file in the repository


def test_readme_and_plots_are_made_from_the_files() -> None:
    pages = make_report(FOLDER)
    for name, text in pages.items():
        assert (FOLDER / name).read_text() == text, "run `python -m fedrpc.report.paper docs/results`"
    kept = {f"{PLOTS}/{path.name}" for path in (FOLDER / PLOTS).iterdir()}
    assert kept == {name for name in pages if name.endswith(".svg")}
    assert all(len(pages[name]) < MAX_BYTES for name in kept)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_results_are_of_an_experiment_and_have_its_name(path: Path) -> None:
    results = json.loads(path.read_text())
    assert path == FOLDER / name_results(results)
    assert path.stat().st_size < MAX_BYTES
    assert is_experiment(results["name"])
    assert results["command"].startswith(f"fedrpc paper {results['name']} ")


def test_the_overhead_of_every_method_is_measured() -> None:
    experiment = read_experiment("overhead")
    assert {row.method for row in experiment.rows} == {*read_catalog().methods}
    assert {*COSTS} <= {*experiment.measures}


def test_each_layer_of_the_wire_holds_the_one_before() -> None:
    for row in json.loads((FOLDER / "overhead.json").read_text())["rows"]:
        layers = [row["ours"][f"{layer}_bytes"]["mean"] for layer in ("tensor", "encoded", "message", "kernel")]
        assert layers == sorted(layers), row["name"]


def test_the_choice_of_q_follows_from_its_rule() -> None:
    """The lowest variance over clients of those at most a point less accurate than FedAvg on the held-out part."""
    results = json.loads((FOLDER / VARIATIONS / "qffl-mnist+validation=0.1.json").read_text())
    found = {row["name"]: row["ours"] for row in results["rows"]}
    least = found.pop("FedAvg")["last10"]["mean"] - 1
    fit = {name: ours["client_variance"]["mean"] for name, ours in found.items() if ours["last10"]["mean"] >= least}
    notes = " ".join(read_experiment("qffl-mnist").notes)
    assert f"by it the choice is {min(fit, key=lambda name: fit[name])}," in notes
