"""A clock that only tests move."""

from __future__ import annotations

import time
from types import ModuleType

import pytest

from fedrpc.server import connection, gatekeeper, mailbox, roster


class Clock(ModuleType):
    """Stands in for the module `time` wherever the server keeps time limits."""

    def __init__(self) -> None:
        super().__init__("time")
        self._now = float(int(time.monotonic()))  # a whole second: from other starts, 5 s are at times 5.000000000002

    @classmethod
    def installed(cls, monkeypatch: pytest.MonkeyPatch) -> Clock:
        """A clock that the server's time limits go by."""
        clock = cls()
        for module in (connection, gatekeeper, mailbox, roster):
            monkeypatch.setattr(module, "time", clock)
        return clock

    def monotonic(self) -> float:
        """Now."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        self._now += seconds
