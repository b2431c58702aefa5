"""Statistics over seeds: means with their spread, and paired differences with an interval and a sign test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

LEVEL = 0.95


def summarize_values(values: Iterable[float | None]) -> dict[str, Any] | None:
    """{mean, sd, n} of the values that there are; sd divides by n - 1, and is None for a single one."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    return {
        "mean": statistics.fmean(found),
        "sd": statistics.stdev(found) if len(found) > 1 else None,
        "n": len(found),
    }


def compare_pairs(pairs: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """The differences of (value, baseline's value) pairs: each pair is of one seed, whose chance both share.

    Returns:
        {mean, sd, n, low, high, level, better, worse, equal, sign_p}; None without pairs. The interval is Student's,
        for differences that are about normal; low, high and sign_p are None for a single pair, which tells nothing
        of chance.
    """
    differences = [value - baseline for value, baseline in pairs]
    found = summarize_values(differences)
    if found is None:
        return None
    low, high = _find_interval(found)
    better, worse = (sum(sign * each > 0 for each in differences) for sign in (1, -1))
    return found | {
        "low": low,
        "high": high,
        "level": LEVEL,
        "better": better,
        "worse": worse,
        "equal": len(differences) - better - worse,
        "sign_p": compute_sign_p(better, worse) if len(differences) > 1 else None,
    }


def _find_interval(found: dict[str, Any]) -> tuple[float | None, float | None]:
    if found["sd"] is None:
        return None, None
    from scipy.special import stdtrit  # here, since most comparisons have one seed

    half = float(stdtrit(found["n"] - 1, (1 + LEVEL) / 2)) * found["sd"] / math.sqrt(found["n"])
    return found["mean"] - half, found["mean"] + half


def compute_sign_p(better: int, worse: int) -> float:
    """The two-sided p-value of the sign test: how likely so uneven a count is when either sign is as likely."""
    count, least = better + worse, min(better, worse)
    tail: float = sum(math.comb(count, k) for k in range(least + 1)) / 2**count
    return min(1.0, 2 * tail)
