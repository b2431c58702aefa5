"""Wireshark, which knows nothing of this program but its proto file, counts the same bytes as the ledger."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.baseline import DPMS
from tests.e2e.programs import NUM_CLIENTS, Programs, find_free_port, settings
from tests.e2e.rundir import RunDir
from tests.e2e.tshark import Booked, Capture, add_up

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not shutil.which("tshark"), reason="tshark is not here; Debian's package has it"),
]


def add_up_ledger(out: RunDir) -> Booked:
    found: Booked = Counter()
    for row in out.ledger:
        found[row["phase"], row["direction"], row["kind"]] += row["message_bytes"]
    return found


@pytest.mark.parametrize("method", ["fedavg", "flea", "feddpms"])
def test_wireshark_counts_what_the_ledger_has(method: str, tmp_path: Path, programs: Programs) -> None:
    port = find_free_port()
    capture = Capture(tmp_path / "lo.pcapng", port)
    out = RunDir(tmp_path / "run")
    words = DPMS.split() if method == "feddpms" else []
    server = programs.server(out.path, *settings(method=method), *words, listen=f"127.0.0.1:{port}")
    clients = programs.clients(server.address(), NUM_CLIENTS, tmp_path / "state")
    for program in (server, *clients):
        program.wait_for_success()
    capture.stop()
    assert add_up(capture) == add_up_ledger(out)
