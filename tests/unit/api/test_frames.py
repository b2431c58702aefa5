"""Data frames keep the types of their files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas
import pytest

import fedrpc
from fedrpc.api.frames import make_frame
from fedrpc.errors import ConfigError
from fedrpc.metrics.timing import to_json
from tests.unit.report.conftest import release, timing, write_run


def test_whole_numbers_stay_whole_where_some_rows_have_none() -> None:
    rows = [
        {"row": "task", "client": 1, "seconds": 2.0},
        {"row": "phase", "seconds": 3},
        {"row": "task", "client": 0},
    ]
    frame = make_frame(rows)
    assert [str(frame[name].dtype) for name in ("client", "seconds")] == ["Int64", "float64"]
    assert frame.groupby("client").size().to_dict() == {0: 1, 1: 1}


def test_rows_of_values_get_the_names() -> None:
    assert make_frame([(1, 2.5)], ["round", "loss"]).to_dict("list") == {"round": [1], "loss": [2.5]}


# Of whole runs


def test_the_rows_of_records_are_rounds_evaluations_and_the_set_up_of_a_method_that_has_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", clients=3, rounds=2)
    frame = fedrpc.load(folder).records
    assert frame["event"].tolist() == ["round_finished", "evaluated"] * 2
    assert frame.query("event == 'round_finished'")["accuracy"].tolist() == pytest.approx([50.625, 91.25])
    assert frame["num_clients"].dtype == "Int64", "evaluations have none"
    records = folder / "records.jsonl"
    records.write_text('{"event": "setup_finished", "round": -1, "seconds": 2.5}\n' + records.read_text())
    assert fedrpc.load(folder).records["round"].tolist() == [-1, 0, 0, 1, 1]


def test_the_ledger_has_every_row_of_its_file_and_sums_to_the_summary(tmp_path: Path) -> None:
    run = fedrpc.load(write_run(tmp_path / "run", clients=3, rounds=2))
    rows = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    assert run.ledger.to_dict("records") == [{"repeated": False} | row for row in rows]
    sums = run.ledger.groupby("direction")[["tensor_bytes", "message_bytes"]].sum()
    for direction, total in run.values["bytes"]["total"].items():
        assert sums.loc[direction].tolist() == [total["tensor"], total["message"]]


def test_a_summary_is_one_row_and_those_of_several_runs_make_a_table(tmp_path: Path) -> None:
    runs = [fedrpc.load(write_run(tmp_path / name, rounds=rounds)) for name, rounds in (("short", 1), ("long", 3))]
    table = pandas.concat([run.summary for run in runs])
    assert table.index.tolist() == ["short", "long"]
    assert table["num_rounds"].tolist() == [1, 3]
    assert table["bytes.total.up.message"].tolist() == [run.values["bytes"]["total"]["up"]["message"] for run in runs]


def test_timing_and_privacy_say_what_each_row_is_of(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=2)
    (folder / "timing.jsonl").write_text("".join(to_json(row) + "\n" for row in timing(rounds=2)))
    run = fedrpc.load(folder)
    assert run.timing["row"].tolist() == ["phase"] * 4
    assert run.timing.groupby("phase")["checkpoint_s"].sum().to_dict() == {"fit": 0.0, "session": 1.0}
    rows = [release(0, 0, "weights"), release(1, 1, "latent_means", "gaussian")]
    (folder / "privacy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    frame = fedrpc.load(folder).privacy.astype(object)
    assert frame.where(frame.notna(), None).to_dict("records") == rows


def test_without_pandas_a_frame_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fedrpc.load(write_run(tmp_path / "run"))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"need pandas, which is not installed: pip install 'fedrpc\[pandas\]'"):
        _ = run.ledger
