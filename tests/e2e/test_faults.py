"""kill -9 at the worst moments: the run goes on to the same model, asks nobody twice and charges nothing twice."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.checker import count_rows_of_questions
from tests.e2e.programs import NUM_CLIENTS, NUM_ROUNDS, Gates, Programs, find_free_port, settings, wait_for
from tests.e2e.proxy import Proxy
from tests.e2e.rundir import RunDir, find_broken_links, find_repeated_ledger_keys, find_repeated_releases, read_rows

pytestmark = pytest.mark.timeout(300)

WEIGHTS_BYTES = 116_536
LARGE = 4 * ((784 + 1) * 2900 + (2900 + 1) * 10)  # bytes of the wide network: nine chunks


def assert_sound(run: RunDir, num_server_kills: int = 0) -> None:
    """What holds of every run, however it went; see `checker.find_faults` for what a kill of the server leaves."""
    assert find_repeated_ledger_keys(run) == []
    assert find_repeated_releases(run) == []
    assert list(find_broken_links(run)) == []
    check = run.summary["ledger_check"]
    assert (check["missing"], check["differing"]) == (0, 0)
    assert check["only_client"] <= num_server_kills * count_rows_of_questions(run)
    finished = [row for row in read_rows(run.path / "records.jsonl") if row["event"] == "round_finished"]
    assert [row["round"] for row in finished] == list(range(run.summary["num_rounds"]))
    assert all(row["num_clients"] == NUM_CLIENTS for row in finished)
    for direction in ("down", "up"):
        assert run.summary["bytes"]["total"][direction]["message"] == run.sums(direction=direction)["message_bytes"]


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs any more; one that nobody has waited for yet is gone too."""
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            continue
    return True


@pytest.fixture
def proxies() -> Iterator[list[Proxy]]:
    started: list[Proxy] = []
    yield started
    for proxy in started:
        proxy.close()


def test_a_client_is_killed_in_the_middle_of_an_upload(
    tmp_path: Path, programs: Programs, gates: Gates, proxies: list[Proxy]
) -> None:
    words = settings(method="nudged", model="wide", rounds=2, eval_every=100)
    undisturbed = programs.run(tmp_path / "undisturbed", *words)
    out = RunDir(tmp_path / "run")
    server = programs.server(out.path, *words, *settings(params__gates=str(gates.folder))[-2:])
    proxy = Proxy(server.address(), hold_after=LARGE // 2)
    proxies.append(proxy)
    clients = [
        programs.client(proxy.address if client == 1 else server.address(), client, tmp_path / "state")
        for client in range(NUM_CLIENTS)
    ]
    assert proxy.held.wait(90), "half of the upload has come"
    wait_for("some chunks are on disk", lambda: _largest_part(out) > LARGE // 4)
    clients[1].kill()
    proxy.pass_on()
    wait_for("the server gives the broken upload up", lambda: not _largest_part(out))
    programs.client(proxy.address, 1, tmp_path / "state")
    server.wait_for_success()

    undisturbed.wait_for_success()
    assert out.model_sha256 == RunDir(tmp_path / "undisturbed").model_sha256
    assert_sound(out)
    assert [len(gates.pids(f"client-{client}-0")) for client in range(NUM_CLIENTS)] == [1, 1, 1], "answers are kept"
    where = {"client": 1, "round": 0, "phase": "fit", "kind": "weights"}
    assert out.attempts(**where, direction="up", aborted=True) == [0]
    assert out.attempts(**where, direction="up", aborted=False) == [1]
    assert out.attempts(**where, direction="down", aborted=False) == [0, 1]
    sizes = out.summary["bytes"]
    assert 0 < sizes["aborted"]["up"]["tensor"] < LARGE
    assert sizes["redelivered"]["down"]["tensor"] == LARGE
    whole = out.sums(kind="weights", direction="up", phase="fit", aborted=False)
    assert whole["tensor_bytes"] == LARGE * NUM_CLIENTS * 2
    assert "closed" in sizes["kernel_note"]


def _deliveries(out: RunDir, client: int, round_index: int) -> int:
    where = {"client": client, "round": round_index, "phase": "fit", "direction": "down", "kind": "envelope"}
    return sum(row["messages"] for row in out.journal if where.items() <= row.items())


def _largest_part(out: RunDir) -> int:
    return max((path.stat().st_size for path in out.path.glob("spool/*/*.part")), default=0)


def test_a_client_is_killed_in_the_middle_of_training(
    tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir
) -> None:
    out = RunDir(tmp_path / "run")
    gates.shut("client-1-0", "client-2-1")
    run = programs.run(out.path, *settings(method="gated", params__gates=str(gates.folder)))
    for name in ("client-1-0", "client-2-1"):
        os.kill(gates.wait(name), signal.SIGKILL)
        gates.wait(name, times=2)  # the launcher has started it again
        gates.open(name)
    run.wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert_sound(out)
    assert out.attempts(client=1, round=0, phase="fit", direction="down") == [0, 1]
    assert out.attempts(client=1, round=0, phase="fit", direction="up") == [0]
    assert len(run.read_log("client_restarted")) == 2


def test_the_server_is_killed_between_rounds(
    tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir
) -> None:
    out = RunDir(tmp_path / "run")
    words = settings(method="gated", params__gates=str(gates.folder))
    gates.shut("server-1")
    run = programs.run(out.path, *words)
    server = gates.wait("server-1")
    assert out.durable_round == 0
    everybody = run.descendants()
    os.kill(server, signal.SIGKILL)
    assert run.wait() == 128 + signal.SIGKILL
    wait_for("every process ends", lambda: gone(everybody))
    assert "Traceback" not in run.err

    gates.open_all()
    programs.run(out.path, *words).wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert_sound(out, num_server_kills=1)
    for client in range(NUM_CLIENTS):
        assert len(gates.pids(f"client-{client}-0")) == 1, "a durable round is not played again"
    assert out.sums(kind="weights", direction="up")["tensor_bytes"] == WEIGHTS_BYTES * NUM_CLIENTS * NUM_ROUNDS


def test_a_killed_server_goes_on_with_the_moments_of_its_optimizer(
    tmp_path: Path, programs: Programs, gates: Gates
) -> None:
    adam = {"server_optimizer": "adam", "aggregation__adam__lr": 0.1}
    undisturbed, out = RunDir(tmp_path / "undisturbed"), RunDir(tmp_path / "run")
    programs.run(undisturbed.path, *settings(**adam)).wait_for_success()
    words = settings(method="gated", params__gates=str(gates.folder), **adam)
    gates.shut("server-2")
    run = programs.run(out.path, *words)
    os.kill(gates.wait("server-2"), signal.SIGKILL)
    assert run.wait() == 128 + signal.SIGKILL
    assert (out.path / "checkpoints" / "aggregation-3-adam.safetensors").exists()
    gates.open_all()
    programs.run(out.path, *words).wait_for_success()
    assert out.model_sha256 == undisturbed.model_sha256
    assert_sound(out, num_server_kills=1)


def test_the_server_ends_twice_in_the_middle_of_rounds_and_clients_stay(
    tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir
) -> None:
    """By hand: killed with two replies spooled, then asked to end; clients wait for it and lose nothing."""
    out = RunDir(tmp_path / "run")
    words = settings(method="gated", params__gates=str(gates.folder))
    listen = f"127.0.0.1:{find_free_port()}"
    gates.shut("client-2-1", "client-2-2")
    server = programs.server(out.path, *words, listen=listen)
    clients = programs.clients(server.address(), NUM_CLIENTS, tmp_path / "state")
    for end, code, round_index in ((signal.SIGKILL, -9, 1), (signal.SIGTERM, 128 + signal.SIGTERM, 2)):
        gates.wait(f"client-2-{round_index}")
        wait_for("two replies wait on disk", lambda: out.count_spooled() == 2)
        server.send(end)
        assert server.wait() == code
        assert out.durable_round == round_index - 1
        assert out.count_spooled() == 2
        server = programs.server(out.path, *words, listen=listen)
        wait_for("client 2 is asked again", lambda r=round_index: _deliveries(out, 2, r) == 2)
        gates.open(f"client-2-{round_index}")
    server.wait_for_success()
    assert [client.wait() for client in clients] == [0, 0, 0]

    assert out.model_sha256 == finished.model_sha256
    assert_sound(out, num_server_kills=1)
    for round_index in (1, 2):
        for client in range(NUM_CLIENTS):
            assert len(gates.pids(f"client-{client}-{round_index}")) == 1, "nobody trains twice"
        for client in (0, 1):  # their replies were on disk: they are not asked again
            for direction in ("down", "up"):
                sums = out.sums(client=client, round=round_index, phase="fit", kind="weights", direction=direction)
                assert sums["tensor_bytes"] == WEIGHTS_BYTES
        where = {"client": 2, "round": round_index, "phase": "fit", "kind": "weights"}
        assert out.attempts(**where, direction="down") == [0, 1]
    sizes = out.summary["bytes"]
    assert sizes["redelivered"]["down"]["tensor"] == 2 * WEIGHTS_BYTES
    own = sum(sizes["method"][direction]["tensor"] for direction in ("down", "up"))
    assert own == sizes["predicted"]["total"], "what is sent again is no cost of the method's"
    assert "resumed" in out.summary["bytes"]["kernel_note"]


def test_the_server_ends_twice_before_a_durable_round_is_evaluated(
    tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir
) -> None:
    """Killed while it evaluates round 1 beside round 2, then asked to end while it does so again after its restart."""
    out = RunDir(tmp_path / "run")
    words = settings(method="held", params__gates=str(gates.folder))
    listen = f"127.0.0.1:{find_free_port()}"
    gates.shut("client-0-1")
    server = programs.server(out.path, *words, listen=listen)
    clients = programs.clients(server.address(), NUM_CLIENTS, tmp_path / "state")
    gates.wait("client-0-1")  # round 0 is evaluated by now
    gates.shut("evaluate", "client-0-2")
    gates.open("client-0-1")
    for end, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 128 + signal.SIGTERM)):
        gates.wait("evaluate", times=len(gates.pids("evaluate")) + 1)
        if end == signal.SIGKILL:
            gates.wait("client-0-2")  # the next round does not wait for the evaluation
        assert out.durable_round == 1
        assert {row["round"] for row in read_rows(out.path / "records.jsonl")} == {0}
        server.send(end)
        assert server.wait() == code
        assert "Traceback" not in server.err
        server = programs.server(out.path, *words, listen=listen)
    gates.open_all()
    server.wait_for_success()
    assert [client.wait() for client in clients] == [0, 0, 0]

    assert out.model_sha256 == finished.model_sha256
    assert_sound(out, num_server_kills=1)
    assert _lines(out) == _lines(finished)
    assert out.summary["accuracy"] == finished.summary["accuracy"]


def _lines(run: RunDir) -> list[dict[str, Any]]:
    """The records but for how long things took."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_rows(run.path / "records.jsonl")]


def test_a_round_below_quorum_ends_the_server_and_can_be_played_again(
    tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir
) -> None:
    """Client 2 is late, hears that its task was withdrawn, and is asked the same again before it has stopped."""
    out = RunDir(tmp_path / "run")
    words = settings(method="gated", params__gates=str(gates.folder), limits__quorum=1.0)
    listen = f"127.0.0.1:{find_free_port()}"
    gates.shut("client-2-0")
    server = programs.server(out.path, *words, *settings(limits__deadline_s=2.0)[-2:], listen=listen)
    programs.clients(server.address(), NUM_CLIENTS, tmp_path / "state")
    assert server.wait() == 75
    assert [line for line in server.err.splitlines() if line.startswith("error: ")] == [
        "error: round 0, phase fit: 2 of 3 clients answered, the quorum is 3 (client 2: no answer within 2 s); "
        "run the same command again to go on from here"
    ]
    assert "Traceback" not in server.err

    again = programs.server(out.path, *words, listen=listen)
    wait_for("client 2 is asked again", lambda: _deliveries(out, 2, 0) == 2)
    gates.open_all()
    again.wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert_sound(out)
    assert [len(gates.pids(f"client-{client}-0")) for client in range(NUM_CLIENTS)] == [1, 1, 2]


def test_a_client_that_lost_its_store_goes_on_with_the_servers_copy_of_its_account(
    tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir
) -> None:
    """Killed in round 1 and its folder removed: it is somebody new to the server, with the old one's privacy rows.

    Somebody with another key; the server was told to allow that.
    """
    out = RunDir(tmp_path / "run")
    words = settings(method="gated", params__gates=str(gates.folder), limits__grace_s=0.5)
    gates.shut("client-1-1")
    server = programs.server(out.path, "--allow-new-keys", *words)
    clients = programs.clients(server.address(), NUM_CLIENTS, tmp_path / "state")
    gates.wait("client-1-1")
    clients[1].kill()
    shutil.rmtree(tmp_path / "state" / "1")
    wait_for("the server gives the old one up", lambda: server.read_log("client_lost"))
    gates.open_all()
    new = programs.client(server.address(), 1, tmp_path / "state")
    server.wait_for_success()
    assert [row["rows"] for row in new.read_log("privacy_chain_adopted")] == [2]
    assert out.model_sha256 == finished.model_sha256
    assert find_repeated_releases(out) == []
    assert list(find_broken_links(out)) == []
    assert len(out.privacy) == 2 * NUM_CLIENTS * NUM_ROUNDS
    assert find_repeated_ledger_keys(out) == []
    assert out.summary["ledger_check"]["differing"] == 0
    assert out.summary["ledger_check"]["only_server"] > 0, "what the lost store had counted"


def test_a_client_is_killed_again_and_again_in_a_phase_of_many_steps(tmp_path: Path, programs: Programs) -> None:
    """All steps share their rows of the ledger: what a kill cut off must not make them differ."""
    words = settings(
        method="handgan", clients=2, rounds=0, params__steps=400, params__paths=1, params__batch=2, params__noise_dim=4
    )
    undisturbed, out = RunDir(tmp_path / "undisturbed"), RunDir(tmp_path / "run")
    programs.run(undisturbed.path, *words).wait_for_success()
    server = programs.server(out.path, *words)
    clients = programs.clients(server.address(), 2, tmp_path / "state")
    for number in range(3):
        before = len(out.journal)
        wait_for("more steps are played", lambda before=before: len(out.journal) > before + 100)
        clients[1].kill()
        clients[1] = programs.client(server.address(), 1, tmp_path / "state")
        clients[1].wait_for_join()
        assert server.code is None, f"the run ended before kill {number}"
    server.wait_for_success()
    assert out.model_sha256 == undisturbed.model_sha256
    assert find_repeated_releases(out) == []
    assert list(find_broken_links(out)) == []
    check = out.summary["ledger_check"]
    assert (check["missing"], check["differing"], check["only_client"]) == (0, 0, 0)
    assert out.summary["bytes"]["method"] == undisturbed.summary["bytes"]["method"], "what came twice counts once"
