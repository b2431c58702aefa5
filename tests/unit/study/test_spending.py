"""What clients spent in all runs is read from their folders, the worst first, and fits on a narrow terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedrpc.client.policy import Policy, keep_policy
from fedrpc.client.spending import SPENDING_FILE, SpendingFile
from fedrpc.errors import ConfigError
from fedrpc.privacy.accountant import compute_epsilon
from fedrpc.privacy.mechanisms import REPLACE_ONE, ZERO_OUT
from fedrpc.report.spending import show_spending
from fedrpc.study.spending import collect_spending


def spend(state: Path, client: int, steps: int, *, run: str = "run", kinds: tuple[str, ...] = ()) -> None:
    folder = state / str(client)
    folder.mkdir(parents=True, exist_ok=True)
    spent = {ZERO_OUT: ((1.0, 1.0, steps),)} if steps else {}
    SpendingFile(folder / SPENDING_FILE, "digest", "fmnist-mini", run).add(spent, kinds)


def show(folder: Path, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    show_spending(collect_spending(folder), console)
    return console.export_text()


def test_runs_are_composed_at_the_delta_of_the_clients_policy(tmp_path: Path) -> None:
    for run in ("a", "b"):
        spend(tmp_path, 3, 2, run=run)
    keep_policy(tmp_path / "3", {"max_epsilon": 20.0, "delta": 1e-6})
    (found,) = collect_spending(tmp_path).found
    cost = compute_epsilon(((1.0, 1.0, 4),), 1e-6)
    assert (found.client, found.dataset, found.num_runs, found.epsilons) == (3, "fmnist-mini", 2, {ZERO_OUT: cost})
    assert found.left == 20.0 - cost
    assert found.policy == Policy(max_epsilon=20.0, delta=1e-6)


def test_nothing_is_left_of_a_limit_that_was_lowered(tmp_path: Path) -> None:
    spend(tmp_path, 0, 50)
    keep_policy(tmp_path / "0", {"max_epsilon": 1.0})
    assert collect_spending(tmp_path).found[0].left == 0.0


def test_uncovered_releases_are_worst_then_the_largest_epsilon(tmp_path: Path) -> None:
    spend(tmp_path, 0, 2)
    spend(tmp_path, 1, 9)
    spend(tmp_path, 2, 0, kinds=("weights",))
    assert [one.client for one in collect_spending(tmp_path).found] == [2, 1, 0]


def test_a_run_directory_has_its_clients_state(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    spend(tmp_path / "clients", 0, 1)
    assert collect_spending(tmp_path).num_clients == 1


def test_a_folder_without_clients_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no clients' state: expected folders 0, 1"):
        collect_spending(tmp_path / "missing")


def test_the_table_fits_on_a_narrow_terminal(tmp_path: Path) -> None:
    spend(tmp_path, 0, 3, kinds=("weights", "scalars"))
    SpendingFile(tmp_path / "0" / SPENDING_FILE, "digest", "fmnist-mini", "b").add({REPLACE_ONE: ((2.0, 1.0, 1),)}, [])
    keep_policy(tmp_path / "0", {"max_epsilon": 8.0})
    (tmp_path / "1").mkdir()
    text = show(tmp_path)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for word in (
        "0 fmnist-mini 2 8.385 8.385 1e-05",
        "1.993 1.993 1e-05",
        "scalars, sizes public weights",
        "1 more client, of which nothing has left yet",
    ):
        assert word in words
    assert "…" not in text, "no number is cut off"


def test_of_many_clients_the_worst_are_shown(tmp_path: Path) -> None:
    for client in range(60):
        spend(tmp_path, client, 1 + client % 30)
    text = show(tmp_path)
    assert f"and 40 more lines: ε of {compute_epsilon(((1.0, 1.0, 20),), 1e-5):.4g} at most, all covered" in text
    assert text.count("fmnist-mini") == 20


def test_clients_of_which_nothing_left_are_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    assert "1 client, and nothing that depends on data has left yet" in " ".join(show(tmp_path).split())
