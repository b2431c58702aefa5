"""How fast a transfer must be, and what a slow one may hold."""

from __future__ import annotations

import asyncio

# A transfer that is slower than this takes so little of the server's link and memory that it need not hold up others
# who wait for a permit: of 4 permits, 4 phones would otherwise have all.
PERMIT_BYTES_S = 64 << 10
MOMENT_S = 2.0  # within which an upload that moves is seen to move: the kernel's counters are read every second
PATIENCE_S = 5.0  # how far behind a transfer may be before it loses its permit, or its claim to more time


class Pace:
    """Counts how many seconds a transfer is behind a rate; never less than none, since speed is not saved up.

    Args:
        rate: Bytes a second.
    """

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._last: tuple[float, int] | None = None
        self.behind_s = 0.0

    def note(self, now: float, total: int, *, waiting: bool = True) -> None:
        """Notes how many bytes have moved in all.

        Args:
            waiting: Whether the time since the last note counts: not when it was the server that kept bytes waiting.
        """
        if self._last is not None:
            before, moved = self._last[0], max(0, total - self._last[1])
            passed = now - before if waiting else 0.0
            self.behind_s = max(0.0, self.behind_s + passed - moved / self._rate)
        self._last = now, total

    def restart(self) -> None:
        """Forgets what was; time counts from the next note on."""
        self._last, self.behind_s = None, 0.0


class Permit:
    """Holds one of a number of permits until it is given back, which a slow transfer does before its end."""

    def __init__(self, permits: asyncio.Semaphore) -> None:
        self._permits = permits
        self.held = False

    async def __aenter__(self) -> Permit:
        await self._permits.acquire()
        self.held = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Lets somebody else have it; does nothing the second time."""
        if self.held:
            self.held = False
            self._permits.release()
