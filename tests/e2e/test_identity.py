"""Who a client is: what only its user may read, and who may come under its id."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest

from fedrpc.tls.tokens import derive_token, read_secret
from fedrpc.wire.sealing import seal
from tests.e2e.programs import NUM_CLIENTS, Gates, Program, Programs, find_free_port, settings, wait_for
from tests.e2e.rawclient import RawClient, catch_refusal
from tests.e2e.rundir import RunDir, read_rows
from tests.e2e.test_bad_input import CONFIG, assert_one_line

pytestmark = pytest.mark.timeout(180)


def _list_public(folder: Path) -> list[str]:
    """What somebody else than its owner may read."""
    paths = [folder, *folder.rglob("*")]
    return [f"{path} {path.stat().st_mode:o}" for path in paths if path.stat().st_mode & 0o077]


@pytest.mark.parametrize("how", ["run", "hosts", "by hand"])
def test_a_clients_files_are_its_users_alone(tmp_path: Path, scripts: Programs, how: str) -> None:
    """Under the usual umask, which lets everybody read what is made."""
    before = os.umask(0o022)
    words = settings(clients=2, rounds=1, train_size=40)
    try:
        if how == "by hand":
            state = tmp_path / "state"
            server = scripts.server(tmp_path / "run", *words)
            clients = scripts.clients(server.address(), 2, state)
            for program in (server, *clients):
                program.wait_for_success()
        else:
            state = tmp_path / "run" / "clients"
            scripts.run(tmp_path / "run", *words, *(("--hosts", "1") if how == "hosts" else ())).wait_for_success()
    finally:
        os.umask(before)
    assert {"instance", "signing.key", "lock", "store.db"} <= {path.name for path in state.rglob("*")}
    assert _list_public(state) == []
    assert (tmp_path / "run" / "summary.json").stat().st_mode & 0o777 == 0o644, "the umask was the usual one"


# Keys


def _refuse(server: Program, client: int, instance: str = "raw") -> str:
    """A stranger tries to join; returns why it may not."""
    with RawClient(server.address()) as stranger:
        code, words = catch_refusal(stranger.join, client, instance)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    return words


def test_nobody_takes_the_id_of_a_client_that_is_away(
    tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir
) -> None:
    """Not after its session has ended, nor after the server was started again; the client itself comes back."""
    out, listen = RunDir(tmp_path / "run"), f"127.0.0.1:{find_free_port()}"
    words = settings(method="gated", params__gates=str(gates.folder), limits__grace_s=0.5)
    gates.shut("client-1-1")
    server = programs.server(out.path, *words, listen=listen)
    clients = programs.clients(server.address(), NUM_CLIENTS, tmp_path / "state")
    gates.wait("client-1-1")
    instance = (tmp_path / "state" / "1" / "instance").read_text()
    assert "client 1 joins with another key than before" in _refuse(server, 1, instance), (
        "not while it is there, either"
    )
    assert len(clients[1].read_log("joined")) == 1
    assert not clients[1].read_log("stream_lost"), "nothing was taken from it"
    lost = len(server.read_log("client_lost"))
    clients[1].kill()
    wait_for("the server gives it up", lambda: len(server.read_log("client_lost")) > lost)
    said = _refuse(server, 1)
    assert "client 1 joins with another key than before in this run: expected SHA-256" in said
    assert "start it with the state folder or the certificate that it had" in said
    server.kill()
    again = programs.server(out.path, *words, listen=listen)
    again.address()
    assert "client 1 joins with another key than before" in _refuse(again, 1)
    gates.open_all()
    programs.client(listen, 1, tmp_path / "state")
    again.wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    keys = [row["client"] for row in read_rows(out.path / "heads.jsonl") if "key" in row]
    assert sorted(keys) == list(range(NUM_CLIENTS))


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory, shared_programs: Programs) -> Program:
    """A server that waits for its clients."""
    return shared_programs.server(tmp_path_factory.mktemp("waiting") / "run", *settings())


def test_a_join_that_somebody_recorded_opens_no_session(waiting: Program) -> None:
    with RawClient(waiting.address()) as raw:
        greeting = raw.greet()
        recorded = seal(raw.request(greeting, 0).SerializeToString())
        raw.join_bytes(recorded)
        code, words = catch_refusal(raw.join_bytes, recorded)
        assert (code, "used before" in words) == (grpc.StatusCode.UNAUTHENTICATED, True)
        again = seal(raw.request(greeting, 0, challenge=raw.greet().challenge).SerializeToString())
        code, words = catch_refusal(raw.join_bytes, again)
        assert (code, "client 0 has not signed its Join" in words) == (grpc.StatusCode.FAILED_PRECONDITION, True)


def test_a_key_that_one_does_not_hold(waiting: Program) -> None:
    """Public keys are no secret: they are in heads.jsonl, and travel in the clear without TLS."""
    with RawClient(waiting.address()) as owner, RawClient(waiting.address()) as thief:
        owner.join(1)
        member = owner.member(1)
        code, words = catch_refusal(thief.join, 1, members=[member])
        assert (code, "client 1 has not signed its Join" in words) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        owner.join(1)


def test_a_join_of_more_clients_than_any_process_asks_for_at_once(waiting: Program) -> None:
    with RawClient(waiting.address()) as raw:
        code, words = catch_refusal(raw.join, 0, members=[raw.member(client) for client in range(501)])
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "a Join names 501 clients, expected 500 at most" in words


# Join tokens


def test_with_join_tokens_nobody_takes_an_id_before_its_client_does(
    tmp_path: Path, programs: Programs, finished: RunDir
) -> None:
    made = tmp_path / "certs"
    programs.start("fedrpc", "certs", made, "--host", "localhost", "--clients", str(NUM_CLIENTS)).wait_for_success()
    out = RunDir(tmp_path / "run")
    server = programs.server(out.path, "--join-secret", made / "join.secret", *settings())
    address, state = server.address(), tmp_path / "state"
    ended = programs.client(address, 0, state)
    assert_one_line(ended, CONFIG, "this server asks for join tokens, and client 0 has none", "--join-token")
    ended = programs.client(address, 0, state, "--join-token", made / "client-1.token")
    assert_one_line(ended, CONFIG, "is for client 1, not for client 0")
    with RawClient(address, token=derive_token(read_secret(made / "join.secret"), 1)) as raw:
        code, words = catch_refusal(raw.join, 0)
        assert (code, "client 0's join token is not of this server's secret" in words) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            True,
        )
    pattern = str(made / "client-{client}.token")
    one = programs.client(address, 0, state, "--join-token", pattern)
    words = ("--server", address, "--client-ids", "1-2", "--state-dir", state, "--join-token", pattern)
    host = programs.start("fedrpc-client", *words)
    for program in (server, one, host):
        program.wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    sources = {row["source"] for row in read_rows(out.path / "heads.jsonl") if "key" in row}
    assert sources == {"join token"}


def test_a_pods_certificate_is_for_its_own_clients_alone(tmp_path: Path, programs: Programs) -> None:
    made = tmp_path / "certs"
    words = ("--host", "localhost", "--host", "127.0.0.1", "--clients", "4", "--clients-per-pod", "2")
    programs.start("fedrpc", "certs", made, *words).wait_for_success()
    tls = ("--tls-cert", made / "server.pem", "--tls-key", made / "server.key", "--tls-client-ca", made / "ca.pem")
    server = programs.server(tmp_path / "run", *tls, *settings(clients=4, rounds=1, train_size=40))

    def start(pod: int, ids: str) -> Program:
        shown = ("--tls-cert", made / "pods" / f"{pod}.pem", "--tls-key", made / "pods" / f"{pod}.key")
        known = ("--server", server.address(), "--tls-ca", made / "ca.pem", "--state-dir", tmp_path / "state")
        return programs.start("fedrpc-client", *known, *shown, "--client-ids", ids)

    said = "the certificate is for pod-0, client-0, client-1, not for client-2"
    assert_one_line(start(0, "0-2"), CONFIG, said)
    for program in (start(0, "0-1"), start(1, "2-3"), server):
        program.wait_for_success()
