"""timing.jsonl: rows come back as they were written, none is lost or doubled by a kill, and damage is one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedrpc.errors import Damaged
from fedrpc.metrics.timing import PARTS, PhaseRow, TaskRow, TimingFile, read_timing, summarise_time, to_json

TASK = TaskRow(0, "fit", 0, 3, 0, "answered", 0.5, 0.25, 4.0, 0.125, 3.5, 1 << 29, 0.001, 2, 1)
BARE = TaskRow(0, "fit", 0, 4, 1, "missing", 1.0, 0.0, 0.0, 0.0)
PHASE = PhaseRow(0, "fit", 1, 0, 5.5, queue_s=0.5, download_s=0.25, compute_s=4.0, upload_s=0.5, read_s=0.25)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "timing.jsonl"


def write(path: Path, *rows: TaskRow | PhaseRow) -> None:
    file = TimingFile(path)
    for row in rows:
        file.add(row) if isinstance(row, TaskRow) else file.add_phases([row])
    file.close()


def test_rows_come_back_as_they_were_written(path):
    write(path, TASK, BARE, PHASE)
    assert list(read_timing(path)) == [TASK, BARE, PHASE]
    assert TASK.seconds == 4.875
    assert sum(PHASE.parts.values()) == PHASE.seconds


def test_a_file_that_is_not_there_has_no_rows(path):
    assert list(read_timing(path)) == []


def test_a_torn_last_line_is_left_out_and_then_removed(path):
    write(path, TASK, BARE)
    whole = path.read_bytes()
    for cut in range(len(to_json(TASK)) + 1, len(whole)):
        path.write_bytes(whole[:cut])
        write(path, PHASE)
        assert list(read_timing(path)) == [TASK, PHASE]


@pytest.mark.parametrize(
    "change",
    [
        {"row": "nothing"},
        {"queue_s": -1.0},
        {"queue_s": "long"},
        {"queue_s": None},
        {"client": 1.5},
        {"client": True},
        {"phase": 7},
        {"more": 1},
    ],
    ids=str,
)
def test_damage_is_one_line(path, change):
    path.write_text(json.dumps(json.loads(to_json(TASK)) | change) + "\n" + to_json(BARE) + "\n")
    for act in (lambda: list(read_timing(path)), lambda: TimingFile(path)):
        with pytest.raises(Damaged, match=r"timing.jsonl.* is damaged: ") as found:
            act()
        assert "\n" not in str(found.value)


@pytest.mark.parametrize("lost", ["round", "queue_s"])
def test_a_row_without_a_value_is_damage(path, lost):
    values = json.loads(to_json(TASK))
    del values[lost]
    path.write_text(json.dumps(values) + "\n")
    with pytest.raises(Damaged, match=lost):
        list(read_timing(path))


def test_a_time_that_is_begun_anew_is_counted_and_no_key_comes_twice(path):
    later = replace(PHASE, epoch=2)
    write(path, PHASE)
    write(path, PHASE, later)
    write(path, later)
    assert [(row.epoch, row.resumed) for row in read_timing(path)] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_rows_of_rounds_that_are_run_anew_are_dropped(path):
    next_round = replace(TASK, round=1)
    file = TimingFile(path)
    for row in (TASK, next_round):
        file.add(row)
    file.drop_from(1)
    file.add(BARE)
    file.close()
    assert list(read_timing(path)) == [TASK, BARE]


def test_the_summary_has_totals_by_part_and_the_median_round_of_each_phase():
    slow = replace(PHASE, round=1, seconds=8.5, compute_s=7.0, beside_s=0.75)
    again = replace(slow, resumed=1, seconds=1.0, queue_s=0.0, download_s=0.0, compute_s=1.0, upload_s=0.0, read_s=0.0)
    session = PhaseRow(0, "session", 1, 0, 2.0, checkpoint_s=2.0)
    found = summarise_time([TASK, BARE, PHASE, session, slow, again, replace(TASK, resent_up=4)])
    assert found["seconds"] == pytest.approx(17.0)
    assert sum(found["parts"].values()) == pytest.approx(17.0)
    assert list(found["parts"]) == list(PARTS)
    assert found["beside"] == pytest.approx(1.5)
    assert found["by_phase"]["fit"]["rounds"] == 2
    assert found["by_phase"]["fit"]["median"]["compute"] == pytest.approx((4.0 + 8.0) / 2)
    assert found["by_phase"]["session"]["median"]["checkpoint"] == 2.0
    tasks = {"number": 3, "queue": 2.0, "compute": 8.0, "cpu": 7.0, "peak_bytes": 1 << 29}
    assert {name: found["tasks"][name] for name in tasks} == tasks
    assert found["tasks"]["resent"] == {"down": 4, "up": 5}


def test_a_run_without_rows_has_a_summary():
    found = summarise_time([])
    assert found["seconds"] == 0
    assert found["by_phase"] == {}
    assert found["tasks"]["peak_bytes"] is None
