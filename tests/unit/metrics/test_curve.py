"""The summary of a curve of accuracy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.metrics.curve import Curve, summarize_curve


def test_by_hand():
    curve = summarize_curve([(t, 10.0 * t if t < 9 else 50.0) for t in range(12)])
    assert curve.last == 50.0
    assert curve.last10 == pytest.approx((20 + 30 + 40 + 50 + 60 + 70 + 80 + 50 + 50 + 50) / 10)
    assert (curve.best, curve.best_round) == (80.0, 8)


def test_fewer_than_ten_rounds():
    assert summarize_curve([(0, 10.0), (5, 30.0)]) == Curve(last=30.0, last10=20.0, best=30.0, best_round=5)


def test_the_first_of_equal_bests():
    assert summarize_curve([(0, 1.0), (3, 9.0), (7, 9.0), (9, 2.0)]).best_round == 3


def test_a_replayed_round_counts_once_and_order_does_not_matter():
    assert summarize_curve([(2, 30.0), (1, 10.0), (1, 20.0)]) == Curve(last=30.0, last10=25.0, best=30.0, best_round=2)


def test_no_round_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        summarize_curve([])


@given(st.dictionaries(st.integers(0, 99), st.floats(0, 100), min_size=1))
def test_best_bounds_the_others(points):
    curve = summarize_curve(points.items())
    assert curve.last <= curve.best
    assert curve.last10 <= curve.best + 1e-9
    assert points[curve.best_round] == curve.best
