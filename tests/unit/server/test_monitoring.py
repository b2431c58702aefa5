from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedrpc.config import LimitsConfig, build
from fedrpc.server.mailbox import Mailbox
from fedrpc.server.monitoring import RunMetrics
from fedrpc.server.roster import Roster
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import Attempt, LedgerFile


@pytest.fixture
def book(tmp_path: Path) -> Iterator[LedgerFile]:
    file = LedgerFile(tmp_path)
    for direction, size in (("down", 100), ("up", 40), ("up", 2)):
        attempt = Attempt(0, "fit", "down" if direction == "down" else "up", 1)
        attempt.add(Kind.WEIGHTS, size + 5, size)
        file.book(attempt.close())
    yield file
    file.close()


def metrics(book: LedgerFile, round_index: int = 3) -> RunMetrics:
    roster = Roster(num_clients=4, grace_s=60)
    roster.join([(0, "a")])
    coordinator: Any = SimpleNamespace(round=round_index)
    config = build({"clients": 4, "rounds": 9})
    return RunMetrics(config, "run-1", coordinator, roster, Mailbox(roster, LimitsConfig(), 0), book)


def values(shown: RunMetrics) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): cast(float, sample.value)
        for family in shown.collect()
        for sample in family.samples
    }


def test_metrics_equal_the_servers_state(book: LedgerFile) -> None:
    got = values(metrics(book))
    assert got["fedrpc_run_info", "run-1", "fedavg", "fmnist-mini"] == 1
    assert (got["fedrpc_rounds",], got["fedrpc_rounds_finished",]) == (9, 3)
    assert (got["fedrpc_clients",], got["fedrpc_clients_connected",]) == (4, 1)
    assert (got["fedrpc_tasks", "waiting"], got["fedrpc_tasks", "out"]) == (0, 0)
    assert got["fedrpc_tensor_bytes_total", "down", "weights"] == 100
    assert got["fedrpc_tensor_bytes_total", "up", "weights"] == 42
    for direction, size in book.message_bytes.items():
        assert got["fedrpc_message_bytes_total", direction, "weights"] == size


def test_before_the_first_round_none_is_finished_and_nothing_is_measured(book: LedgerFile) -> None:
    got = values(metrics(book, round_index=-1))
    assert got["fedrpc_rounds_finished",] == 0
    assert ("fedrpc_accuracy_percent",) not in got


def test_a_round_without_an_evaluation_keeps_the_last_accuracy(book: LedgerFile) -> None:
    shown = metrics(book)
    shown.observe("round_finished", {"round": 0, "accuracy": 71.5, "loss": 0.5, "seconds": 2.0, "num_clients": 4})
    shown.observe("round_finished", {"round": 1, "accuracy": None, "seconds": 3.0, "num_clients": 3})
    shown.observe("joined", {"joined": 4, "seconds": 99.0})
    got = values(shown)
    assert (got["fedrpc_accuracy_percent",], got["fedrpc_loss",]) == (71.5, 0.5)
    assert (got["fedrpc_round_seconds",], got["fedrpc_round_clients",]) == (3, 3)
