"""What a run's own generator makes: contact sheets, nearest real images, and an oracle on labels."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fedrpc.data.examples import Examples
from fedrpc.errors import ConfigError
from fedrpc.report.generated import show_generated
from fedrpc.report.sheet import MAX_COLUMNS
from fedrpc.study import generated
from fedrpc.study.generated import compare_distances, find_nearest, study_generated
from fedrpc.study.reading import Run
from tests.fakes import problem_of, run_in_memory
from tests.unit.methods.feddpms.dpms_runs import build
from tests.unit.methods.mpgan.test_mpgan import SMALL, run_directory


def test_the_nearest_image_is_found_in_any_batch_and_distances_are_in_units_of_the_range():
    data = Examples.of(torch.arange(600.0).reshape(600, 1, 1, 1).expand(-1, 1, 2, 2), torch.zeros(600))
    x = torch.tensor([3.0, 599.5, 256.25]).reshape(3, 1, 1, 1).expand(-1, 1, 2, 2)
    distance, which = find_nearest(x, data, (torch.tensor(0.0), torch.tensor(100.0)))
    assert which.tolist() == [3, 599, 256]
    torch.testing.assert_close(distance, torch.tensor([0.0, 0.005, 0.0025]), rtol=0, atol=1e-5)


def test_copies_are_counted_by_comparison_with_test_images():
    facts = compare_distances(torch.tensor([0.0, 0.05, 0.3]), torch.tensor([0.1, 0.2, 0.4]))
    assert facts["nearer_than_any_test_image"] == 2
    assert facts["generated_median"] == pytest.approx(0.05)
    assert facts["test_least"] == pytest.approx(0.1)


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_finished_run_is_shown(tmp_path: Path, rounds: int):
    problem = problem_of("mpgan", params=SMALL | {"sheet_every": 2})
    run_directory(tmp_path, run_in_memory(problem, rounds).state)
    summary = {"run_id": "r", "method": "mpgan", "dataset": "fmnist-mini", "caveat": "said"}
    console = Console(file=io.StringIO(), width=200)
    show_generated(study_generated(Run(tmp_path, {}, summary, [], {}), problem, 1), console)
    facts = json.loads((tmp_path / "generated.json").read_text())
    assert facts["neighbours"]["num_generated"] == 200
    assert facts["caveat"] == "said"
    if rounds:
        assert sum(facts["labels"]["histogram"]) == facts["labels"]["num_given"] > 0
        assert 0 <= facts["labels"]["oracle_agrees"] <= 100
    else:
        assert facts["labels"] is None
    for name in ("generated.png", "progress.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "are nearer to a training image than any test image is" in console.file.getvalue()


def test_rows_shorter_than_a_sheet_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generated, "_COMPARED", MAX_COLUMNS - 6)
    problem = problem_of("mpgan", params=SMALL)
    run_directory(tmp_path, run_in_memory(problem, 0).state)
    summary = {"run_id": "r", "method": "mpgan", "dataset": "fmnist-mini"}
    found = study_generated(Run(tmp_path, {}, summary, [], {}), problem, 1)
    show_generated(found, Console(file=io.StringIO()))
    assert (tmp_path / "generated.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_images_says_what_to_do(tmp_path: Path):
    problem = problem_of("feddpms", build=build, params={"preliminary": 2})
    run_directory(tmp_path, problem.method.init(problem.env))
    summary = {"run_id": "r", "method": "feddpms", "dataset": "fmnist-mini"}
    with pytest.raises(ConfigError, match=r"feddpms .* has no images to show.*: give one of more rounds"):
        study_generated(Run(tmp_path, {}, summary, [], {}), problem, 1)
