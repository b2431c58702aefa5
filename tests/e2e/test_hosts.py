"""Hosts: many clients in one process give the same model and the same bytes as a process for each client."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.programs import NUM_CLIENTS, Gates, Programs, settings
from tests.e2e.rundir import RunDir
from tests.e2e.test_faults import assert_sound

pytestmark = pytest.mark.timeout(300)

MANY = 70  # more clients than a host has stores open
HOSTS = (1, 2, 8)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, shared_programs: Programs) -> dict[int, RunDir]:
    """The same run of eight clients with a process for each (0), and with hosts; two at a time."""
    folder = tmp_path_factory.mktemp("hosts")
    words = settings(clients=8, rounds=2, fraction=0.75)
    for pair in ((0, 1), (2, 8)):
        options = {hosts: ["--hosts", str(hosts)] if hosts else [] for hosts in pair}
        for program in [shared_programs.run(folder / str(n), *words, *options[n]) for n in pair]:
            program.wait_for_success()
    return {hosts: RunDir(folder / str(hosts)) for hosts in (0, *HOSTS)}


@pytest.mark.parametrize("hosts", HOSTS)
def test_hosts_change_neither_model_nor_bytes(hosts: int, runs: dict[int, RunDir]) -> None:
    alone, together = runs[0], runs[hosts]
    assert together.model_sha256 == alone.model_sha256
    assert together.summary["bytes"]["method"] == alone.summary["bytes"]["method"]
    assert together.summary["accuracy"] == alone.summary["accuracy"]
    check = together.summary["ledger_check"]
    assert (check["clients"], check["missing"], check["differing"]) == (8, 0, 0)
    assert check["only_server"] == check["only_client"] == 0


@pytest.mark.parametrize("hosts", HOSTS)
def test_every_client_of_a_host_has_its_own_rows_chain_and_store(hosts: int, runs: dict[int, RunDir]) -> None:
    alone, together = runs[0], runs[hosts]
    for client in range(8):
        mine = {"client": client, "phase": "fit"}
        assert together.sums(**mine) == alone.sums(**mine)
        ours, theirs = (sum(row["client"] == client for row in run.privacy) for run in (together, alone))
        assert ours == theirs > 0
        assert list((together.path / "clients" / str(client)).glob("*/store.db"))


def test_a_host_reopens_the_stores_of_clients_that_it_had_closed(tmp_path: Path, programs: Programs) -> None:
    """A method that keeps state in its clients, asked of more of them than a host keeps open."""
    found = []
    for hosts in (1, 2):
        out = RunDir(tmp_path / str(hosts))
        words = settings(method="scaffold", clients=MANY, rounds=2, train_size=2 * MANY)
        programs.run(out.path, *words, "--hosts", str(hosts)).wait_for_success()
        assert out.summary["ledger_check"]["differing"] == 0
        found.append(out.model_sha256)
    assert found[0] == found[1]


def test_a_killed_host_costs_its_clients_one_retry(
    tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir
) -> None:
    out = RunDir(tmp_path / "run")
    gates.shut("client-1-1")
    run = programs.run(
        out.path, *settings(method="gated", params__gates=str(gates.folder)), "--hosts", "1", "--parallel", "1"
    )
    os.kill(gates.wait("client-1-1"), signal.SIGKILL)
    gates.wait("client-1-1", times=2)  # the launcher has started it again
    gates.open("client-1-1")
    run.wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert_sound(out)
    for client in range(NUM_CLIENTS):
        assert max(out.attempts(client=client, phase="fit", direction="down")) <= 1
        assert out.attempts(client=client, round=1, phase="fit", direction="up") == [0]
    assert len(run.read_log("client_restarted")) == 1


def test_a_host_is_started_by_hand(tmp_path: Path, programs: Programs, finished: RunDir) -> None:
    out = RunDir(tmp_path / "run")
    server = programs.server(out.path, *settings())
    state = ["--state-dir", str(tmp_path / "state")]
    host = programs.start("fedrpc-client", "--server", server.address(), "--client-ids", "0,2", *state)
    alone = programs.start("fedrpc-client", "--server", server.address(), "--client-id", "1", *state)
    for program in (server, host, alone):
        program.wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert out.summary["bytes"]["method"] == finished.summary["bytes"]["method"]


def test_a_client_cannot_run_in_two_processes(tmp_path: Path, programs: Programs) -> None:
    server = programs.server(tmp_path / "run", *settings())
    common = ["fedrpc-client", "--server", server.address(), "--state-dir", str(tmp_path / "state")]
    programs.start(*common, "--client-ids", "0-1").wait_for_join()
    second = programs.start(*common, "--client-ids", "1-2")
    assert second.wait() == 75
    assert "client 1 is already running" in second.err
