"""Progress in a notebook changes one output in place, and does not flood it."""

from __future__ import annotations

import time
from typing import Any

import IPython.display
import pytest

from fedrpc.api.progress import NotebookWatcher


class Handle:
    """Stands in for an output of a notebook."""

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        assert raw
        self.drawn.append(bundle["text/plain"])


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    made = Handle()

    def display(bundle: dict[str, str], **values: Any) -> Handle:
        assert values == {"raw": True, "display_id": True}
        return made

    monkeypatch.setattr(IPython.display, "display", display)
    return made


def test_ten_thousand_clients_that_join_at_once_do_not_flood_the_output(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watcher = NotebookWatcher(3)
    for client in range(10_000):
        now[0] += 0.0001
        watcher.event("joined", {"joined": client + 1, "of": 10_000})
    assert 5 < len(handle.drawn) < 12
    watcher.close()
    assert handle.drawn[-1] == "0/3 10,000 of 10,000 clients have joined"


def test_the_last_round_is_drawn(handle: Handle) -> None:
    watcher = NotebookWatcher(2)
    for index in range(2):
        watcher.event("round_finished", {"round": index, "accuracy": 50.0, "bytes_down": 10, "bytes_up": 2000})
    watcher.close()
    assert handle.drawn[-1:] == ["2/2 50.00 %, ↓ 10 B ↑ 2.00 kB"]
