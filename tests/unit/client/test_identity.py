"""Who a client is: the same one after a restart, and only once at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fedrpc.client.identity import Identity, default_state_dir
from fedrpc.errors import ConfigError, Damaged, Taken


def test_a_client_is_the_same_after_a_restart(tmp_path):
    first = Identity(tmp_path, 3)
    instance = first.instance
    first.release()
    again = Identity(tmp_path, 3)
    assert again.instance == instance
    assert len(instance) == 32
    again.release()


def test_only_its_user_may_read_what_a_client_is(tmp_path):
    before = os.umask(0o022)
    try:
        (tmp_path / "3").mkdir()  # made by whoever opened its log
        Identity(tmp_path, 3).release()
    finally:
        os.umask(before)
    folder = tmp_path / "3"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, folder / "instance", folder / "signing.key")}
    assert modes == {"3": 0o700, "instance": 0o600, "signing.key": 0o600}


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"a b", b"a\x00b"])
def test_a_damaged_instance_is_one_line(tmp_path, data):
    Identity(tmp_path, 3).release()
    (tmp_path / "3" / "instance").write_bytes(data)
    with pytest.raises(Damaged, match=r"instance is damaged: .*; remove it"):
        Identity(tmp_path, 3)


def test_every_client_and_every_folder_has_its_own_instance(tmp_path):
    found = [Identity(tmp_path / folder, client) for folder in ("a", "b") for client in (0, 1)]
    assert len({identity.instance for identity in found}) == 4
    assert len({identity.folder for identity in found}) == 4
    for identity in found:
        identity.release()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identities that wait for a lock a short time only."""
    monkeypatch.setattr("fedrpc.client.identity._PATIENCE_S", 0.2)


def test_a_client_runs_only_once_at_a_time(tmp_path, hasty):
    first = Identity(tmp_path, 3)
    for _ in range(2):
        with pytest.raises(Taken, match="client 3 is already running"):
            Identity(tmp_path, 3)
    first.release()
    Identity(tmp_path, 3).release()


def test_the_lock_goes_with_a_process_that_is_killed(tmp_path, hasty):
    code = f"""
import fcntl, os, pathlib, sys
file = pathlib.Path({str(tmp_path)!r}, "3", "lock").open("w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
    (tmp_path / "3").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(Taken):
            Identity(tmp_path, 3)
        process.kill()
    Identity(tmp_path, 3).release()


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*choose another --state-dir"):
        Identity(tmp_path / "file", 0)


def test_state_goes_where_the_system_keeps_state(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "fedrpc"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    assert default_state_dir() == Path(tmp_path, ".local", "state", "fedrpc")


def test_a_lock_that_is_let_go_in_time_is_taken(tmp_path):
    """As that of a process that was killed, and is still about to end."""
    first = Identity(tmp_path, 3)
    timer = threading.Timer(0.1, first.release)
    timer.start()
    try:
        Identity(tmp_path, 3).release()
    finally:
        timer.join()
