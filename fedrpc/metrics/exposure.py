"""Which clients' features have reached which clients, from the ledger of what was sent.

Exposure is directed: client i is exposed to client j once something i uploaded was downloaded by j. FLea calls it
"exchanged", but only this definition gives its value of at most 40 % by its round 50.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Movement:
    """One message with shared features in it: its round, its client, and "down" or "up"."""

    round: int
    client: int
    direction: str


def list_movements(rows: Iterable[Mapping[str, Any]], kinds: Collection[str]) -> list[Movement]:
    """The movements of `kinds` in the rows of a ledger, without aborted attempts and empty messages."""
    return [
        Movement(int(row["round"]), int(row["client"]), str(row["direction"]))
        for row in rows
        if row["kind"] in kinds and row["tensor_bytes"] > 0 and not row.get("aborted", False)
    ]


def exposure_matrix(log: Iterable[Movement], num_clients: int, *, lag: int = 1) -> NDArray[np.bool_]:
    """A matrix that is true at [i, j] when features of i have reached j; a client's own features count too.

    Args:
        log: What was sent, in any order.
        num_clients: All clients, also those that never took part.
        lag: How many rounds lie between an upload and the downloads that carry it: 1 for a buffer that is replaced each
            round (FLea), 0 for a pool that is collected and sent out in the same round (FedData, FedMix).
    """
    matrix = np.zeros((num_clients, num_clients), dtype=np.bool_)
    for sources, targets in _collect_pools(log, lag).values():
        matrix[np.ix_(sources, targets)] = True
    return matrix


def exposure_curve(log: Iterable[Movement], num_clients: int, *, lag: int = 1) -> list[tuple[int, float]]:
    """The share of all num_clients^2 pairs that are exposed after each round that downloaded something."""
    matrix = np.zeros((num_clients, num_clients), dtype=np.bool_)
    curve = []
    for index, (sources, targets) in sorted(_collect_pools(log, lag).items()):
        matrix[np.ix_(sources, targets)] = True
        curve.append((index, float(matrix.mean())))
    return curve


def expected_exposure(fraction: float, round_index: int) -> float:
    """The share to expect after a round, counted from 0, when each client takes part with probability `fraction`.

    A pair is exposed in a round with probability fraction^2, and the first round has no buffer to download.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"the fraction of clients is from 0 to 1, got {fraction}")
    if round_index < 0:
        raise ValueError(f"rounds count from 0, got {round_index}")
    return 1.0 - (1.0 - fraction**2) ** round_index


def _collect_pools(log: Iterable[Movement], lag: int) -> dict[int, tuple[list[int], list[int]]]:
    """For each round with downloads: the clients whose features were in the pool, and those that received it."""
    ups: defaultdict[int, set[int]] = defaultdict(set)
    downs: defaultdict[int, set[int]] = defaultdict(set)
    for move in log:
        if move.direction not in ("down", "up"):
            raise ValueError(f"a direction is 'down' or 'up', got '{move.direction}'")
        (ups if move.direction == "up" else downs)[move.round].add(move.client)
    return {index: (sorted(ups[index - lag]), sorted(targets)) for index, targets in downs.items()}
