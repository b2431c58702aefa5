"""By how much honest rounds slow while strangers hold connections: many, silent ones, and some at a byte a second."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bench.results import Figures
from tests.e2e.crowd import PREFACE, Crowd
from tests.e2e.programs import Gates, Programs, settings
from tests.e2e.rundir import RunDir, read_rows

pytestmark = [pytest.mark.timeout(900), pytest.mark.aside]

NUM_CLIENTS = 4
NUM_CONNECTIONS, NUM_SILENT, NUM_DRIPPING = 1000, 50, 50


@contextmanager
def crowded(address: str) -> Iterator[None]:
    """Strangers are there, and come again every second when the server has closed their connections."""
    over = threading.Event()

    def come_again() -> None:
        plain, silent, dripping = (Crowd(address) for _ in range(3))
        while not over.wait(1.0):
            for crowd, number, said in (
                (silent, NUM_SILENT, b""),
                (dripping, NUM_DRIPPING, PREFACE),
                (plain, NUM_CONNECTIONS, PREFACE),
            ):
                crowd.drop_closed()
                crowd.add(number - len(crowd.sockets), said)
            dripping.drip()
        for crowd in (plain, silent, dripping):
            crowd.close()

    thread = threading.Thread(target=come_again, name="crowd")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_crowd_of_strangers(tmp_path: Path, programs: Programs, gates: Gates, figures: Figures, small: bool) -> None:
    num_rounds = 5 if small else 40  # without strangers, and as many with them
    first, last = "server-1", f"server-{1 + num_rounds}"
    gates.shut(last)
    out = RunDir(tmp_path / "run")
    words = settings(
        method="gated",
        clients=NUM_CLIENTS,
        rounds=1 + 2 * num_rounds,
        train_size=4000,
        eval_every=1000,
        params__gates=str(gates.folder),
    )
    server = programs.server(out.path, *words)
    programs.clients(server.address(), NUM_CLIENTS, tmp_path / "state")
    gates.wait(first)
    gates.wait(last)
    with crowded(server.address()):
        gates.open_all()
        server.wait_for_success(600)
    rows = [row for row in read_rows(out.path / "records.jsonl") if row["event"] == "round_finished"]
    assert {row["num_clients"] for row in rows} == {NUM_CLIENTS}
    seconds = [row["seconds"] for row in rows]
    alone = statistics.median(seconds[1 : 1 + num_rounds])
    beside = statistics.median(seconds[-num_rounds:])
    figures.add("slower", beside / alone, alone_ms=alone * 1000, beside_ms=beside * 1000, goal="at most 1.2")
