"""Time limits do not count the time in which their own process stood still."""

from __future__ import annotations

import pytest

from fedrpc import clock
from fedrpc.clock import PauseDetector


class Time:
    """Stands in for the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(clock, "time", found)
    monkeypatch.setattr(clock, "_left_out", 0.0)
    return found


def test_a_pause_is_left_out_and_a_delay_is_not(time: Time) -> None:
    pauses, begun_at = PauseDetector(0.2), clock.monotonic()
    for passed_s, pause_s in ((0.2, 0.0), (2.0, 0.0), (60.2, 60.0), (0.2, 0.0), (10.2, 10.0)):
        time.now += passed_s
        assert pauses.tick() == pytest.approx(pause_s)
    assert clock.monotonic() - begun_at == pytest.approx(0.2 + 2.0 + 0.2 + 0.2 + 0.2)
