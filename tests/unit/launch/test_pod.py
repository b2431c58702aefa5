from __future__ import annotations

import pytest

from fedrpc.errors import ConfigError
from fedrpc.launch.pod import PodFailed, list_clients_of_pod


@pytest.mark.parametrize(
    ("pod", "clients_per_pod", "clients", "ids"),
    [(0, 20, 50, range(20)), (1, 20, 50, range(20, 40)), (2, 20, 50, range(40, 50)), (3, 1, 4, range(3, 4))],
)
def test_a_pod_has_consecutive_clients(pod: int, clients_per_pod: int, clients: int, ids: range) -> None:
    assert list_clients_of_pod(pod, clients_per_pod, clients) == ids


def test_every_client_is_in_one_pod() -> None:
    pods = [list_clients_of_pod(pod, 7, 50) for pod in range(8)]
    assert [client for pod in pods for client in pod] == list(range(50))


@pytest.mark.parametrize(
    ("pod", "clients", "message"),
    [(3, 50, "pod 3 has no client: 50 clients, 20 in each pod, are pods 0 to 2"), (0, None, "needs --clients")],
)
def test_a_pod_without_clients_is_refused(pod: int, clients: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list_clients_of_pod(pod, 20, clients)


@pytest.mark.parametrize(("code", "of_pod"), [(78, 78), (2, 78), (75, 75), (137, 137), (1, 1)])
def test_a_pod_ends_as_its_clients_did_unless_no_restart_helps(code: int, of_pod: int) -> None:
    failed = PodFailed(code)
    assert failed.exit_code == of_pod
    assert f"code {code}" in str(failed)
