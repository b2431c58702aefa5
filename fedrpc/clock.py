"""A clock for time limits that leaves out the time in which this process stood still: nobody else is to blame for that.

A process that is stopped (SIGSTOP, a frozen container, a machine that swaps) finds all time limits passed when it goes
on, although nobody could reach it.
"""

from __future__ import annotations

import time

_LATE_S = 3.0  # a tick that comes later than this by so much was not only delayed by work
_left_out = 0.0


def monotonic() -> float:
    """Now, in seconds, without the pauses that were noticed so far."""
    return time.monotonic() - _left_out


class PauseDetector:
    """Notices pauses by ticks that come late; to be ticked before time limits are looked at.

    Args:
        every_s: The time between two ticks.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._ticked_at = time.monotonic()

    def tick(self) -> float:
        """Leaves a pause since the last tick out of the clock; returns its length in seconds, 0 when there was none."""
        global _left_out
        now = time.monotonic()
        late_s = now - self._ticked_at - self._every_s
        self._ticked_at = now
        if late_s < _LATE_S:
            return 0.0
        _left_out += late_s
        return late_s
