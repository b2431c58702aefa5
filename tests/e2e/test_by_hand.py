"""Servers and clients that a person starts one by one, in any order; and the kernel's bytes against a proxy's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from fedrpc.config import build, read_toml
from tests.e2e.programs import NUM_CLIENTS, Program, Programs, find_free_port, wait_for
from tests.e2e.proxy import Proxy
from tests.e2e.rundir import RunDir

pytestmark = pytest.mark.timeout(240)


@dataclass
class ByHand:
    """What came of one run by hand, all of whose clients went through one proxy."""

    out: RunDir
    proxy: Proxy
    server: Program
    clients: list[Program]


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory, shared_scripts: Programs, finished: RunDir) -> Iterator[ByHand]:
    """Two clients before the server, one after it; the server is told what to do by the other run's config.toml."""
    folder = tmp_path_factory.mktemp("by_hand")
    listen = f"127.0.0.1:{find_free_port()}"
    proxy = Proxy(listen)
    early = [
        shared_scripts.client(proxy.address, client, folder / "state") for client in reversed(range(1, NUM_CLIENTS))
    ]
    for client in early:
        wait_for("a client looks for its server", lambda c=client: c.read_log("waiting_for_server"))
    server = shared_scripts.server(folder / "run", "--config", finished.path / "config.toml", listen=listen)
    late = shared_scripts.client(server.address() and proxy.address, 0, folder / "state")
    for program in (server, late, *early):
        program.wait_for_success()
    yield ByHand(RunDir(folder / "run"), proxy, server, [late, *early])
    proxy.close()


def test_the_model_is_that_of_a_local_run(by_hand: ByHand, finished: RunDir) -> None:
    assert by_hand.out.model_sha256 == finished.model_sha256
    assert build(read_toml(by_hand.out.path / "config.toml")) == build(read_toml(finished.path / "config.toml"))


def test_the_server_prints_the_table_and_clients_say_how_it_ended(by_hand: ByHand) -> None:
    assert by_hand.out.model_sha256[:16] in by_hand.server.out
    for client in by_hand.clients:
        assert [row["reason"] for row in client.read_log("finished")] == ["the run is complete"]


def test_both_ledgers_agree(by_hand: ByHand, finished: RunDir) -> None:
    check = by_hand.out.summary["ledger_check"]
    assert (check["clients"], check["missing"]) == (NUM_CLIENTS, 0)
    assert check["compared"] > 0
    assert check["differing"] == check["only_server"] == check["only_client"] == 0
    assert by_hand.out.summary["bytes"]["method"] == finished.summary["bytes"]["method"]


def test_kernel_bytes_are_what_the_proxy_passed_on(by_hand: ByHand) -> None:
    """To the byte, up to the snapshot; the farewell, which comes after it, is told apart by its HTTP/2 frames."""
    assert len(by_hand.proxy.connections) == NUM_CLIENTS, "each client has one connection"
    before = [connection.farewell() for connection in by_hand.proxy.connections]
    total = by_hand.out.summary["bytes"]["total"]
    assert total["down"]["kernel"] == sum(down for down, _ in before)
    assert total["up"]["kernel"] == sum(up for _, up in before)


def test_what_follows_the_snapshot_is_the_farewell_alone(by_hand: ByHand) -> None:
    for connection in by_hand.proxy.connections:
        down, up = connection.farewell()
        assert 0 < len(connection.down) - down < 300
        assert len(connection.up) - up < 300
