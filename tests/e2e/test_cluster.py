"""What the manifests of deploy/ count on, tried with real processes: probes, signals, exit codes, indices, volumes."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedrpc.config import parse_set
from fedrpc.deploy.render import configuration, manifests
from fedrpc.deploy.shape import Deployment
from fedrpc.server.app import SERVICE
from tests.e2e import containers
from tests.e2e.programs import NUM_CLIENTS, Gates, Program, Programs, find_free_port, settings, wait_for
from tests.e2e.rundir import RunDir
from tests.e2e.test_faults import gone

pytestmark = pytest.mark.timeout(240)

INDEX = "JOB_COMPLETION_INDEX"


def tiny() -> dict[str, Any]:
    """The tiny configuration as nested values."""
    return parse_set(settings()[1::2])


# Probes


def asked(address: str, service: str) -> str:
    """What a probe hears."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        except grpc.RpcError as error:
            return error.code().name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def test_probes_before_and_after_readiness_and_at_the_end(tmp_path: Path, programs: Programs, gates: Gates) -> None:
    """While data is loaded the process is alive and the service is not ready."""
    gates.shut("load")
    words = settings(method="gated", params__gates=str(gates.folder))
    server = programs.server(tmp_path / "run", "--health-listen", "127.0.0.1:0", *words)
    gates.wait("load")
    [row] = server.read_log("health")
    assert (asked(row["address"], ""), asked(row["address"], SERVICE)) == ("SERVING", "NOT_SERVING")
    assert not server.read_log("listening")
    gates.open("load")
    server.address()
    wait_for("it is ready", lambda: asked(row["address"], SERVICE) == "SERVING")
    assert asked(row["address"], "") == "SERVING"
    server.send(signal.SIGTERM)
    assert server.wait(30) == 143
    assert asked(row["address"], "") == "UNAVAILABLE"
    assert "Traceback" not in server.err


# After the end


def figure(address: str, name: str) -> float:
    """One of the server's figures, as Prometheus reads it."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    [value] = [line.rpartition(" ")[2] for line in lines if line.startswith(name + " ")]
    return float(value)


def test_a_server_stays_after_the_end_and_tells_late_clients(tmp_path: Path, programs: Programs) -> None:
    """Its figures are those of the run directory, and a server that is started anew, as after an eviction, knows."""
    pytest.importorskip("prometheus_client")
    out, metrics = RunDir(tmp_path / "run"), f"127.0.0.1:{find_free_port()}"
    words = ["--linger", "--allow-new-keys", "--metrics-listen", metrics, *settings(clients=1, rounds=2)]
    server = programs.server(out.path, *words)
    programs.client(server.address(), 0, tmp_path / "state").wait_for_success()
    wait_for("the server lingers", lambda: server.read_log("lingering"))
    assert server.code is None
    assert (out.path / "report.html").exists(), "the run directory is whole, though the server has not ended"
    assert figure(metrics, "fedrpc_rounds_finished") == 2
    for direction in ("down", "up"):
        wanted = out.summary["bytes"]["method"][direction]["by_kind"]["weights"]["message"]
        assert figure(metrics, f'fedrpc_message_bytes_total{{direction="{direction}",kind="weights"}}') == wanted
    assert figure(metrics, "fedrpc_accuracy_percent") == pytest.approx(out.summary["accuracy"]["global"])
    for life in range(2):
        late = programs.client(server.address(), 0, tmp_path / f"other-{life}").wait_for_success()
        assert [row["reason"] for row in late.read_log("finished")] == ["the run is complete"]
        server.send(signal.SIGTERM)
        assert server.wait(30) == 143
        if life == 0:
            server = programs.server(out.path, *words)
            wait_for("it knows", lambda now=server: now.read_log("already_finished") and now.read_log("lingering"))
            assert figure(metrics, "fedrpc_rounds_finished") == 2


# Pods


def pod(programs: Programs, index: int, server: str, state: Path, *words: str) -> Program:
    """A client pod as the Job starts it: its index is in the environment alone."""
    named = ("--server", server, "--state-dir", state, *words)
    return programs.start("fedrpc-client", *named, env={INDEX: str(index)})


def test_pods_of_several_clients_come_to_the_same_model(tmp_path: Path, programs: Programs, finished: RunDir) -> None:
    """A pod's process that is killed is started anew in it, and the last pod has fewer clients."""
    out = RunDir(tmp_path / "run")
    server = programs.server(out.path, *settings())
    words = ("--clients-per-pod", "2", "--clients", str(NUM_CLIENTS))
    first = pod(programs, 0, server.address(), tmp_path / "state-0", *words)
    wait_for("both clients join", lambda: [row["clients"] for row in first.read_log("joined")] == ["0-1"])
    [child] = psutil.Process(first.pid).children()
    child.kill()
    wait_for("the pod sees it", lambda: first.read_log("client_restarted"))
    wait_for("both join again", lambda: [row["clients"] for row in first.read_log("joined")] == ["0-1", "0-1"])
    last = pod(programs, 1, server.address(), tmp_path / "state-1", *words)
    for program in (server, first, last):
        program.wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert [row["client"] for row in last.read_log("joined")] == [2]
    assert [row["code"] for row in first.read_log("client_restarted")] == [137]


def test_a_pod_ends_with_all_its_clients_at_a_signal(tmp_path: Path, programs: Programs) -> None:
    words = ("--clients-per-pod", "3", "--clients", "3")
    started = pod(programs, 0, f"127.0.0.1:{find_free_port()}", tmp_path / "state", *words)
    wait_for("they look for their server", lambda: started.read_log("waiting_for_server"))
    everybody = started.descendants()
    assert len(everybody) == 2, "the clients are one process, and the pod has its parent"
    started.send(signal.SIGTERM)
    assert started.wait(30) == 143
    wait_for("nobody is left", lambda: gone(everybody))
    assert "Traceback" not in started.err


@pytest.mark.parametrize(
    ("index", "words", "code"),
    [
        ("0", ["--wait-s", "0.2"], 75),  # nobody is there: tried again
        ("0", ["--clients-per-pod", "2", "--wait-s", "0.2"], 78),  # how many there are is not said
        ("2", ["--clients-per-pod", "2", "--clients", "4"], 78),  # a pod too many
        ("x", [], 2),
        ("0", ["--client", "1"], 2),
    ],
)
def test_exit_codes_of_a_pod(index: str, words: list[str], code: int, tmp_path: Path, programs: Programs) -> None:
    named = ("--server", f"127.0.0.1:{find_free_port()}", "--state-dir", tmp_path, *words)
    assert programs.start("fedrpc-client", *named, env={INDEX: index}).wait() == code


def test_a_signal_is_heeded_from_early_on(tmp_path: Path, scripts: Programs) -> None:
    """The first process of a container has no default: before torch is loaded there must be a handler."""
    client = scripts.client(f"127.0.0.1:{find_free_port()}", 0, tmp_path / "state")

    def caught() -> bool:
        [line] = [line for line in Path(f"/proc/{client.pid}/status").read_text().splitlines() if "SigCgt" in line]
        return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    wait_for("there is a handler", caught)
    assert "libtorch" not in Path(f"/proc/{client.pid}/maps").read_text()
    client.send(signal.SIGTERM)
    assert client.wait(30) == 143
    assert client.err == ""


# The containers of the manifests, word for word


@pytest.fixture
def network(tmp_path: Path) -> Iterator[containers.Network]:
    if why := containers.why_not():
        pytest.skip(why)
    found = containers.Network(tmp_path / "containers")
    yield found
    found.end()


def test_manifests_run_on_a_read_only_root_as_any_user(network: containers.Network, finished: RunDir) -> None:
    """Server and clients come to the same model and write to their own volumes alone; health is as the probes ask."""
    run = Deployment(configuration(tiny()), "fedrpc:any", clients_per_pod=NUM_CLIENTS)
    objects = {each["kind"]: each for each in manifests(run)}
    parts = {
        name: objects[kind]["spec"]["template"]["spec"]["containers"][0]
        for name, kind in (("server", "StatefulSet"), ("client", "Job"))
    }
    files = {"/config/run.toml": objects["ConfigMap"]["data"]["run.toml"]}
    server = network.start("server", parts["server"], 1_000_650_000, files)
    client = network.start("client", parts["client"], 10001, {}, JOB_COMPLETION_INDEX="0")
    client.wait_for_success(150)
    wait_for("the server lingers", lambda: server.read_log("lingering"))
    [row] = server.read_log("health")
    assert row["address"].endswith(f":{parts['server']['readinessProbe']['grpc']['port']}")
    server.send(signal.SIGTERM)
    assert server.wait(60) == 143
    assert "Traceback" not in server.err
    [out] = (server.volumes / "runs").iterdir()
    assert RunDir(out).model_sha256 == finished.model_sha256
    assert run.out == f"/runs/{out.name}"
    assert sorted(path.name for path in (client.volumes / "state").iterdir()) == [str(c) for c in range(NUM_CLIENTS)]


def test_a_write_elsewhere_would_be_noticed(network: containers.Network) -> None:
    """The same root, tried: only what is declared writable is."""
    script = "for path in / /usr /etc /runs /config /tmp; do touch $path/x 2>/dev/null && echo $path; done; id -u"
    tried = {
        "name": "tried",
        "command": ["sh", "-c"],
        "args": [script],
        "env": [],
        "volumeMounts": [
            {"name": "runs", "mountPath": "/runs"},
            {"name": "config", "mountPath": "/config", "readOnly": True},
        ],
    }
    ended = network.start("tried", tried, 4321, {}).wait_for_success()
    assert ended.out.split() == ["/runs", "4321"]
