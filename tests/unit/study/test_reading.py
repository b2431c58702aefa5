from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedrpc.errors import ConfigError, Damaged
from fedrpc.files import write_checksums
from fedrpc.study.reading import FILES, read_run

MakeRun = Callable[..., Path]


def test_the_ledger_adds_up_to_the_summary(make_run: MakeRun) -> None:
    run = read_run(make_run(clients=5, rounds=4, per_round=3))
    part = run.summary["bytes"]
    for flows in (run.traffic.by_round, run.traffic.by_client):
        for direction in ("down", "up"):
            own = sum(flow.own[direction] for flow in flows.values())
            rest = sum(flow.rest[direction] for flow in flows.values())
            assert own == part["method"][direction]["message"]
            assert own + rest == part["total"][direction]["message"]
    assert sum(sums.message_bytes for sums in run.traffic.by_part.values()) == sum(
        part["total"][direction]["message"] for direction in ("down", "up")
    )
    assert list(run.traffic.by_round) == [-1, 0, 1, 2, 3, 4]


def test_a_client_that_never_took_part_has_its_session_bytes(make_run: MakeRun) -> None:
    run = read_run(make_run(clients=5, rounds=1, per_round=2))
    assert sum(run.traffic.by_client[4].own.values()) == 0
    assert run.traffic.by_client[4].total == 900 + 4 + 2000


def test_curves_losses_and_accuracies_are_by_round_and_client(make_run: MakeRun) -> None:
    run = read_run(make_run(clients=4, rounds=2, per_round=2, epochs=3))
    assert run.curve("accuracy") == [(0, 10 + 81.25 / 2), (1, 91.25)]
    assert [index for index, _ in run.local_losses[3]] == [1]
    assert len(run.local_losses[0][0][1]) == 3
    assert run.client_accuracies[-1] == (1, {0: 50.0, 1: 51.0, 2: 52.0, 3: 53.0})


def test_a_finalised_model_is_the_last_point(make_run: MakeRun) -> None:
    folder = make_run(rounds=2)
    with (folder / "records.jsonl").open("a") as file:
        row = {"event": "evaluated", "round": 2, "final": True, "accuracy": 95.5, "loss": 0.1, "per_class": [1.0]}
        file.write(json.dumps(row) + "\n")
    assert read_run(folder).curve("accuracy")[-1] == (2, 95.5)


def test_client_accuracies_are_found_in_a_round_without_external_evaluation(make_run: MakeRun) -> None:
    folder = make_run(rounds=1, evaluated=False, local_test=False)
    row = {
        "event": "round_finished",
        "round": 0,
        "per_client": {"0": {"correct": 1, "of": 4}, "1": {"correct": 0, "of": 0}},
    }
    (folder / "records.jsonl").write_text(json.dumps(row) + "\n")
    assert read_run(folder).client_accuracies == [(0, {0: 25.0})]


def test_equal_releases_are_counted_together(make_run: MakeRun) -> None:
    run = read_run(make_run(clients=3, rounds=4))
    assert [(group.kind, group.count, group.num_clients) for group in run.releases] == [
        ("scalars", 12, 3),
        ("weights", 12, 3),
    ]


def test_class_names_are_used_where_the_card_has_them(make_run: MakeRun) -> None:
    folder = make_run(num_classes=3)
    assert read_run(folder).classes == ["0", "1", "2"]
    card = json.loads((folder / "partition.json").read_text()) | {"classes": ["cat", "dog", "emu"]}
    (folder / "partition.json").write_text(json.dumps(card))
    assert read_run(folder).classes == ["cat", "dog", "emu"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(make_run: MakeRun, name: str) -> None:
    folder = make_run()
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=name):
        read_run(folder)


def test_an_unfinished_run_says_how_to_resume_it(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"not finished.*fedrpc run --config .*config\.toml"):
        read_run(folder)


def test_a_summary_of_fewer_rounds_than_configured_is_no_finished_run(make_run: MakeRun) -> None:
    folder = make_run(rounds=3)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("rounds = 3", "rounds = 30"))
    with pytest.raises(ConfigError, match=r"asks for 30 rounds, summary\.json has 3"):
        read_run(folder)


def test_a_broken_file_is_named(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "partition.json").write_text("{")
    with pytest.raises(ConfigError, match=r"partition\.json is damaged"):
        read_run(folder)


def test_a_file_that_changed_since_the_run_ended_is_named(make_run: MakeRun) -> None:
    folder = make_run()
    write_checksums(folder, FILES, {})
    read_run(folder)
    for name in FILES:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data.replace(b"1", b"2", 1))
        with pytest.raises(
            Damaged, match=rf"{name} was changed since the run ended: expected SHA-256 \w+, got \w+; put a"
        ):
            read_run(folder)
        (folder / name).write_bytes(data)
    (folder / "SHA256SUMS").write_text("nonsense\n")
    with pytest.raises(Damaged, match=r"SHA256SUMS is damaged: .*; remove it"):
        read_run(folder)


def test_a_missing_folder_and_a_folder_without_a_run_have_their_own_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder; give the directory of a finished run"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(
        ConfigError, match=r"holds no run: it has no config\.toml; give the directory of a finished run"
    ):
        read_run(tmp_path)


def test_a_comparison_is_no_run_and_names_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "flea").mkdir()
    (tmp_path / "flea" / "summary.json").touch()
    (tmp_path / "compare.json").touch()
    with pytest.raises(ConfigError, match=r"holds a comparison; give one of its runs, such as .*/flea$"):
        read_run(tmp_path)
