from __future__ import annotations

from typing import Any

import pytest

from fedrpc.study.pareto import dominates, find_front
from fedrpc.study.targets import Point, find_at_budget, find_target

CURVE = [Point(0, 100, 20.0, 1.0), Point(1, 200, 55.0, 2.5), Point(2, 300, 50.0, 4.0), Point(3, 350, 60.0, 4.0)]


def test_a_target_costs_what_was_spent_when_it_was_first_reached() -> None:
    assert find_target(CURVE, 50, 3) == {"rounds": 2, "bytes": 200, "seconds": 2.5}
    assert find_target(CURVE, 20.0, 3) == {"rounds": 1, "bytes": 100, "seconds": 1.0}
    assert find_target(CURVE, 60, 3) == {"rounds": 3, "bytes": 350, "seconds": 4.0}, "after its last round it finalized"
    assert find_target(CURVE, 61, 3) is None
    assert find_target([], 0, 3) is None


def test_a_budget_buys_the_last_evaluation_within_it() -> None:
    assert find_at_budget(CURVE, 320) == {"accuracy": 50.0, "rounds": 3, "bytes": 300}
    assert find_at_budget(CURVE, 300) == {"accuracy": 50.0, "rounds": 3, "bytes": 300}
    assert find_at_budget(CURVE, 99) is None


def row(name: str, accuracy: float | None, size: int, seconds: float, epsilon: float | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "accuracy": None if accuracy is None else {"last": accuracy},
        "bytes": {"message": size},
        "time": {"measured": seconds},
        "privacy": {"epsilon": epsilon},
    }


def test_a_row_is_on_the_front_unless_another_is_nowhere_worse_and_somewhere_better() -> None:
    rows = [
        row("cheap", 50, 10, 1.0),
        row("better", 60, 20, 2.0),
        row("worse", 55, 20, 2.0),
        row("private", 40, 30, 3.0, epsilon=8.0),
        row("twin", 60, 20, 2.0),
        row("unknown", None, 1, 0.1),
    ]
    assert find_front(rows) == ["cheap", "better", "private", "twin"]


@pytest.mark.parametrize(
    ("one", "other", "does"), [((1, 1), (1, 1), False), ((1, 0), (1, 1), True), ((0, 2), (1, 1), False)]
)
def test_dominance(one: tuple[int, int], other: tuple[int, int], does: bool) -> None:
    assert dominates(one, other) is does
