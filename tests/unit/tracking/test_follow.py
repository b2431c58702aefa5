"""A tracker gets each round once, with the ledger's bytes, however often a run is stopped and taken up again."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.config import build
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.tracking import TRACKERS, RunFacts, Tracker, check_trackers, make_tracker
from fedrpc.tracking.follow import Follower, flatten
from tests.tracked import add_round, add_setup, begin_run, finish_run, rewrite_ledger


class Notebook(Tracker):
    """Keeps what it is given."""

    def __init__(self, target: str = "") -> None:
        super().__init__(target)
        self.opened: list[RunFacts] = []
        self.rounds: list[tuple[int, dict[str, float]]] = []
        self.summaries: list[Mapping[str, Any]] = []
        self.artifacts: list[str] = []
        self.num_closed = 0

    def open(self, run: RunFacts) -> str:
        self.opened.append(run)
        return "page 7"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rounds.append((step, dict(values)))

    def finish(self, summary: Mapping[str, Any], artifacts: Sequence[Path]) -> None:
        self.summaries.append(summary)
        self.artifacts = [path.name for path in artifacts]

    def close(self) -> None:
        self.num_closed += 1


def track(folder: Path, book: Notebook) -> None:
    Follower(folder, "notebook", book).end()


def test_a_round_is_logged_with_its_numbers_and_its_bytes(tmp_path: Path) -> None:
    begin_run(tmp_path)
    add_round(tmp_path, 0, accuracy=50.0)
    add_round(tmp_path, 1, accuracy=60.0)
    book = Notebook()
    track(tmp_path, book)
    assert [step for step, _ in book.rounds] == [1, 2]
    values = book.rounds[1][1]
    assert (values["accuracy"], values["loss"], values["num_clients"]) == (60.0, 1.0, 2)
    assert values["message_bytes/down/weights"] == 2 * 110
    assert values["message_bytes/down/all"] == 2 * 110 + 2 * 7
    assert values["tensor_bytes/up/weights"] == 2 * 90
    assert values["message_bytes/so_far"] == 2 * (2 * 110 + 2 * 7 + 2 * 95)
    assert "planned_rounds" not in values
    assert book.opened[0].settings["train.lr"] == build({}).train.lr


def test_a_round_that_was_not_evaluated_has_no_accuracy(tmp_path: Path) -> None:
    begin_run(tmp_path)
    add_round(tmp_path, 0, accuracy=None)
    book = Notebook()
    track(tmp_path, book)
    assert "accuracy" not in book.rounds[0][1]


def test_rounds_come_as_they_are_written(tmp_path: Path) -> None:
    book = Notebook()
    follower = Follower(tmp_path, "notebook", book)
    follower.follow()
    assert not book.opened, "there is no run yet"
    begin_run(tmp_path)
    follower.follow()
    assert not list(tmp_path.glob("trackers")), "a server must find the directory as it left it"
    for index in range(3):
        add_round(tmp_path, index)
        follower.follow()
        assert [step for step, _ in book.rounds] == list(range(1, index + 2))


def test_a_resumed_run_goes_on_in_the_same_place_without_doubled_rounds(tmp_path: Path) -> None:
    begin_run(tmp_path)
    for index in range(2):
        add_round(tmp_path, index)
    first, second = Notebook(), Notebook()
    track(tmp_path, first)
    assert first.num_closed == 1
    # A server that was killed writes its records anew, without the round that it plays again.
    records = tmp_path / "records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    (tmp_path / "new").write_text("".join(lines[:2]))
    os.replace(tmp_path / "new", records)
    for index in (1, 2):
        add_round(tmp_path, index)
    track(tmp_path, second)
    assert [step for step, _ in second.rounds] == [3]
    assert (second.opened[0].kept, second.opened[0].first_step) == ("page 7", 3)


def test_records_that_are_rewritten_under_its_eyes_double_nothing(tmp_path: Path) -> None:
    begin_run(tmp_path)
    book = Notebook()
    follower = Follower(tmp_path, "notebook", book)
    for index in range(2):
        add_round(tmp_path, index)
    follower.follow()
    kept = (tmp_path / "records.jsonl").read_bytes()
    (tmp_path / "new").write_bytes(kept)
    os.replace(tmp_path / "new", tmp_path / "records.jsonl")
    add_round(tmp_path, 2)
    follower.follow()
    assert [step for step, _ in book.rounds] == [1, 2, 3]


def test_a_finished_run_is_summarised_once(tmp_path: Path) -> None:
    begin_run(tmp_path)
    add_round(tmp_path, 0)
    finish_run(tmp_path, 1)
    book, again, longer = Notebook(), Notebook(), Notebook()
    track(tmp_path, book)
    assert book.summaries[0]["accuracy.global"] == 50.0
    assert not [name for name in book.summaries[0] if "per_client" in name]
    assert book.artifacts == ["report.html", "model.safetensors", "config.toml", "summary.json"]
    track(tmp_path, again)
    assert not again.opened, "there is nothing that it has not got"
    add_round(tmp_path, 1)
    finish_run(tmp_path, 2)
    track(tmp_path, longer)
    assert [step for step, _ in longer.rounds] == [2]
    assert longer.summaries[0]["num_rounds"] == 2


def test_epsilon_is_logged_only_while_every_release_is_covered(tmp_path: Path) -> None:
    begin_run(tmp_path)
    for index in range(3):
        covered = {"client": 0, "round": index, "coverage": "covered", "history": [[1.1, 1.0, 1]]}
        bare = {"client": 1, "round": index, "coverage": "none", "history": []}
        with (tmp_path / "privacy.jsonl").open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in ([covered, bare] if index == 2 else [covered])))
        add_round(tmp_path, index)
    book = Notebook()
    track(tmp_path, book)
    one, two, three = (values.get("epsilon/by_rows") for _, values in book.rounds)
    assert one is not None
    assert two is not None
    assert 0 < one < two
    assert three is None


# Bytes


def add_up(folder: Path) -> dict[str, int]:
    """The ledger's sums, by the names of a tracker's curves."""
    sums: Counter[str] = Counter()
    for row in map(json.loads, (folder / "ledger.jsonl").read_text().splitlines()):
        for layer in ("tensor_bytes", "message_bytes"):
            for kind in ("all", row["kind"]):
                sums[f"{layer}/{row['direction']}/{kind}"] += row[layer]
    return {name: size for name, size in sums.items() if size}


def add_logged(books: Sequence[Notebook]) -> dict[str, float]:
    """What trackers were given of the same run, one after the other."""
    sums: Counter[str] = Counter()
    for _, values in (each for book in books for each in book.rounds):
        sums.update({name: size for name, size in values.items() if name.count("/") == 2})
    for name, size in books[-1].summaries[-1].items():
        if name.startswith("after_last_round/"):
            sums[name.removeprefix("after_last_round/")] += size
    return dict(sums)


def test_rounds_and_what_comes_after_the_last_are_the_whole_ledger(tmp_path: Path) -> None:
    begin_run(tmp_path)
    for index in range(3):
        add_round(tmp_path, index)
    finish_run(tmp_path, 3)
    book = Notebook()
    track(tmp_path, book)
    assert book.summaries[0]["after_last_round/message_bytes/up/envelope"] == 900
    assert add_logged([book]) == add_up(tmp_path)


def test_the_set_up_is_step_0(tmp_path: Path) -> None:
    begin_run(tmp_path)
    add_setup(tmp_path)
    first, second = Notebook(), Notebook()
    track(tmp_path, first)
    [(step, values)] = first.rounds
    assert (step, values["seconds"], values["tensor_bytes/up/images"]) == (0, 2.5, 60)
    add_round(tmp_path, 0)
    finish_run(tmp_path, 1)
    track(tmp_path, second)
    assert [step for step, _ in second.rounds] == [1]
    assert (first.opened[0].first_step, second.opened[0].first_step) == (0, 1)
    assert add_logged([first, second]) == add_up(tmp_path)


@given(plan=st.lists(st.tuples(st.booleans(), st.booleans(), st.dictionaries(st.integers(0, 4), st.integers(1, 999)))))
def test_rows_that_come_late_are_logged_with_the_next_round(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[bool, bool, dict[int, int]]]
) -> None:
    """However often the tracker looks, the run is stopped, or an answer comes after its round was over."""
    folder = tmp_path_factory.mktemp("run")
    begin_run(folder)
    books = [Notebook()]
    follower = Follower(folder, "notebook", books[-1])
    for index, (looks, stops, late) in enumerate(plan):
        add_round(folder, index)
        if looks:
            follower.follow()
        rewrite_ledger(folder, late)
        if stops:
            follower.end()
            books.append(Notebook())
            follower = Follower(folder, "notebook", books[-1])
    finish_run(folder, len(plan))
    follower.end()
    assert add_logged(books) == add_up(folder)
    assert all(size >= 0 for book in books for _, values in book.rounds for size in values.values())


def test_a_state_of_an_earlier_version_goes_on_from_its_round(tmp_path: Path) -> None:
    begin_run(tmp_path)
    for index in range(2):
        add_round(tmp_path, index)
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "notebook.json").write_text('{"kept": "page 7", "num_rounds": 1, "summary": ""}')
    book = Notebook()
    track(tmp_path, book)
    [(step, values)] = book.rounds
    assert (step, values["message_bytes/up/weights"], values["message_bytes/so_far"]) == (2, 2 * 95, 2 * 424)


# Choosing


def test_an_unknown_tracker_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'tensorboard'"):
        check_trackers(["tensorbord"])


def test_what_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedrpc.tracking.tracker.find_spec", lambda name: None)
    for name in ("tensorboard", "mlflow", "wandb"):
        with pytest.raises(ConfigError, match=rf"needs {name}, which is not installed; pip install 'fedrpc\[{name}\]'"):
            make_tracker(name)


def test_a_tracker_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS._items, "notebook", Notebook)
    check_trackers(["notebook:here"])
    with pytest.raises(ConfigError, match="--tracker notebook is given twice"):
        check_trackers(["notebook:here", "notebook:there"])


def test_settings_are_flat() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": "x"}}, "e": [1, 2], "f": None}) == {"a.b": 1, "a.c.d": "x", "e": "[1, 2]"}
