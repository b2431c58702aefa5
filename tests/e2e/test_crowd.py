"""More connections than the server has files for, and peers that say nothing or next to nothing: the run goes on."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.crowd import PREFACE, Crowd
from tests.e2e.programs import NUM_CLIENTS, Gates, Program, Programs, settings, wait_for
from tests.e2e.rawclient import SERVICE, RawClient
from tests.e2e.rundir import RunDir

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the table of connections is Linux's"),
]

NUM_FILES = 256
GONE_S = 30.0
PATIENCE_S = 60.0  # on a busy machine


@pytest.fixture
def crowd() -> Iterator[Callable[[str], Crowd]]:
    crowds: list[Crowd] = []

    def gather(address: str) -> Crowd:
        crowds.append(Crowd(address))
        return crowds[-1]

    yield gather
    for each in crowds:
        each.close()


def start_server(programs: Programs, out: Path, gates: Gates, **changes: object) -> Program:
    """Starts a server that may have few files open; it stops at a gate before it listens."""
    gates.shut("load")
    server = programs.server(out, *settings(method="gated", params__gates=str(gates.folder), **changes))
    resource.prlimit(gates.wait("load"), resource.RLIMIT_NOFILE, (NUM_FILES, NUM_FILES))
    gates.open("load")
    server.address()
    return server


def test_more_connections_than_the_server_has_files(
    tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir, crowd: Callable[[str], Crowd]
) -> None:
    out = RunDir(tmp_path / "run")
    server = start_server(programs, out.path, gates)
    gates.shut("client-0-1")
    for client in range(NUM_CLIENTS):
        programs.client(server.address(), client, tmp_path / "state").wait_for_join()
    gates.wait("client-0-1")
    guests = crowd(server.address())
    guests.add(400)
    gates.open_all()  # the rest of the run, with files to write, while they are there
    server.wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert "Too many open files" not in server.err


def test_who_never_joins_is_gone_in_half_a_minute(
    tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir, crowd: Callable[[str], Crowd]
) -> None:
    """Silent ones, half of a greeting, a greeting and no more, a byte a second of it, and calls that never end."""
    out = RunDir(tmp_path / "run")
    server = start_server(programs, out.path, gates)
    gates.shut("client-0-1")
    clients = programs.clients(server.address(), NUM_CLIENTS, tmp_path / "state")
    gates.wait("client-0-1")
    silent, dripping = crowd(server.address()), crowd(server.address())
    for said in (b"", PREFACE[:10], PREFACE):
        silent.add(8, said)
    dripping.add(8, PREFACE[:4])
    dripping.add(8, PREFACE)
    with grpc.insecure_channel(server.address()) as channel, RawClient(server.address()) as raw:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
        unattached = raw.connect()
        began = time.monotonic()
        while silent.count_open() + dripping.count_open():
            assert time.monotonic() - began < PATIENCE_S
            dripping.drip()
            time.sleep(1.0)
        print(f"\nall strangers were gone after {time.monotonic() - began:.1f} s; the goal is {GONE_S:g}")
        with pytest.raises(grpc.RpcError, match="no Attach within 10 s"):
            unattached.wait_for_end()
        with pytest.raises(grpc.RpcError):
            list(watching)
    assert [client.code for client in clients] == [None] * NUM_CLIENTS
    assert [len(client.read_log("joined")) for client in clients] == [1] * NUM_CLIENTS, "theirs are left alone"
    gates.open_all()
    server.wait_for_success()
    assert out.model_sha256 == finished.model_sha256


def test_calls_that_come_too_often_are_refused_and_others_are_not(
    tmp_path: Path, programs: Programs, gates: Gates, finished: RunDir
) -> None:
    out = RunDir(tmp_path / "run")
    server = start_server(programs, out.path, gates)
    programs.client(server.address(), 0, tmp_path / "state").wait_for_join()
    refused = 0
    with RawClient(server.address()) as raw:
        for _ in range(300):
            try:
                raw.join(0, "another instance")
            except grpc.RpcError as error:
                refused += "too many calls over one connection" in (error.details() or "")
    assert refused > 100
    [line] = server.read_log("calls_refused")
    assert "expected at most 5 a second" in line["error"]
    assert len(server.read_log("call_refused")) < 200
    for client in (1, 2):
        programs.client(server.address(), client, tmp_path / "state")
    server.wait_for_success()
    assert out.model_sha256 == finished.model_sha256


def test_a_client_that_vanishes_makes_room(tmp_path: Path, programs: Programs, gates: Gates) -> None:
    """Its machine is gone, so nobody closes its connection: the server does, after three heartbeats."""
    out = RunDir(tmp_path / "run")
    server = start_server(programs, out.path, gates, limits__heartbeat_s=1.0, limits__absent_s=1.0)
    gates.shut("client-0-0")
    for client in (0, 1):
        programs.client(server.address(), client, tmp_path / "state")
    with RawClient(server.address()) as raw:
        stream = raw.attach(raw.join(2))
        stream.receive_until("envelope")  # and no heartbeat from now on
        with pytest.raises(grpc.RpcError, match="no heartbeat for 3 s"):
            stream.wait_for_end()
        wait_for("its connection is closed", lambda: server.read_log("connections_ended"))
    gates.open_all()
    server.wait_for_success()
