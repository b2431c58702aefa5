"""Which clients a process runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.errors import ConfigError
from fedrpc.launch.division import check_memory, divide, parse_client_ids

GIB = 1 << 30


@given(st.integers(1, 300), st.data())
def test_hosts_share_all_clients_evenly(num_clients, data):
    num_hosts = data.draw(st.integers(1, num_clients))
    parts = divide(num_clients, num_hosts)
    assert [client for part in parts for client in part.clients] == list(range(num_clients))
    sizes = [len(part.clients) for part in parts]
    assert len(sizes) == num_hosts
    assert max(sizes) - min(sizes) <= 1


def test_without_hosts_each_client_has_a_process_and_a_log_in_its_folder():
    parts = divide(3, None)
    assert [list(part.clients) for part in parts] == [[0], [1], [2]]
    assert parts[2].name == "client 2"
    assert parts[2].log_file(Path("state")) == Path("state/2/client.log")


def test_a_host_is_named_with_its_clients():
    part = divide(10, 2)[1]
    assert part.name == "host 1 (clients 5 to 9)"
    assert part.log_file(Path("state")) == Path("state/host-1.log")


def test_more_hosts_than_clients_are_refused():
    with pytest.raises(ConfigError, match="--hosts 4 is more than the 3 clients"):
        divide(3, 4)


def test_processes_that_do_not_fit_are_refused_with_the_number_of_hosts_that_do(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    check_memory(100, available=4 * GIB)
    with pytest.raises(ConfigError, match=r"1000 client processes need about 20\.5 GiB .* 4\.0 GiB are .*--hosts 8 "):
        check_memory(1000, available=4 * GIB)


@pytest.mark.parametrize(
    ("text", "ids"), [("0-3", [0, 1, 2, 3]), ("7", [7]), ("3, 7,10-12", [3, 7, 10, 11, 12]), ("5-5", [5])]
)
def test_client_ids_are_ids_and_ranges(text, ids):
    assert parse_client_ids(text) == ids


@pytest.mark.parametrize("text", ["", "a", "3-", "-3", "5-2", "1,,2", "1.5"])
def test_other_client_ids_are_refused(text):
    with pytest.raises(ConfigError, match="takes ids and ranges"):
        parse_client_ids(text)


def test_a_client_cannot_be_named_twice():
    with pytest.raises(ConfigError, match="client 4 twice"):
        parse_client_ids("0-9,4")
