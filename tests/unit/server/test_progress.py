"""progress.json: there while a run is under way, gone after it, and never in its way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedrpc.errors import DiskFull, QuorumError
from fedrpc.metrics.progress import PROGRESS_FILE, Snapshot, read_snapshot
from fedrpc.server import progress
from fedrpc.server.progress import ProgressFile
from fedrpc.wire.ledger import Sums
from tests.fakes import asynchronous
from tests.unit.server.post import Post


def open_file(folder: Path, post: Post) -> ProgressFile:
    coordinator: Any = SimpleNamespace(place=(3, "fit", "queue"))
    book: Any = SimpleNamespace(sums={("down", "weights"): Sums(90, 100, 1)}, kernel=[110, 5])
    return ProgressFile(folder, "run-1", coordinator, post.roster, post.mailbox, book)


async def wait_for_file(folder: Path) -> Snapshot:
    for _ in range(500):
        if found := read_snapshot(folder):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("progress.json was not written")


@asynchronous
async def test_it_tells_of_the_moment_and_is_gone_after_the_end(tmp_path: Path) -> None:
    post = Post(3)
    post.connect(0, 1)
    post.mailbox.post(post.tasks())
    async with open_file(tmp_path, post):
        found = await wait_for_file(tmp_path)
    assert (found.round, found.phase, found.part) == (3, "fit", "queue")
    assert (found.num_clients, found.num_connected) == (3, 2)
    assert found.message_bytes == {"down": {"weights": 100}, "up": {}}
    assert found.counts == {"waiting": 2, "gone": 1}
    assert not (tmp_path / PROGRESS_FILE).exists()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (QuorumError("1 of 3 clients joined"), "1 of 3 clients joined"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (asyncio.CancelledError(), "stopped by a signal"),
    ],
)
@asynchronous
async def test_it_keeps_why_the_server_ended_before_the_run(tmp_path: Path, error: BaseException, told: str) -> None:
    with pytest.raises(type(error)):
        async with open_file(tmp_path, Post(1)):
            raise error
    found = read_snapshot(tmp_path)
    assert found is not None
    assert found.ended == told


@asynchronous
async def test_a_full_disk_does_not_reach_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def fail(*_: object) -> None:
        tried.append(1)
        raise DiskFull("no room")

    monkeypatch.setattr(progress, "write_snapshot", fail)
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    async with open_file(tmp_path, Post(1)):
        while len(tried) < 3:
            await asyncio.sleep(0.01)
    with pytest.raises(KeyError):
        async with open_file(tmp_path, Post(1)):
            raise KeyError


@asynchronous
async def test_what_takes_long_is_done_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    real = asyncio.sleep

    async def note(seconds: float) -> None:
        slept.append(seconds)
        await real(0)

    monkeypatch.setattr(progress, "_write", lambda *_: 0.05)  # CPU seconds
    monkeypatch.setattr(progress.asyncio, "sleep", note)
    async with open_file(tmp_path, Post(1)):
        while len(slept) < 2:
            await real(0.01)
    assert min(slept) >= 0.05 / progress._SHARE
