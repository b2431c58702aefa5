"""Mistakes that people make: each is one clear line and an honest exit code, and never a traceback."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedrpc.problem import Problem
from fedrpc.wire.sealing import seal
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.e2e.programs import Program, Programs, configuration, find_free_port, settings, wait_for
from tests.e2e.rawclient import SERVICE, RawClient, catch_refusal
from tests.e2e.rundir import RunDir

pytestmark = pytest.mark.timeout(180)

CONFIG, UNAVAILABLE, PROTOCOL, USAGE = 78, 75, 76, 2


def assert_one_line(ended: Program, code: int, *words: str) -> None:
    """One line that says it all; log lines, which are JSON here, may stand before it."""
    assert ended.wait() == code, f"{ended.code}: {ended.err}"
    assert "Traceback" not in ended.err + ended.out
    lines = [line for line in ended.err.splitlines() if line and not line.startswith("{")]
    if code == USAGE:  # the command line's own: usage, then a box with the error
        assert lines[0].startswith("Usage: "), ended.err
    else:
        assert len(lines) == 1, ended.err
        assert lines[0].startswith("error: "), ended.err
    for word in words:
        assert word in ended.err


def assert_warned_once(client: Program, said: str) -> None:
    """A client that reaches no server says why at once, and once."""
    [warning] = client.read_log("waiting_for_server")
    assert said in warning["why"]
    assert warning["level"] == "warning"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("not what you think")
    (tmp_path / "bad.toml").write_text("clients = = 3")
    (tmp_path / "latin.toml").write_bytes(b"method = '\xff'")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("run --method fedavgg", CONFIG, "unknown method 'fedavgg'; Did you mean 'fedavg'?"),
        ("run --dataset fmnist-mimi", CONFIG, "unknown data set 'fmnist-mimi'; Did you mean 'fmnist-mini'?"),
        ("run --model zda-mnis", CONFIG, "unknown model 'zda-mnis'; Did you mean 'zda-mnist'?"),
        ("run --partition dirichlett:0.1", CONFIG, "unknown partition 'dirichlett'; Did you mean 'dirichlet'?"),
        ("run --recipe quickstat", CONFIG, "unknown recipe 'quickstat'; Did you mean 'quickstart'?"),
        ("run --set train.lrr=1", CONFIG, "unknown option 'train.lrr'; Did you mean 'train.lr'?"),
        ("run --set ronds=1", CONFIG, "unknown option 'ronds'; Did you mean 'rounds'?"),
        ("run --set params.mu=1", CONFIG, "unknown parameter of fedavg 'params.mu'"),
        ("run --metod fedavg", USAGE, "--metod; --method"),
        ("rnu", USAGE, "No such command 'rnu'; Did you mean 'run'?"),
        ("list metods", CONFIG, "unknown list 'metods'; Did you mean 'methods'?"),
        ("run --log-level loud", CONFIG, "unknown log level 'loud'; warning"),
        ("run --model harnet", CONFIG, "'harnet'; (1, 28, 28); zda-mnist"),
        ("run --partition dirichlet:x", CONFIG, "alpha; 'x'"),
        ("run --set train.lr=-1", CONFIG, "train.lr; greater than 0; -1"),
        ("run --set lr", CONFIG, "key=value; 'lr'"),
        ("run --clients 0", CONFIG, "clients; greater than or equal to 1"),
        ("run --clients x", USAGE, "--clients"),
        ("run --clients 100000 --hosts 2", CONFIG, "clients; 6000; 100000"),
        ("run --clients 100000", CONFIG, "100000 client processes; GiB of memory; --hosts"),
        ("run --device gpu", CONFIG, "device 'gpu'; cuda"),
        ("run --dp-sgd noise=1", CONFIG, "unknown option 'privacy.dp_sgd.noise'; Did you mean"),
        ("run --dp-sgd noise_multiplier", CONFIG, "--dp-sgd takes; 'noise_multiplier'"),
        ("run --dp-sgd noise_multiplier=x", CONFIG, "privacy.dp_sgd.noise_multiplier; 'x'"),
        ("run --config no.toml", CONFIG, "no.toml"),
        ("run --config foreign", CONFIG, "foreign; Is a directory"),
        ("run --config bad.toml", CONFIG, "bad.toml; not valid TOML"),
        ("run --config latin.toml", CONFIG, "latin.toml; not valid TOML"),
        ("run --dataset cifar10 --data-dir foreign", CONFIG, "'cifar10' is not there; fedrpc data prepare cifar10"),
    ],
)
def test_fedrpc(words: str, code: int, said: str, files: Path, programs: Programs) -> None:
    asked = [str(files / word) if (files / word).exists() or word.endswith(".toml") else word for word in words.split()]
    if asked[0] == "run":
        asked += ["--out", str(files / "run")]
    assert_one_line(programs.start("fedrpc", *asked), code, *said.split("; "))
    assert not (files / "run").exists(), "nothing is left behind that would stand in the way of the right command"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--listen 0.0.0.0:0", CONFIG, "0.0.0.0:0 is not loopback; --tls-cert; --insecure"),
        ("--listen 127.example.org:0", CONFIG, "127.example.org:0 is not loopback"),
        ("--listen 127.0.0.1", CONFIG, "--listen takes HOST:PORT; '127.0.0.1'"),
        ("--listen 127.0.0.1:99999", CONFIG, "--listen takes HOST:PORT; '127.0.0.1:99999'"),
        ("--listen 127.0.0.1:0 --tls-cert file", CONFIG, "--tls-cert and --tls-key go together"),
        ("--listen 127.0.0.1:0 --tls-client-ca file", CONFIG, "--tls-client-ca; needs --tls-cert and --tls-key"),
        ("--listen 127.0.0.1:0 --tls-cert no.pem --tls-key no.pem", CONFIG, "cannot read the certificate; no.pem"),
        ("--listen 127.0.0.1:0 --tls-cert file --tls-key file", CONFIG, "not a certificate and its key in PEM"),
    ],
)
def test_fedrpc_server(words: str, code: int, said: str, files: Path, programs: Programs) -> None:
    asked = [str(files / word) if word in ("file", "no.pem") else word for word in words.split()]
    ended = programs.start("fedrpc-server", *asked, "--out", files / "run", *settings())
    assert_one_line(ended, code, *said.split("; "))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--server 192.0.2.1:50051", CONFIG, "192.0.2.1:50051 is not loopback; --tls-ca; --insecure"),
        ("--server localhost.example.org:1", CONFIG, "localhost.example.org:1 is not loopback"),
        ("--server 127.0.0.1", CONFIG, "--server takes HOST:PORT"),
        ("--server 127.0.0.1:1 --client-id -1", USAGE, "--client-id"),
        ("--server 127.0.0.1:1 --state-dir file", CONFIG, "cannot write; file; --state-dir"),
        ("--server 127.0.0.1:1 --tls-ca no.pem", CONFIG, "cannot read the certificate; no.pem"),
        ("--server 127.0.0.1:1 --tls-ca file", CONFIG, "file holds no CA certificate"),
        ("--server 127.0.0.1:1 --tls-cert file --tls-key file", CONFIG, "--tls-ca"),
        ("--server 127.0.0.1:1 --log-level loud", CONFIG, "unknown log level 'loud'"),
    ],
)
def test_fedrpc_client(words: str, code: int, said: str, files: Path, programs: Programs) -> None:
    asked = [str(files / word) if word in ("file", "no.pem") else word for word in words.split()]
    for name, value in (("--client-id", "0"), ("--state-dir", str(files / "state"))):
        asked += [] if name in asked else [name, value]
    assert_one_line(programs.start("fedrpc-client", *asked, "--wait-s", "1"), code, *said.split("; "))


# The run directory


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "cannot write; file"),
        ("file/run", "cannot write; Not a directory"),
        ("foreign", "is not empty and holds no run"),
    ],
)
def test_a_place_that_can_not_be_a_run_directory(name: str, said: str, files: Path, programs: Programs) -> None:
    assert_one_line(programs.start("fedrpc", "run", "--out", files / name, *settings()), CONFIG, *said.split("; "))


@pytest.fixture
def copied(finished: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(finished.path, tmp_path / "copied")
    return RunDir(tmp_path / "copied")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 7}, "holds another run (seed 0 -> 7); choose another --out"),
        ({"train.epochs": 2}, "holds another run (train.epochs 1 -> 2)"),
        ({"rounds": 2}, "has 3 rounds already; --rounds 2 is fewer"),
    ],
)
def test_a_directory_that_holds_another_run(
    changes: dict[str, Any], said: str, copied: RunDir, programs: Programs
) -> None:
    before = {path: path.read_bytes() for path in copied.path.rglob("*") if path.is_file()}
    ended = programs.start("fedrpc", "run", "--out", copied.path, *settings(**changes))
    assert_one_line(ended, CONFIG, *said.split("; "))
    assert {path: path.read_bytes() for path in copied.path.rglob("*") if path.is_file()} == before


def test_fewer_rounds_than_an_unfinished_run_has(copied: RunDir, programs: Programs) -> None:
    (copied.path / "summary.json").unlink()
    kept = (copied.path / "config.toml").read_text()
    ended = programs.start("fedrpc-server", "--listen", "127.0.0.1:0", "--out", copied.path, *settings(rounds=1))
    assert_one_line(ended, CONFIG, "has 3 rounds already", "--rounds 1 is fewer")
    assert (copied.path / "config.toml").read_text() == kept


def test_a_checkpoint_that_was_changed(copied: RunDir, programs: Programs) -> None:
    [path] = copied.path.glob("checkpoints/state-*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    ended = programs.start("fedrpc", "run", "--out", copied.path, *settings(rounds=4))
    assert_one_line(ended, CONFIG, "was changed", "SHA-256")


def test_a_directory_that_another_server_works_in(copied: RunDir, programs: Programs) -> None:
    with (copied.path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = programs.start("fedrpc", "run", "--out", copied.path, *settings(rounds=4))
        assert_one_line(ended, UNAVAILABLE, "another server uses")


def test_a_client_that_no_restart_helps(copied: RunDir, programs: Programs) -> None:
    (copied.path / "clients" / "2" / "policy.json").write_text("{")  # of the last one that is started
    ended = programs.start("fedrpc", "run", "--out", copied.path, *settings(rounds=4))
    assert_one_line(ended, CONFIG, "client 2 ended with code 78", "policy.json cannot be read", "client.log")


# The console scripts themselves, one mistake each


def test_the_scripts_say_the_same(tmp_path: Path, scripts: Programs) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = scripts.start("fedrpc", "run", "--method", "fedavgg", "--out", tmp_path / "run")
        server = scripts.server(tmp_path / "served", *settings(), listen=address)
        nobody = f"127.0.0.1:{find_free_port()}"
        client = scripts.client(nobody, 0, tmp_path / "state", "--wait-s", "1")
        assert_one_line(run, CONFIG, "unknown method 'fedavgg'", "Did you mean 'fedavg'?")
        assert_one_line(server, UNAVAILABLE, f"cannot listen on {address}", "in use", "--listen")
    said = (f"no fedrpc server answers at {nobody}", "Connection refused", "gave up after 1 s (--wait-s)")
    assert_one_line(client, UNAVAILABLE, *said)


# At Join


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory, shared_programs: Programs) -> Iterator[Program]:
    """A server whose run never starts: one of its three clients never comes."""
    server = shared_programs.server(tmp_path_factory.mktemp("waiting") / "run", *settings())
    server.address()
    yield server
    assert server.code is None, "no mistake of a client's ends a server"
    server.end()


def _client(programs: Programs, address: str, client: int, state: Path) -> Program:
    return programs.client(address, client, state, "--wait-s", "1")


def test_a_client_id_out_of_range(waiting: Program, tmp_path: Path, programs: Programs) -> None:
    ended = _client(programs, waiting.address(), 3, tmp_path / "state")
    assert_one_line(ended, CONFIG, "client id 3 is out of range", "0 to 2")


def test_a_client_id_that_a_live_client_holds(waiting: Program, tmp_path: Path, programs: Programs) -> None:
    programs.client(waiting.address(), 0, tmp_path / "state").wait_for_join()
    ended = _client(programs, waiting.address(), 0, tmp_path / "other")
    assert_one_line(ended, UNAVAILABLE, "client id 0 is used by another live client")
    ended = _client(programs, waiting.address(), 0, tmp_path / "state")
    assert_one_line(ended, UNAVAILABLE, "client 0 is already running with the state folder", "--state-dir")


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"schema_digest": b"\1" * 32}, grpc.StatusCode.FAILED_PRECONDITION, "the wire schema differs; 010101010101"),
        ({"schema_digest": b""}, grpc.StatusCode.FAILED_PRECONDITION, "the wire schema differs; none"),
        (
            {"package_version": "9.9", "schema_digest": b"\1"},
            grpc.StatusCode.FAILED_PRECONDITION,
            "9.9; install the same",
        ),
        ({"members": []}, grpc.StatusCode.INVALID_ARGUMENT, "a Join without a client"),
        ({"client_id": 3}, grpc.StatusCode.OUT_OF_RANGE, "client id 3"),
        ({"client_id": 2**32 - 1}, grpc.StatusCode.OUT_OF_RANGE, "out of range"),
    ],
)
def test_a_wire_that_differs_is_refused_at_join(
    changes: dict[str, Any], code: grpc.StatusCode, said: str, waiting: Program
) -> None:
    client = changes.pop("client_id", 1)
    with RawClient(waiting.address()) as raw:
        got, words = catch_refusal(raw.join, client, **changes)
    assert got == code
    for word in said.split("; "):
        assert word in words


def test_another_version_with_the_same_wire_is_welcome(waiting: Program) -> None:
    with RawClient(waiting.address()) as raw:
        assert raw.join(1, package_version="0.0.1").admissions[0].session
    wait_for("the server notes it", lambda: [r for r in waiting.read_log("version_skew") if r["theirs"] == "0.0.1"])


class _Fake(grpc.GenericRpcHandler):
    """Greets every client, and answers its Join."""

    def __init__(self, join: Callable[[bytes, Any], bytes] | None, run_id: str) -> None:
        greeting = seal(pb.GreetResponse(challenge=b"c", run_id=run_id).SerializeToString())
        self._calls = {"Greet": lambda *_: greeting, "Join": join} if join else {}

    def service(self, details: Any) -> Any:
        call = self._calls.get(details.method.removeprefix(f"/{SERVICE}/"))
        return grpc.unary_unary_rpc_method_handler(call) if call else None


@contextlib.contextmanager
def _fake(join: Callable[[bytes, Any], bytes] | None, run_id: str = "r") -> Iterator[str]:
    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, (_Fake(join, run_id),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait(10)


@pytest.mark.parametrize(
    ("status", "words", "code", "said"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "the wire differs: install it", CONFIG, "the wire differs: install it"),
        (grpc.StatusCode.PERMISSION_DENIED, "not for you", CONFIG, "not for you"),
        (grpc.StatusCode.UNAVAILABLE, "not now", UNAVAILABLE, "not now; gave up after 1 s"),
        (None, "", CONFIG, "is no fedrpc server of this version"),
    ],
)
def test_a_server_that_refuses(
    status: grpc.StatusCode | None, words: str, code: int, said: str, tmp_path: Path, programs: Programs
) -> None:
    with _fake((lambda _, context: context.abort(status, words)) if status else None) as address:
        assert_one_line(_client(programs, address, 0, tmp_path / "state"), code, *said.split("; "))


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"dataset_digest": "0" * 64}, CONFIG, "the data set differs from the server's"),
        ({"partition_sha256": "0" * 64}, CONFIG, "the partition differs from the server's"),
        ({"method_digest": b"0" * 32}, CONFIG, "the method's messages differs from the server's"),
        ({"config": "{"}, CONFIG, "configuration; install the same fedrpc"),
        ({"config": '{"from_the_future": 1}'}, CONFIG, "configuration; from_the_future"),
        ({"config": '{"method": "fedavgg"}'}, CONFIG, "unknown method 'fedavgg'"),
        ({"config": '{"dataset": "../../etc"}'}, CONFIG, "unknown data set '../../etc'"),
        ({"run_id": "../../elsewhere"}, PROTOCOL, "name; ../../elsewhere"),
        ({"run_id": ""}, PROTOCOL, "name"),
    ],
)
def test_a_server_that_serves_something_else(
    changes: dict[str, Any], code: int, said: str, tmp_path: Path, programs: Programs, finished: RunDir
) -> None:
    """What a client learns at Join it compares with what it computes itself, before it does any work."""
    problem = Problem(configuration(settings()))
    right = {
        "token": b"t",
        "admissions": [pb.Admission(session=1)],
        "run_id": "r",
        "config": problem.config.dump_for_join(),
        "dataset_digest": problem.dataset.digest,
        "partition_sha256": problem.partition.sha256,
        "method_digest": problem.schema_digest(),
        "package_version": "0.0.1",
    }
    answer = seal(pb.JoinResponse(**(right | changes)).SerializeToString())
    with _fake(lambda *_: answer, changes.get("run_id", "r")) as address:
        assert_one_line(_client(programs, address, 0, tmp_path / "state"), code, *said.split("; "))


def test_an_answer_to_join_that_is_none(tmp_path: Path, programs: Programs) -> None:
    for answer, said in (
        (b"\xff" * 40, "the answer to Join was changed on its way: 40 bytes without a hash"),
        (seal(b"\xff" * 40), "74 bytes are not a JoinResponse"),
    ):
        with _fake(lambda *_, answer=answer: answer) as address:
            assert_one_line(_client(programs, address, 0, tmp_path / "state"), PROTOCOL, said)


def test_something_that_is_no_server_at_all(tmp_path: Path, programs: Programs) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # takes connections, and says nothing
        ended = _client(programs, f"127.0.0.1:{listener.getsockname()[1]}", 0, tmp_path / "state")
        assert_one_line(ended, UNAVAILABLE, "no fedrpc server answers", "gives no answer", "gave up after 1 s")


def test_a_client_says_at_once_why_it_reaches_no_server_and_goes_on_trying(tmp_path: Path, programs: Programs) -> None:
    address = f"127.0.0.1:{find_free_port()}"
    client = programs.client(address, 0, tmp_path / "state")
    wait_for("it says why", lambda: client.read_log("waiting_for_server"))
    server = programs.server(tmp_path / "run", *settings(clients=1), listen=address)
    server.wait_for_success()
    assert client.wait() == 0
    assert_warned_once(client, "Connection refused; look at --server, and whether the server has started")


def test_a_host_that_nobody_knows(tmp_path: Path, programs: Programs) -> None:
    ended = programs.client("nobody.invalid:50051", 0, tmp_path / "state", "--wait-s", "1", "--insecure")
    assert_one_line(ended, UNAVAILABLE, "its name cannot be resolved", "look at --server", "gave up after 1 s")
    assert_warned_once(ended, "its name cannot be resolved")


def test_the_log_is_json_where_no_terminal_is(waiting: Program) -> None:
    lines = waiting.err.splitlines()
    assert lines
    assert all(json.loads(line)["role"] == "server" for line in lines)
