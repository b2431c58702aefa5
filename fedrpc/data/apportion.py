"""Divides a whole number in given proportions, exactly and deterministically."""

from __future__ import annotations

import numpy as np


def apportion(total: int, weights: np.ndarray, caps: np.ndarray | None = None) -> np.ndarray:
    """Whole shares of `total` in proportion to whole `weights`, by largest remainder (ties to the first).

    Each share is its exact value rounded down or up, unless `caps` limit it; what exceeds the caps is not
    distributed.
    """
    weights = np.asarray(weights, dtype=np.int64)
    whole = int(weights.sum())
    shares, remainders = np.divmod(total * weights, max(1, whole))
    room = np.asarray(caps if caps is not None else np.full(len(weights), total), dtype=np.int64)
    shares = np.minimum(shares, room)
    order = np.argsort(-remainders, kind="stable")
    left = total - int(shares.sum())
    while left > 0:
        takers = order[shares[order] < room[order]][:left]
        if not takers.size:
            break
        shares[takers] += 1
        left -= len(takers)
    return shares
