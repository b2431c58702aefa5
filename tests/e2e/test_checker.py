"""The offline checker is content with a run as it is, and not with one that counts an answer twice or never."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.checker import find_faults
from tests.e2e.rundir import RunDir, read_rows

Rows = list[dict[str, Any]]
ANSWER = {"round": 1, "phase": "fit", "direction": "up", "client": 2, "kind": "envelope"}


def find_answer(rows: Rows) -> dict[str, Any]:
    return next(row for row in rows if ANSWER.items() <= row.items())


def count_twice(rows: Rows) -> None:
    rows.append(find_answer(rows) | {"attempt": 1})


def count_never(rows: Rows) -> None:
    find_answer(rows)["aborted"] = True


def count_as_somebody_else(rows: Rows) -> None:
    rows.append(find_answer(rows) | {"client": 7})


def leave_a_client_out(rows: Rows) -> None:
    found = next(row for row in rows if row["round"] == 1 and "participation" in row)
    found["participation"]["answered"].remove(2)


def play_a_round_twice(rows: Rows) -> None:
    rows.append(next(row for row in rows if row["round"] == 1 and "participation" in row))


def charge_twice(rows: Rows) -> None:
    rows.append(rows[-1])


def test_it_is_content_with_a_run_as_it_is(finished: RunDir) -> None:
    assert find_faults(finished) == []


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("ledger.jsonl", count_twice, "round 1, phase fit, client 2: 2 whole answers"),
        ("ledger.jsonl", count_never, "round 1: answers came whole from [0, 1], counted [0, 1, 2]"),
        ("ledger.jsonl", count_as_somebody_else, "round 1: answers came whole from [0, 1, 2, 7]"),
        ("records.jsonl", leave_a_client_out, "round 1: 3 clients in the aggregate, 2 answered"),
        ("records.jsonl", play_a_round_twice, "finished rounds are [0, 1, 2, 1]"),
        ("privacy.jsonl", charge_twice, "repeated in privacy.jsonl"),
    ],
)
def test_it_names_what_is_wrong(
    name: str, change: Callable[[Rows], None], said: str, finished: RunDir, tmp_path: Path
) -> None:
    copy = RunDir(shutil.copytree(finished.path, tmp_path / "run"))
    rows = read_rows(copy.path / name)
    change(rows)
    (copy.path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert any(said in fault for fault in find_faults(copy)), find_faults(copy)


def test_a_question_is_the_clients_alone_only_after_a_kill_of_the_server(finished: RunDir, tmp_path: Path) -> None:
    copy = RunDir(shutil.copytree(finished.path, tmp_path / "run"))
    summary = copy.summary
    summary["ledger_check"]["only_client"] = 1
    (copy.path / "summary.json").write_text(json.dumps(summary))
    assert find_faults(copy) == ["ledger_check: 1 only_client"]
    assert find_faults(copy, num_server_kills=1) == []
    summary["ledger_check"]["only_client"] = 100
    (copy.path / "summary.json").write_text(json.dumps(summary))
    assert find_faults(copy, num_server_kills=1) == ["ledger_check: 100 only_client"]
