"""Connections that no client uses, and calls that come too often."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from fedrpc.server import sockets
from fedrpc.server.allowance import Allowance
from fedrpc.server.sockets import Peer, Sockets, parse_peer, reserve_files
from fedrpc.wire.tcpinfo import Connection, Meter


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:10.0.0.1:5000", ("10.0.0.1", 5000)),
        ("ipv6:%5B2001:db8::1%5D:5000", ("2001:db8::1", 5000)),
        ("ipv6:[::ffff:10.0.0.1]:5000", ("10.0.0.1", 5000)),
        ("unix:/tmp/socket", ("", 0)),
        ("unix:", ("", 0)),
    ],
)
def test_a_peers_name_is_an_address_and_a_port(text, peer):
    assert parse_peer(text) == peer


class Door:
    """Sockets over a table of connections that the test makes up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_connections: int = 100) -> None:
        self.meter = Meter(0, local=True)
        self.sockets = Sockets(self.meter, max_connections)
        self.shut: set[int] = set()
        monkeypatch.setattr(sockets, "shut_connections", self.shut.update)

    def add(self, port: int, sent: int = 0, received: int = 0) -> Peer:
        """A peer connects; its inode is its port."""
        self.meter.open[port] = Connection(port, 1, "10.0.0.1", port, sent, received)
        return "10.0.0.1", port


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Door:
    return Door(monkeypatch)


def test_a_connection_over_which_nobody_joins_is_ended(door):
    joined, _ = door.add(5), door.add(6)
    for now in range(21):
        door.sockets.check(now, {joined})
        assert door.shut == set()
    door.sockets.check(20.2, {joined})
    assert door.shut == {6}


def test_a_connection_whose_client_goes_has_as_long_again(door):
    peer = door.add(5)
    door.sockets.check(0, ())
    door.sockets.check(19, {peer})
    door.sockets.check(21, ())
    door.sockets.check(41, ())
    assert door.shut == set()
    door.sockets.check(42, ())
    assert door.shut == {5}


def test_strangers_go_sooner_when_it_is_crowded(door):
    clients = {door.add(port) for port in range(1, 41)}
    for port in range(100, 111):
        door.add(port)
    door.sockets.check(0, clients)
    door.sockets.check(3.1, clients)
    assert door.shut == set(range(100, 111))


def test_a_connection_that_is_given_up_is_ended_at_once(door):
    peer, other = door.add(5), door.add(6)
    door.sockets.give_up(peer)
    door.sockets.check(0, {peer, other})
    assert door.shut == {5}
    door.shut.clear()
    door.sockets.check(1, {peer, other})
    assert door.shut == set(), "a new connection may have its port"


def test_what_a_connection_has_moved_is_known_after_a_check(door):
    peer = door.add(5, sent=7, received=9)
    assert door.sockets.find(peer) is None
    door.sockets.check(0, ())
    found = door.sockets.find(peer)
    assert found
    assert (found.sent, found.received) == (7, 9)


@pytest.fixture
def files() -> Iterator[tuple[int, int]]:
    """The limits of open files, which are as before afterwards."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limits
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_there_is_room_for_all_clients_twice(files):
    soft = min(1000, files[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, files[1]))
    assert reserve_files(200) == 500
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(soft + 500, files[1])


@pytest.mark.parametrize(("limit", "connections"), [(256, 128), (100, 50), (1024, 896)])
def test_some_files_are_left_for_the_server_when_the_system_permits_no_more(monkeypatch, limit, connections):
    monkeypatch.setattr(sockets, "allow_open_files", lambda _: None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert reserve_files(1000) == connections


def test_an_allowance_is_a_burst_and_then_a_rate_for_each_key():
    allowance = Allowance(3, per_s=2)
    assert [allowance.take("a", 0) for _ in range(4)] == [True, True, True, False]
    assert allowance.take("b", 0)
    assert [allowance.take("a", 0.5), allowance.take("a", 0.5)] == [True, False]
    assert [allowance.take("a", 100) for _ in range(4)] == [True, True, True, False]


def test_an_allowance_forgets_whom_it_saw_longest_ago():
    allowance = Allowance(1, per_s=0)
    assert [allowance.take(key, 0) for key in range(10_001)] == [True] * 10_001
    assert allowance.take(10_000, 0) is False
    assert allowance.take(0, 0)
