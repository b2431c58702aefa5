"""Summarizes a curve of accuracy over rounds in the numbers that papers quote."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

TAIL = 10


@dataclass(frozen=True)
class Curve:
    """The summary of one curve, in percent.

    Attributes:
        last: The last evaluation's accuracy.
        last10: The mean of the last ten evaluations, or of all when there are fewer.
        best: The highest accuracy. Selected on what it was measured on, so it is optimistic: say so beside it.
        best_round: The first round that reached it.
    """

    last: float
    last10: float
    best: float
    best_round: int


def summarize_curve(points: Iterable[tuple[int, float]]) -> Curve:
    """The summary of (round, accuracy) pairs in any order; of two for one round the later in `points` counts.

    Raises:
        ValueError: There is no point.
    """
    curve = dict(points)
    if not curve:
        raise ValueError("a curve needs at least one evaluated round")
    rounds = sorted(curve)
    tail = [curve[index] for index in rounds[-TAIL:]]
    best_round = max(rounds, key=lambda index: (curve[index], -index))
    return Curve(tail[-1], sum(tail) / len(tail), curve[best_round], best_round)
