from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.data.apportion import apportion

WEIGHTS = st.lists(st.integers(0, 1000), min_size=1, max_size=12).filter(any)


@given(st.integers(0, 5000), WEIGHTS)
def test_shares_are_the_exact_ones_rounded_and_sum_to_the_total(total: int, weights: list[int]) -> None:
    shares = apportion(total, np.array(weights))
    exact = total * np.array(weights) / sum(weights)
    assert shares.sum() == total
    assert (np.abs(shares - exact) < 1 + 1e-9).all()


@given(st.integers(0, 3000), WEIGHTS)
def test_caps_hold_and_what_fits_is_shared(total: int, weights: list[int]) -> None:
    caps = np.maximum(0, np.array(weights) - 1)
    shares = apportion(total, np.array(weights), caps)
    assert (shares <= caps).all()
    assert shares.sum() == min(total, caps.sum())


def test_largest_remainder_by_hand() -> None:
    assert apportion(10, np.array([1, 1, 1])).tolist() == [4, 3, 3]
    assert apportion(7, np.array([50, 30, 20])).tolist() == [4, 2, 1]
    assert apportion(3, np.array([1, 98, 1])).tolist() == [0, 3, 0]
