"""Who a client is: what only its user may read, and who may come under its id."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.programs import Programs, settings

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
