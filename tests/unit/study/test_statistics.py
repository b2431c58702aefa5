from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.study.statistics import compare_pairs, compute_sign_p, summarize_values


def test_the_spread_divides_by_n_minus_one_and_one_value_has_none() -> None:
    assert summarize_values([1.0, None, 3.0]) == {"mean": 2.0, "sd": math.sqrt(2), "n": 2}
    assert summarize_values([5]) == {"mean": 5.0, "sd": None, "n": 1}
    assert summarize_values([None]) is None


def test_the_interval_is_students() -> None:
    """By hand: differences 1 to 5 have mean 3 and sd 1.581; t of 4 degrees at 97.5 % is 2.776 in every table."""
    found = compare_pairs([(10.0 + each, 10.0) for each in (1, 2, 3, 4, 5)])
    assert found is not None
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert (found["mean"], found["n"]) == (3.0, 5)
    assert found["low"] == pytest.approx(3 - half, rel=1e-6)
    assert found["high"] == pytest.approx(3 + half, rel=1e-6)
    assert (found["better"], found["worse"], found["equal"]) == (5, 0, 0)
    assert found["sign_p"] == 2 / 32


def test_one_pair_has_a_difference_and_no_interval() -> None:
    found = compare_pairs([(60.0, 50.0)])
    assert found is not None
    assert (found["mean"], found["n"], found["better"]) == (10.0, 1, 1)
    assert found["low"] is found["high"] is found["sd"] is found["sign_p"] is None
    assert compare_pairs([]) is None


def test_ties_have_no_sign() -> None:
    found = compare_pairs([(1.0, 1.0), (2.0, 1.0), (0.0, 1.0)])
    assert found is not None
    assert (found["better"], found["worse"], found["equal"], found["sign_p"]) == (1, 1, 1, 1.0)


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_sign_test_is_symmetric_and_a_probability(better: int, worse: int) -> None:
    p = compute_sign_p(better, worse)
    assert p == compute_sign_p(worse, better)
    assert 0 < p <= 1
