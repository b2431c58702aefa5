"""What an accuracy costs, and which accuracy a number of bytes buys, read off the curve of a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from fedrpc.study.reading import Run


class Point(NamedTuple):
    """An evaluation: the round after which it was, and what had been spent until the end of that round.

    Attributes:
        num_bytes: The method's own messages, both ways.
        seconds: Of set-up and rounds, as measured.
    """

    round: int
    num_bytes: int
    accuracy: float
    seconds: float


def list_points(run: Run) -> list[Point]:
    """The evaluations of a run, in order."""
    flows = run.traffic.by_round
    spent = dict(zip(flows, accumulate(sum(flow.own.values()) for flow in flows.values()), strict=True))
    passed: dict[int, float] = {}
    seconds = 0.0
    for row in run.records:
        if row["event"] in ("setup_finished", "round_finished"):
            seconds += float(row.get("seconds") or 0.0)
            passed[row["round"]] = seconds
    return [
        Point(index, spent.get(index, 0), value, passed.get(index, seconds)) for index, value in run.curve("accuracy")
    ]


def find_target(points: Sequence[Point], target: float, num_rounds: int) -> dict[str, Any] | None:
    """{rounds, bytes, seconds} until an evaluation first gave this accuracy, in percent; None when none did."""
    for point in points:
        if point.accuracy >= target:
            # What a method does after its last round is evaluated as one more.
            return {
                "rounds": min(point.round + 1, num_rounds),
                "bytes": point.num_bytes,
                "seconds": point.seconds,
            }
    return None


def find_at_budget(points: Sequence[Point], byte_budget: int) -> dict[str, Any] | None:
    """{accuracy, rounds, bytes} of the last evaluation within a budget of bytes; None when there was none."""
    within = [point for point in points if point.num_bytes <= byte_budget]
    if not within:
        return None
    last = within[-1]
    return {"accuracy": last.accuracy, "rounds": last.round + 1, "bytes": last.num_bytes}
