"""Ctrl-C and SIGTERM: every process ends, the exit code is honest, and the same command goes on to the same model."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.programs import NUM_CLIENTS, Gates, Programs, find_free_port, settings, wait_for
from tests.e2e.rundir import RunDir
from tests.e2e.test_faults import assert_sound, gone

pytestmark = pytest.mark.timeout(240)


def test_a_run_is_stopped_by_either_signal_and_goes_on(
    tmp_path: Path, scripts: Programs, programs: Programs, gates: Gates, finished: RunDir
) -> None:
    """Stopped in the middle of training in round 0 and again in round 1, then left alone."""
    out = RunDir(tmp_path / "run")
    words = settings(method="gated", params__gates=str(gates.folder), params__batch_s=0.05)
    plans = ((scripts, signal.SIGINT, 130, "client-0-0"), (programs, signal.SIGTERM, 143, "client-1-1"))
    for start, number, code, place in plans:
        run = start.run(out.path, *words)
        gates.wait(place)
        everybody = run.descendants()
        assert len(everybody) == NUM_CLIENTS + 3, "launcher, server, fork server and clients"
        run.send(number)
        assert run.wait() == code
        wait_for("every process ends", lambda e=everybody: gone(e))
        assert not list(out.path.rglob("store.db-wal")), "clients were asked to end, and closed their stores"
        assert "Traceback" not in run.err + run.out
        assert "error" not in run.err.lower()
        assert not (out.path / "summary.json").exists()
    programs.run(out.path, *words).wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert_sound(out)


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path, programs: Programs, gates: Gates) -> None:
    run = programs.run(
        tmp_path / "run", *settings(method="gated", params__gates=str(gates.folder), params__batch_s=0.1)
    )
    gates.wait("client-0-0")
    everybody = run.descendants()
    run.kill()
    wait_for("every process ends", lambda: gone(everybody))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_client_by_hand_ends_at_a_signal(number: int, code: int, tmp_path: Path, programs: Programs) -> None:
    """Also while it looks for its server."""
    client = programs.client(f"127.0.0.1:{find_free_port()}", 0, tmp_path / "state")
    wait_for("the client looks for its server", lambda: client.read_log("waiting_for_server"))
    client.send(number)
    assert client.wait() == code
    assert "Traceback" not in client.err


def test_a_server_by_hand_ends_at_ctrl_c(tmp_path: Path, programs: Programs) -> None:
    server = programs.server(tmp_path / "run", *settings())
    programs.client(server.address(), 0, tmp_path / "state").wait_for_join()
    server.send(signal.SIGINT)
    assert server.wait() == 130
    assert "Traceback" not in server.err


def test_a_server_that_stood_still_does_not_hold_it_against_its_clients(
    tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir
) -> None:
    """It is stopped for longer than the deadline of a task that was just delivered."""
    out = RunDir(tmp_path / "run")
    deadline_s = 6.0
    gates.shut("client-1-1")
    words = settings(method="gated", params__gates=str(gates.folder), limits__deadline_s=deadline_s)
    server = programs.server(out.path, *words)
    programs.clients(server.address(), NUM_CLIENTS, tmp_path / "state")
    gates.wait("client-1-1")
    server.send(signal.SIGSTOP)
    time.sleep(deadline_s + 2)
    server.send(signal.SIGCONT)
    wait_for("the server notices", lambda: server.read_log("stood_still"))
    gates.open("client-1-1")
    server.wait_for_success()
    assert not server.read_log("client_missing")
    assert out.model_sha256 == finished.model_sha256
    assert_sound(out)


def test_a_server_that_was_killed_after_its_summary_still_tells_its_clients(
    tmp_path: Path, programs: Programs, finished: RunDir
) -> None:
    """The end of the run is there, and then the server is not: clients look for it until it has told them."""
    out, listen = RunDir(tmp_path / "run"), f"127.0.0.1:{find_free_port()}"
    words = settings()
    shutil.copytree(finished.path, out.path)
    (out.path / "spool").mkdir()  # it goes when the clients were told
    clients = programs.clients(listen, NUM_CLIENTS, out.path / "clients")
    server = programs.server(out.path, *words, listen=listen)
    assert [client.wait() for client in clients] == [0] * NUM_CLIENTS
    server.wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert not (out.path / "spool").exists()
    again = programs.server(out.path, *words, listen=listen).wait_for_success()
    assert not again.read_log("listening"), "once is enough"
