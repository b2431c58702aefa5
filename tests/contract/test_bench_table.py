"""Holds the table of goals in tests/bench/README.md against the files of results that it is made from."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.bench import results, table
from tests.bench.goals import GOALS, Goal
from tests.bench.results import Figures

BENCHES = Path(table.__file__).parent


def test_readme_has_the_table_of_the_results() -> None:
    text = table.README.read_text()
    assert table.insert(text, table.render()) == text, "run `python -m tests.bench.table`"


def test_a_changed_figure_changes_the_table(tmp_path: Path) -> None:
    figures = Figures("first_task")
    figures.add("wall", 2.5, best=2.25)
    figures.write(tmp_path)
    before = table.render(tmp_path)
    path = tmp_path / "first_task.json"
    found = json.loads(path.read_text())
    found["figures"]["wall"]["value"] = 3.5
    path.write_text(json.dumps(found))
    after = table.render(tmp_path)
    assert "2.5 s (best 2.25) | at most 3 s | yes |" in before
    assert "3.5 s (best 2.25) | at most 3 s | **no** |" in after


def test_results_say_where_they_are_from(tmp_path: Path) -> None:
    figures = Figures("goodput")
    figures.add("down", 0.123456)
    figures.write(tmp_path)
    found = json.loads((tmp_path / "goodput.json").read_text())
    assert found["command"] == "make bench ARGS='-k goodput'"
    assert found["figures"]["down"]["value"] == 0.123
    assert {"processor", "cores", "load"} <= set(found["machine"])


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    rows = table.render(tmp_path).splitlines()[2:]
    assert len(rows) == len(GOALS)
    assert all("not measured yet" in row for row in rows)


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="end of goals"):
        table.insert("# Benches", "a table")


@pytest.mark.parametrize(("value", "reached"), [(0.34, False), (0.35, True), (0.36, True)])
def test_goals_have_a_direction(value: float, reached: bool) -> None:
    assert Goal("bench", "key", "what", 0.35, best="at least").is_reached(value) is reached
    assert Goal("bench", "key", "what", 0.35).is_reached(0.7 - value) is reached


def test_every_goal_names_a_bench_and_every_result_a_goal() -> None:
    trees = [ast.parse(path.read_text()) for path in BENCHES.glob("test_*.py")]
    names = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {f"test_{goal.bench}" for goal in GOALS} <= names
    keys = {(goal.bench, goal.key) for goal in GOALS}
    for path in results.FOLDER.glob("*.json"):
        assert {(path.stem, key) for key in json.loads(path.read_text())["figures"]} <= keys
