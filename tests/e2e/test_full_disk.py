"""A disk that is full: one clear line, an end with 75 at once, and the same command goes on to the same model."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from tests.e2e.programs import NUM_CLIENTS, Gates, Program, Programs, settings, wait_for
from tests.e2e.rundir import RunDir
from tests.e2e.test_faults import assert_sound, gone

pytestmark = pytest.mark.timeout(240)

LIMIT = 50_000  # bytes of a file: less than a model of 117 kB, more than what the processes log
SOON_S = 30.0  # from the first error to the end of all processes; restarting clients took minutes


def fill_disk(pid: int) -> None:
    """From now on no file of a process can grow beyond the limit, as on a disk that is full."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))


def find_errors(program: Program) -> list[str]:
    return [line for line in program.err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("place", ["the run directory", "a client's state"])
def test_a_run_ends_in_one_line_and_goes_on_when_there_is_room(
    place: str, tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir
) -> None:
    out = RunDir(tmp_path / "run")
    words = settings(method="gated", params__gates=str(gates.folder))
    gates.shut("server-1", "client-1-1")
    run = programs.run(out.path, *words)
    server = gates.wait("server-1")
    gates.open("server-1")
    client = gates.wait("client-1-1")
    everybody = run.descendants()
    fill_disk(server if place == "the run directory" else client)
    gates.open("client-1-1")
    full_at = time.monotonic()
    assert run.wait() == 75
    wait_for("every process ends", lambda: gone(everybody))
    assert time.monotonic() - full_at < SOON_S
    assert "Traceback" not in run.err
    [line] = find_errors(run)
    assert "cannot write" in line
    assert "free space there, then run the same command again" in line
    assert not run.read_log("client_restarted")
    assert out.durable_round == 0

    programs.run(out.path, *words).wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert_sound(out)
    for number in range(NUM_CLIENTS):
        assert len(gates.pids(f"client-{number}-0")) == 1, "a durable round is not played again"


def test_a_client_by_hand_ends_with_75_and_can_come_again(
    tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir
) -> None:
    out = RunDir(tmp_path / "run")
    gates.shut("client-1-1")
    server = programs.server(out.path, *settings(method="gated", params__gates=str(gates.folder)))
    clients = programs.clients(server.address(), NUM_CLIENTS, tmp_path / "state")
    fill_disk(gates.wait("client-1-1"))
    gates.open("client-1-1")
    assert clients[1].wait() == 75
    assert "Traceback" not in clients[1].err
    [line] = find_errors(clients[1])
    assert str(tmp_path / "state" / "1") in line
    programs.client(server.address(), 1, tmp_path / "state")
    server.wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert_sound(out)
