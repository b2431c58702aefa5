"""A clock that tests of the server move by hand."""

from __future__ import annotations

import pytest

from tests.unit.server.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock.installed(monkeypatch)
