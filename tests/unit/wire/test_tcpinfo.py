"""The kernel's byte counters, held against bytes that were counted by hand on a loopback connection."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from collections.abc import Iterator

import pytest
import structlog

from fedrpc.wire.tcpinfo import Meter, list_connections, shut_connections

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP_INFO as read here is Linux's")


@contextlib.contextmanager
def pair(listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of one loopback connection."""
    with socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            yield client, server


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def send(source: socket.socket, target: socket.socket, size: int) -> None:
    left, piece = size, bytes(4096)
    while left:
        sent = source.send(piece[: min(left, len(piece))])
        while sent:
            got = len(target.recv(sent))
            sent, left = sent - got, left - got


def test_counters_are_the_payload_to_the_byte(listener):
    port = listener.getsockname()[1]
    server_meter, client_meter = Meter(port, local=True), Meter(port, local=False)
    with pair(listener) as (client, server):
        assert server_meter.read() == client_meter.read() == (0, 0)
        send(client, server, 100_003)
        send(server, client, 7)
        assert client_meter.read() == (100_003, 7)
        assert server_meter.read() == (7, 100_003)
        [found] = [c for c in list_connections() if c.local_port == port]
        assert (found.peer_port, found.sent, found.received) == (client.getsockname()[1], 7, 100_003)


def test_connections_add_up_and_closed_ones_still_count(listener):
    meter = Meter(listener.getsockname()[1], local=True)
    with pair(listener) as (one, one_server):
        send(one, one_server, 10)
        with pair(listener) as (two, two_server):
            send(two, two_server, 20)
            assert meter.read() == (0, 30)
            assert meter.note == ""
        assert meter.read() == (0, 30)
        assert meter.note.startswith("1 connections closed")
        send(one_server, one, 5)
        assert meter.read() == (5, 30)


def test_other_ports_are_not_counted(listener):
    with pair(listener) as (client, server), socket.create_server(("127.0.0.1", 0)) as other:
        send(client, server, 10)
        assert Meter(other.getsockname()[1], local=True).read() == (0, 0)


def test_no_file_is_left_open(listener):
    with pair(listener):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            assert list(list_connections())
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_reading_does_not_hold_the_connection_open(listener):
    with pair(listener) as (client, server):
        assert list(list_connections())
        client.close()
        server.settimeout(10)
        assert server.recv(1) == b""


def test_closed_connections_are_not_remembered_one_by_one(listener):
    meter = Meter(listener.getsockname()[1], local=True)
    for _ in range(5):
        with pair(listener) as (client, server):
            send(client, server, 10)
            meter.read()
    assert meter.read() == (0, 50)
    assert meter.open == {}
    assert meter.note.startswith("5 connections closed")


def test_a_connection_can_be_shut_by_its_inode_and_the_others_stay(listener):
    with pair(listener) as (one, one_server), pair(listener) as (two, two_server):
        [found] = [c for c in list_connections() if c.peer_port == one.getsockname()[1]]
        assert found.peer_host == "127.0.0.1"
        shut_connections({found.inode})
        for end in (one, one_server):
            end.settimeout(10)
            assert end.recv(1) == b""
        send(two, two_server, 10)
        shut_connections({found.inode})


def test_without_a_file_left_the_counters_stay_as_they_were(listener):
    meter = Meter(listener.getsockname()[1], local=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pair(listener) as (client, server):
        send(client, server, 10)
        assert meter.read() == (0, 10)
        send(client, server, 10)
        # No file can be opened any more: every number below the limit is taken.
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(_find_free_number(), soft), hard))
        try:
            with structlog.testing.capture_logs() as lines:
                assert [meter.read(), meter.read()] == [(0, 10)] * 2
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [line["event"] for line in lines] == ["cannot_read_counters"], "it is said once"
        assert meter.read() == (0, 20)
        assert meter.note == ""


def _find_free_number() -> int:
    fd = os.dup(0)
    os.close(fd)
    return fd
