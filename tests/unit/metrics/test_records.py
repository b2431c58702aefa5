"""records.jsonl: whole lines, each round once, also after a crash anywhere."""

from __future__ import annotations

import json

import pytest

from fedrpc.metrics.records import RecordsFile, read_records


def row(index: int, **more: object) -> dict[str, object]:
    return {"event": "round_finished", "round": index} | more


def write_rounds(path, rounds, durable=-2, last=()):
    file = RecordsFile(path, durable, list(last))
    for index in rounds:
        file.add([row(index)])
    file.close()


def test_lines_are_appended_and_read_back(tmp_path):
    path = tmp_path / "records.jsonl"
    file = RecordsFile(path, -2, [])
    file.add([row(0), row(0, event="evaluated")])
    assert file.all() == [row(0), row(0, event="evaluated")]
    file.add([row(1)])
    file.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == list(read_records(path))
    assert [found["round"] for found in read_records(path)] == [0, 0, 1]


def test_a_missing_file_has_no_records(tmp_path):
    assert list(read_records(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize("durable", range(-1, 5))
def test_a_resumed_run_has_each_round_once_wherever_it_stopped(tmp_path, durable):
    path = tmp_path / "records.jsonl"
    write_rounds(path, range(5))
    last = [row(durable)] if durable >= 0 else []
    write_rounds(path, range(durable + 1, 6), durable, last)
    assert [found["round"] for found in read_records(path)] == list(range(6))


def test_lines_lost_in_a_crash_come_from_the_checkpoint(tmp_path):
    path = tmp_path / "records.jsonl"
    write_rounds(path, range(2))
    write_rounds(path, [], 2, [row(2, accuracy=1.0), row(2, event="evaluated")])
    assert list(read_records(path)) == [row(0), row(1), row(2, accuracy=1.0), row(2, event="evaluated")]


def test_lines_after_the_last_round_are_dropped_by_a_longer_run(tmp_path):
    path = tmp_path / "records.jsonl"
    write_rounds(path, range(3))
    file = RecordsFile(path, 2, [row(2)])
    file.add([row(3, event="evaluated", final=True)])
    file.close()
    write_rounds(path, [3], 2, [row(2)])
    assert list(read_records(path)) == [row(0), row(1), row(2), row(3)]


def test_a_run_from_the_start_drops_old_lines(tmp_path):
    path = tmp_path / "records.jsonl"
    write_rounds(path, range(3))
    write_rounds(path, [0])
    assert list(read_records(path)) == [row(0)]


def test_a_torn_last_line_is_left_out_and_not_joined(tmp_path):
    path = tmp_path / "records.jsonl"
    write_rounds(path, range(3))
    path.write_bytes(path.read_bytes()[:-7])
    assert [found["round"] for found in read_records(path)] == [0, 1]
    write_rounds(path, [3], 2, [row(2)])
    assert [found["round"] for found in read_records(path)] == [0, 1, 2, 3]
