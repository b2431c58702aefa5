"""The results of a paper's experiment on a terminal of any width."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from fedrpc.report.paper_table import show_results
from fedrpc.report.paper_words import find_printed, list_cells, list_run

RESULTS = sorted((Path(__file__).parents[3] / "docs" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("width", [80, 120])
def test_no_figure_is_cut_or_broken(path: Path, width: int) -> None:
    results = json.loads(path.read_text())
    console = Console(file=io.StringIO(), width=width)
    show_results(results, console)
    shown = console.file.getvalue().splitlines()
    for row in list_run(results):
        lines = [line for line in shown if line.startswith(f"{row['name']}  ")]
        found = "  ".join(lines)
        for cell in list_cells(row, results["measures"], find_printed(results), len(results["seeds"])):
            assert cell in found, row["name"]
        assert all(len(line) <= width for line in lines)


def test_a_wide_terminal_has_one_table() -> None:
    [path] = [path for path in RESULTS if path.stem == "overhead"]
    console = Console(file=io.StringIO(), width=200)
    show_results(json.loads(path.read_text()), console)
    assert sum(line.startswith("SCAFFOLD  ") for line in console.file.getvalue().splitlines()) == 1
