"""How often something may be done: many times at once, and then at a steady rate."""

from __future__ import annotations

from collections.abc import Hashable

_MAX_KEYS = 10_000


class Allowance:
    """Counts for each key by itself.

    Args:
        burst: How many are allowed at once.
        per_s: How many more with every second.
    """

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left: dict[Hashable, tuple[float, float]] = {}  # how many are left, and when that was

    def take(self, key: Hashable, now: float) -> bool:
        """Takes one; returns whether there was one left."""
        left = self._count(key, now)
        self._left.pop(key, None)
        self._left[key] = (left - 1 if left >= 1 else left), now
        if len(self._left) > _MAX_KEYS:
            # The one that was used longest ago has most left, and is what is missed least.
            del self._left[next(iter(self._left))]
        return left >= 1

    def _count(self, key: Hashable, now: float) -> float:
        left, at = self._left.get(key, (float(self._burst), now))
        return min(float(self._burst), left + (now - at) * self._per_s)
