"""The ledger of all runs: it forgets nothing, counts each run once, and survives a torn line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrpc.client.spending import SPENDING_FILE, SpendingFile, read_spending
from fedrpc.errors import ConfigError
from fedrpc.privacy.mechanisms import History

ONE, OTHER = "replace-one", "zero-out"


def steps(number: int, noise: float = 1.0) -> History:
    return ((noise, 1.0, number),)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / SPENDING_FILE


def book(path: Path, run: str = "run", dataset: str = "digest") -> SpendingFile:
    return SpendingFile(path, dataset, "mnist", run)


def test_a_client_without_cost_has_no_file(path: Path) -> None:
    file = book(path)
    file.add({}, [])
    assert (file.sum_other_runs(), file.get_this_run(), file.list_uncovered()) == ({}, {}, [])
    assert not path.exists()


def test_what_other_runs_spent_adds_up_by_neighbours(path: Path) -> None:
    book(path, "first").add({ONE: steps(2)}, [])
    book(path, "second").add({ONE: steps(3), OTHER: steps(1)}, [])
    third = book(path, "third")
    third.add({ONE: steps(10)}, [])
    third.add({ONE: steps(10)}, [])
    for file in (third, book(path, "third")):
        assert file.sum_other_runs() == {ONE: steps(5), OTHER: steps(1)}
        assert file.get_this_run() == {ONE: steps(20)}


def test_another_data_set_has_an_account_of_its_own(path: Path) -> None:
    book(path, dataset="a").add({ONE: steps(2)}, [])
    assert book(path, "next", dataset="b").sum_other_runs() == {}
    assert book(path, "next", dataset="a").sum_other_runs() == {ONE: steps(2)}


def test_the_first_uncovered_release_of_a_kind_is_told_once_a_run(path: Path) -> None:
    for _ in range(2):
        file = book(path)
        file.add({}, ["weights", "scalars"])
        file.add({}, ["weights"])
    book(path).add({}, ["weights", "samples"])
    book(path, "next").add({}, ["weights"])
    told = [json.loads(line)["uncovered"] for line in path.read_text().splitlines()]
    assert told == [["scalars", "weights"], ["samples"], ["weights"]]
    assert book(path).list_uncovered() == ["samples", "scalars", "weights"]


def test_a_cost_is_on_disk_before_anything_else_happens(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    file = book(path)
    file.add({}, ["weights"])
    assert synced == []
    path.unlink()
    file.add({ONE: steps(1)}, [])
    assert synced == [str(path), str(path.parent)], "the file and its name"
    file.add({ONE: steps(1)}, [])
    assert synced[2:] == [str(path)]


def test_what_a_server_says_is_a_least_amount(path: Path) -> None:
    file = book(path)
    file.add({ONE: steps(5)}, [])
    file.raise_to({ONE: steps(3), OTHER: steps(4)})
    assert file.get_this_run() == {ONE: steps(5), OTHER: steps(4)}
    size = path.stat().st_size
    file.raise_to({ONE: steps(5)})
    assert path.stat().st_size == size, "nothing new"
    file.add({ONE: steps(1)}, [])
    assert book(path).get_this_run() == {ONE: steps(6), OTHER: steps(4)}
    assert book(path, "next").sum_other_runs() == {ONE: steps(6), OTHER: steps(4)}


@pytest.mark.parametrize("cut", [1, 20])
def test_a_torn_last_line_is_cut_off_by_the_next(path: Path, cut: int) -> None:
    book(path).add({ONE: steps(2)}, [])
    book(path).add({ONE: steps(30)}, [])
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_spending(path)["digest"].add_up() == {ONE: steps(2)}
    again = book(path)
    assert again.get_this_run() == {ONE: steps(2)}
    again.add({ONE: steps(4)}, [])
    again.add({ONE: steps(1)}, [])
    assert book(path).get_this_run() == {ONE: steps(7)}


BAD = ["{}", "[]", "nonsense", '{"dataset":"d","name":"n","run":"r","spent":{"a":[[-1,1,1]]}}', '{"dataset":"d"}']


@pytest.mark.parametrize("line", BAD)
def test_a_line_that_cannot_be_read_is_not_ignored(path: Path, line: str) -> None:
    book(path).add({ONE: steps(2)}, [])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=r"spending\.jsonl, line 2 cannot be read"):
        book(path).sum_other_runs()


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("ab"), st.sampled_from([ONE, OTHER]), st.integers(1, 9)),
        st.tuples(st.just("raise"), st.sampled_from("ab"), st.sampled_from([ONE, OTHER]), st.integers(1, 30)),
        st.tuples(st.just("reopen"), st.sampled_from("ab"), st.just(""), st.just(0)),
        st.tuples(st.just("tear"), st.sampled_from("ab"), st.just(""), st.integers(1, 60)),
    ),
    max_size=15,
)


@settings(max_examples=60, deadline=None)
@given(MOVES)
def test_the_file_agrees_with_a_model(tmp_path_factory: pytest.TempPathFactory, moves: list[Any]) -> None:
    """Two runs, one after the other or by turns; a torn line is one that was being written when the power failed."""
    path = tmp_path_factory.mktemp("spending") / SPENDING_FILE
    model: dict[str, dict[str, int]] = {"a": {}, "b": {}}
    for what, run, adjacency, number in moves:
        file = book(path, run)  # one process at a time has it
        if what == "add":
            file.add({adjacency: steps(number)}, [])
            model[run][adjacency] = model[run].get(adjacency, 0) + number
        elif what == "raise":
            file.raise_to({adjacency: steps(number)})
            model[run][adjacency] = max(model[run].get(adjacency, 0), number)
        elif what == "tear":
            whole = b'{"dataset": "digest", "name": "mnist", "run": "a", "spent": {"replace-one": [[1.0, 1.0, 5]]}}'
            with path.open("ab") as torn:
                torn.write(whole[:number])
        for name, other in (("a", "b"), ("b", "a")):
            found = book(path, name)
            assert found.get_this_run() == {key: steps(n) for key, n in model[name].items()}
            assert found.sum_other_runs() == {key: steps(n) for key, n in model[other].items()}
