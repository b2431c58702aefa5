"""Predicted times: by hand for one question, and for a whole run from its files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedrpc.emulation.conditions import Conditions
from fedrpc.emulation.link import Link
from fedrpc.errors import ConfigError, Damaged
from fedrpc.metrics.timing import PhaseRow, TaskRow
from fedrpc.study.reading import Run
from fedrpc.study.whatif import Task, measure, play, predict, predict_over, read_conditions
from fedrpc.wire.ledger import Key, Sums

SLOW = Conditions(Link(down=10e6, up=5e6, rtt=0.1))
FREE = Conditions()


def play_one(task: Task, conditions: Conditions, **values: Any) -> dict[str, float]:
    [spans] = play([task], {task.client: conditions}, **{"cores": None, "permits": 4} | values)
    return spans.parts


def test_ten_megabytes_at_ten_megabits_a_second_take_eight_seconds() -> None:
    parts = play_one(Task(0, 2.0, down=10e6, up=1e3), SLOW)
    assert parts["download"] == pytest.approx(8.0 + 0.05)
    assert parts["compute"] == 2.0
    assert parts["upload"] == pytest.approx(8e3 / 5e6 + 0.05)
    assert parts["queue"] == 0


def test_a_large_answer_waits_a_round_trip_for_its_grant() -> None:
    small, large = (play_one(Task(0, 0.0, down=0, up=size), SLOW)["upload"] for size in (256 << 10, (256 << 10) + 1))
    assert large - small == pytest.approx(0.1, abs=1e-4)


def test_a_client_at_half_the_speed_computes_twice_as_long_and_holds_a_core_as_long_as_others() -> None:
    slow = dataclasses.replace(FREE, speed=0.5)
    assert play_one(Task(0, 3.0, 0, 0), slow)["compute"] == 6.0
    first, second = play([Task(0, 3.0, 0, 0), Task(1, 3.0, 0, 0)], {0: slow, 1: FREE}, cores=1, permits=4)
    assert (first.ended, second.begun, second.ended) == (6.0, 3.0, 6.0)


def test_cores_serve_those_first_whose_question_came_first() -> None:
    tasks = [Task(0, 4.0, down=10e6, up=0), Task(1, 4.0, down=1e6, up=0), Task(2, 4.0, down=0, up=0)]
    played = play(tasks, dict.fromkeys(range(3), SLOW), cores=1, permits=4)
    assert [round(each.begun, 2) for each in played] == [8.05, 4.05, 0.05]


def test_large_messages_wait_for_permits_and_small_ones_do_not() -> None:
    tasks = [Task(client, 0.0, down=10e6 if client < 3 else 1e3, up=0) for client in range(4)]
    played = play(tasks, dict.fromkeys(range(4), SLOW), cores=None, permits=2)
    assert [round(each.received, 1) for each in played] == [8.1, 8.1, 16.1, 0.1]


def make_run(folder: Path, **changes: Any) -> Run:
    """One round of two clients, who computed for 1 and 2 seconds, and a server that worked for half a second."""
    tasks = [
        TaskRow(0, "fit", 0, client, 0, "answered", queue_s=0, download_s=0.1, compute_s=1.0 + client, upload_s=0.1)
        for client in range(2)
    ]
    phase = PhaseRow(0, "fit", 0, 0, seconds=2.7, download_s=0.1, compute_s=2.0, upload_s=0.1, aggregate_s=0.5)
    after = PhaseRow(1, "session", 1, 0, seconds=0.25, checkpoint_s=0.25)
    ledger = [
        (Key(0, "fit", "weights", direction, client, 0, aborted=aborted), Sums(10**6, 10**6, 1))
        for direction in ("down", "up")
        for client in range(2)
        for aborted in (False, True)
    ]
    values = {"folder": folder, "config": {}, "summary": {"num_clients": 2}}
    values |= {"timing": lambda: iter([*tasks, phase, after]), "ledger": lambda: iter(ledger)}
    return cast(Run, SimpleNamespace(**values | changes))


def test_a_round_takes_as_long_as_its_slowest_client_and_the_server(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    found = predict(run, [SLOW, SLOW], cores=None)
    client = (0.8 + 0.05) + 2.0 + (0.1 + 1.6 + 0.05)
    assert found.rounds[0].seconds == pytest.approx(client + 0.5)
    assert found.seconds == pytest.approx(client + 0.5 + 0.25)
    assert found.until(0) == found.mean_round.seconds == found.rounds[0].seconds
    assert sum(found.mean_round.parts.values()) == pytest.approx(found.mean_round.seconds)
    # On one core the second client waits for the first.
    assert predict(run, [SLOW, SLOW], cores=1).seconds == pytest.approx(found.seconds + 1.0)
    # The slower link is not that of the slower client.
    assert predict(run, [SLOW, FREE], cores=None).rounds[0].seconds == pytest.approx(client - 1.0 + 0.5)


def test_what_was_measured_is_the_sum_of_the_phases(tmp_path: Path) -> None:
    found = measure(make_run(tmp_path))
    assert (found.seconds, found.rounds[0].parts["server"]) == (pytest.approx(2.95), 0.5)


def test_the_speed_of_an_emulated_run_is_taken_out_of_its_times(tmp_path: Path) -> None:
    rows = [{"client": 0, "link": "rtt=10ms"}, {"client": 1, "speed": 0.25}]
    (tmp_path / "conditions.json").write_text(json.dumps({"clients": rows}))
    run = make_run(tmp_path)
    assert read_conditions(run) == [Conditions(Link(rtt=0.01)), Conditions(None, 0.25)]
    assert predict(run, [FREE, FREE], cores=None).rounds[0].parts["compute"] == 1.0, "client 1 took 2 s at a quarter"


@pytest.mark.parametrize("text", ["", "[]", '{"clients": [{}]}', '{"clients": [{"link": 3}, {}]}'])
def test_conditions_that_were_damaged_are_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "conditions.json").write_text(text)
    with pytest.raises((Damaged, ConfigError), match=r"conditions\.json is damaged"):
        read_conditions(make_run(tmp_path))


@pytest.mark.parametrize("speed", ["0", "-1", "NaN", "Infinity"])
def test_a_speed_that_cannot_be_is_one_line(speed: str, tmp_path: Path) -> None:
    (tmp_path / "conditions.json").write_text(f'{{"clients": [{{"speed": {speed}}}, {{}}]}}')
    with pytest.raises(Damaged, match=r"conditions\.json is damaged: expected a speed above 0"):
        read_conditions(make_run(tmp_path))


def test_times_of_a_client_that_the_run_does_not_have_are_one_line(tmp_path: Path) -> None:
    row = TaskRow(0, "fit", 0, 2, 0, "answered", queue_s=0, download_s=0, compute_s=1, upload_s=0)
    with pytest.raises(Damaged, match=r"timing\.jsonl is damaged: it has client 2, of 2"):
        predict(make_run(tmp_path, timing=lambda: iter([row])), [FREE, FREE], cores=None)


def test_a_run_without_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no timing\.jsonl"):
        predict(make_run(tmp_path, timing=lambda: iter(())), [FREE, FREE], cores=None)


def test_a_run_without_a_wire_is_refused_and_not_predicted_in_a_comparison(tmp_path: Path) -> None:
    run = make_run(tmp_path, summary={"num_clients": 2, "seed": 0, "in_process": True})
    with pytest.raises(ConfigError, match=r"within one process, .* no wire was measured: run it with processes"):
        measure(run)
    with pytest.raises(ConfigError, match="no wire was measured"):
        predict(run, [FREE, FREE], cores=None)
    assert predict_over(run, "3g") is None
