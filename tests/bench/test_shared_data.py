"""How much a client grows with the data set: 100 processes, fmnist-mini (5.5 MB) against cifar10 (184 MB)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

import psutil
import pytest

CLIENTS = 100
MEBI = 1 << 20


def uss_of_clients(dataset: str, out: Path) -> list[int]:
    """Unique bytes of every client process once a round is over and all of them have their data."""
    command = [Path(sys.executable).parent / "fedrpc", "run", "--dataset", dataset, "--clients", str(CLIENTS)]
    command += ["--rounds", "1000", "--set", "train.epochs=1", "--set", "limits.join_s=300", "--out", out]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 600
        records = out / "records.jsonl"
        while not (records.exists() and '"round": 0' in records.read_text()):
            assert process.poll() is None, "the run ended early"
            assert time.monotonic() < give_up, "no round in ten minutes"
            time.sleep(0.5)
        children = psutil.Process(process.pid).children()
        fork_server = max(children, key=lambda child: len(child.children()))
        clients = fork_server.children()
        assert len(clients) == CLIENTS
        return [client.memory_full_info().uss for client in clients]
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.aside
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    not (Path(os.environ.get("FEDRPC_DATA", "/nowhere")) / "cifar10").exists(), reason="FEDRPC_DATA has no cifar10"
)
def test_clients_share_one_copy_of_the_data(tmp_path: Path) -> None:
    small = uss_of_clients("fmnist-mini", tmp_path / "small")
    large = uss_of_clients("cifar10", tmp_path / "large")
    grown = mean(large) - mean(small)
    print(f"\nUSS a client, MiB: fmnist-mini {mean(small) / MEBI:.1f}, cifar10 {mean(large) / MEBI:.1f}")
    print(f"grown by {grown / MEBI:.2f} MiB")
    assert grown < 5 * MEBI
