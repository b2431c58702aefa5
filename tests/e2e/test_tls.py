"""TLS and mutual TLS between real processes, the health service and reflection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fedrpc.privacy.signing import Signer
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.e2e.programs import NUM_CLIENTS, Program, Programs, settings
from tests.e2e.rawclient import SERVICE, TIMEOUT_S, RawClient, catch_refusal
from tests.e2e.rundir import RunDir, read_rows
from tests.e2e.test_bad_input import CONFIG, UNAVAILABLE, assert_one_line, assert_warned_once

pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True)
class Certificates:
    """What a careful administrator would hand out, and what a stranger has."""

    folder: Path
    ca: trustme.CA

    def words(self, name: str) -> list[str]:
        """The options of a client that shows a certificate in somebody's name."""
        return [*self.trusting(), *self.named(name)]

    def trusting(self, ca: str = "ca") -> list[str]:
        """The options of a client that shows no certificate."""
        return ["--tls-ca", str(self.folder / f"{ca}.pem")]

    def named(self, name: str) -> list[str]:
        """The options that show a certificate."""
        return ["--tls-cert", str(self.folder / f"{name}.pem"), "--tls-key", str(self.folder / f"{name}.key")]

    def credentials(self, name: str) -> grpc.ChannelCredentials:
        """The same for a client in this process."""
        files = [self.folder / "ca.pem", self.folder / f"{name}.key", self.folder / f"{name}.pem"]
        return grpc.ssl_channel_credentials(*(path.read_bytes() for path in files))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    ours, theirs = trustme.CA(), trustme.CA()
    for name, ca in (("ca", ours), ("stranger-ca", theirs)):
        ca.cert_pem.write_to_path(folder / f"{name}.pem")
    issued = [("server", ours, "localhost"), ("stranger", theirs, "client-0"), ("pods", ours, "pods")]
    issued += [(f"client-{client}", ours, f"client-{client}") for client in range(NUM_CLIENTS)]
    for name, ca, subject in issued:
        names = ("localhost", "127.0.0.1") if name == "server" else (f"{subject}.example.org",)
        cert = ca.issue_cert(*names, common_name=subject)
        cert.private_key_pem.write_to_path(folder / f"{name}.key")
        for number, blob in enumerate(cert.cert_chain_pems):
            blob.write_to_path(folder / f"{name}.pem", append=number > 0)
    return Certificates(folder, ours)


@dataclass(frozen=True)
class Served:
    """A server with TLS that waits for its clients."""

    program: Program
    out: RunDir


@pytest.fixture(scope="module")
def mutual(
    tmp_path_factory: pytest.TempPathFactory, shared_programs: Programs, certificates: Certificates
) -> Iterator[Served]:
    out = tmp_path_factory.mktemp("mutual") / "run"
    asked = ["--tls-client-ca", str(certificates.folder / "ca.pem"), *certificates.named("server")]
    program = shared_programs.server(out, *asked, *settings())
    program.address()
    yield Served(program, RunDir(out))
    program.end()


def test_health_and_reflection_are_served(mutual: Served, certificates: Certificates) -> None:
    with RawClient(mutual.program.address(), certificates.credentials("client-0")) as raw:
        health = health_pb2_grpc.HealthStub(raw.channel)
        for name in ("", SERVICE):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest
        stub = reflection_pb2_grpc.ServerReflectionStub(raw.channel)
        questions = [ask(list_services=""), ask(file_containing_symbol=SERVICE)]
        listed, described = stub.ServerReflectionInfo(iter(questions), timeout=TIMEOUT_S)
        names = {service.name for service in listed.list_services_response.service}
        assert names >= {SERVICE, "grpc.health.v1.Health"}
        assert b"JoinRequest" in described.file_descriptor_response.file_descriptor_proto[0]


def _client(programs: Programs, mutual: Served, tmp_path: Path, *words: str) -> Program:
    return programs.client(mutual.program.address(), 0, tmp_path / "state", "--wait-s", "1", *words)


def test_a_stranger_ca_is_not_trusted(
    mutual: Served, certificates: Certificates, tmp_path: Path, programs: Programs
) -> None:
    words = [*certificates.trusting("stranger-ca"), *certificates.named("client-0")]
    ended = _client(programs, mutual, tmp_path, *words)
    said = f"the server's certificate is not of the CA in --tls-ca {certificates.folder / 'stranger-ca.pem'}"
    assert_one_line(ended, UNAVAILABLE, "no fedrpc server answers", said, "gave up after 1 s")
    assert_warned_once(ended, said)


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("nothing", "the server hangs up: it may ask for a client's certificate; give --tls-cert and --tls-key"),
        ("stranger", "the server hangs up: it may refuse this client's certificate; look at --tls-cert"),
        ("plaintext", "the server speaks TLS and this client does not; give --tls-ca"),
    ],
)
def test_who_can_not_show_a_certificate_of_the_ca_stays_out(
    shown: str, said: str, mutual: Served, certificates: Certificates, tmp_path: Path, programs: Programs
) -> None:
    words = {
        "nothing": certificates.trusting(),
        "stranger": certificates.words("stranger"),
        "plaintext": [],
    }[shown]
    ended = _client(programs, mutual, tmp_path, *words)
    assert_one_line(ended, UNAVAILABLE, "no fedrpc server answers", said, "gave up after 1 s")
    assert_warned_once(ended, said)


def test_a_server_without_tls(tmp_path: Path, certificates: Certificates, programs: Programs) -> None:
    server = programs.server(tmp_path / "run", *settings())
    words = ["--wait-s", "1", *certificates.trusting()]
    ended = programs.client(server.address(), 0, tmp_path / "state", *words)
    said = "the server speaks no TLS; leave --tls-ca out, or start the server with --tls-cert and --tls-key"
    assert_one_line(ended, UNAVAILABLE, said)
    assert_warned_once(ended, said)


def test_a_certificate_for_another_name(tmp_path: Path, certificates: Certificates, programs: Programs) -> None:
    server = programs.server(tmp_path / "run", *certificates.named("client-0"), *settings())
    words = ["--wait-s", "1", *certificates.trusting()]
    ended = programs.client(server.address(), 0, tmp_path / "state", *words)
    said = "the server's certificate is not for 127.0.0.1; look at --server"
    assert_one_line(ended, UNAVAILABLE, said)
    assert_warned_once(ended, said)


def test_a_certificate_of_another_client_is_refused(
    mutual: Served, certificates: Certificates, tmp_path: Path, programs: Programs
) -> None:
    ended = _client(programs, mutual, tmp_path, *certificates.words("client-1"))
    assert_one_line(ended, CONFIG, "the certificate is for", "client-1", "not for client-0")


def test_a_token_is_good_only_over_the_certificate_that_it_was_given_over(
    certificates: Certificates, tmp_path: Path, programs: Programs
) -> None:
    """A client that got hold of another's token cannot speak for it; the other still can."""
    asked = ["--tls-client-ca", str(certificates.folder / "ca.pem"), *certificates.named("server")]
    address = programs.server(tmp_path / "run", *asked, *settings()).address()
    owner = Signer.from_pem((certificates.folder / "client-0.key").read_bytes(), "client-0.key")
    with (
        RawClient(address, certificates.credentials("client-0"), owner) as raw,
        RawClient(address, certificates.credentials("client-1")) as thief,
    ):
        joined = raw.join(0)
        code, words = catch_refusal(thief.attach(joined).wait_for_end)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "the token was given over another certificate: expected SHA-256" in words
        stream = raw.attach(joined)
        stream.send(pb.Frame(session=joined.admissions[0].session, heartbeat=pb.Heartbeat()))
        stream.receive_until("heartbeat")


def test_a_client_signs_with_the_key_of_its_certificate(mutual: Served, certificates: Certificates) -> None:
    with RawClient(mutual.program.address(), certificates.credentials("client-0")) as raw:
        code, words = catch_refusal(raw.join, 0)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "client 0 joins with another key than that of its certificate" in words


def test_a_run_over_mutual_tls_comes_to_the_same_model(
    mutual: Served, certificates: Certificates, tmp_path: Path, programs: Programs, finished: RunDir
) -> None:
    """Last in this file: with all its clients the run that the others knocked at goes on to its end."""
    for client in range(NUM_CLIENTS):
        words = certificates.words(f"client-{client}")
        programs.client(mutual.program.address(), client, tmp_path / "state", *words)
    mutual.program.wait_for_success()
    assert mutual.out.model_sha256 == finished.model_sha256
    sizes, plain = mutual.out.summary["bytes"], finished.summary["bytes"]
    assert sizes["method"] == plain["method"], "TLS is below the messages"
    for direction in ("down", "up"):
        assert sizes["total"][direction]["kernel"] > plain["total"][direction]["kernel"]
    keys = [row for row in read_rows(mutual.out.path / "heads.jsonl") if "key" in row]
    assert {row["client"]: row["source"] for row in keys} == {
        client: f"certificate of client-{client}" for client in range(NUM_CLIENTS)
    }


def test_one_certificate_for_all_clients_when_the_server_says_so(
    certificates: Certificates, tmp_path: Path, programs: Programs
) -> None:
    """As on a cluster, where pods are all of one template; a certificate of another name stays out."""
    words = ["--tls-client-ca", str(certificates.folder / "ca.pem"), "--tls-client-name", "pods"]
    server = programs.server(
        tmp_path / "run", *words, *certificates.named("server"), *settings(clients=2, rounds=1, train_size=40)
    )
    address = server.address()
    ended = programs.client(address, 0, tmp_path / "state", "--wait-s", "1", *certificates.words("client-0"))
    assert_one_line(ended, CONFIG, "the certificate is for", "client-0", "not for pods")
    clients = [programs.client(address, i, tmp_path / "state", *certificates.words("pods")) for i in range(2)]
    for program in (server, *clients):
        program.wait_for_success()


@pytest.mark.parametrize(
    ("listen", "words", "said"),
    [
        ("127.0.0.1:0", (), grpc.StatusCode.OK),
        ("127.0.0.1:0", ("--no-reflection",), grpc.StatusCode.UNIMPLEMENTED),
        ("0.0.0.0:0", (), grpc.StatusCode.UNIMPLEMENTED),
        ("0.0.0.0:0", ("--reflection",), grpc.StatusCode.OK),
    ],
)
def test_beyond_loopback_the_services_are_described_only_if_the_server_says_so(
    listen: str, words: tuple[str, ...], said: grpc.StatusCode, tmp_path: Path, programs: Programs
) -> None:
    server = programs.server(tmp_path / "run", "--insecure", *words, *settings(), listen=listen)
    port = server.address().rpartition(":")[2]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([question]), timeout=TIMEOUT_S)
        with contextlib.suppress(grpc.RpcError):
            assert len(list(call)) == 1
        assert call.code() == said


def test_tls_without_client_certificates(certificates: Certificates, tmp_path: Path, programs: Programs) -> None:
    """The server alone shows who it is; an address beyond loopback is then no reason to refuse."""
    out = RunDir(tmp_path / "run")
    server = programs.server(
        out.path, *certificates.named("server"), *settings(clients=1, rounds=1), listen="0.0.0.0:0"
    )
    port = server.address().rpartition(":")[2]
    client = programs.client(f"localhost:{port}", 0, tmp_path / "state", *certificates.trusting())
    server.wait_for_success()
    client.wait_for_success()
    assert out.summary["ledger_check"]["clients"] == 1
