"""Fairness over clients and over classes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.metrics.fairness import class_fairness, client_fairness, client_fairness_of_counts, jain_index

percentages = st.lists(st.floats(2, 100), min_size=1, max_size=40)


def test_two_clients_by_hand():
    result = client_fairness([90, 100])
    assert (result.mean, result.variance) == (95.0, 25.0)
    assert result.worst_decile == 90.0
    assert result.jain == pytest.approx(190**2 / (2 * (8100 + 10000)))


def test_counts_and_percentages_agree():
    assert client_fairness_of_counts([9, 20], [10, 20]) == client_fairness([90, 100])


def test_clients_count_equally_whatever_their_size():
    assert client_fairness_of_counts([1, 0], [1, 999]).mean == 50.0


def test_fractions_are_refused():
    with pytest.raises(ValueError, match="look like fractions"):
        client_fairness([0.9, 1.0])


def test_poor_models_in_percent_are_not_mistaken_for_fractions():
    assert client_fairness([0, 0]).mean == 0
    assert client_fairness([0.5, 2]).mean == 1.25
    assert client_fairness_of_counts([1, 0], [200, 200]).mean == 0.25


@pytest.mark.parametrize("value", [-1, 101, math.nan, math.inf])
def test_values_outside_percent_are_refused(value):
    with pytest.raises(ValueError, match="from 0 to 100"):
        client_fairness([50, value])


def test_clients_without_examples_and_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="client 1 has no test examples"):
        client_fairness_of_counts([1, 0], [1, 0])
    with pytest.raises(ValueError, match="2 correct of 1"):
        client_fairness_of_counts([2], [1])
    with pytest.raises(ValueError, match="at least one"):
        client_fairness([])
    with pytest.raises(ValueError, match="at least one"):
        client_fairness_of_counts([], [])


@pytest.mark.parametrize(("number", "worst"), [(1, 0.0), (10, 0.0), (11, 0.5), (100, 4.5)])
def test_worst_decile_rounds_up(number, worst):
    assert client_fairness_of_counts(list(range(number))[::-1], [100] * number).worst_decile == worst


def test_jain_index_at_its_ends():
    assert jain_index([40, 40, 40]) == pytest.approx(1)
    assert jain_index([0, 0, 0, 80]) == pytest.approx(1 / 4)
    assert jain_index([0, 0]) == 1


@given(percentages)
def test_client_measures_equal_numpys(values):
    result = client_fairness(values)
    assert result.mean == pytest.approx(np.mean(values))
    assert result.variance == pytest.approx(np.var(values), abs=1e-9)
    assert 1 / len(values) - 1e-12 <= result.jain <= 1 + 1e-12
    assert min(values) - 1e-9 <= result.worst_decile <= result.mean + 1e-9


@given(percentages, st.randoms())
def test_the_order_of_clients_does_not_matter(values, random):
    shuffled = random.sample(values, len(values))
    assert client_fairness(shuffled) == client_fairness(values)


def test_classes_by_hand():
    result = class_fairness([9, 20, 0], [10, 20, 0])
    assert result.recalls == (90.0, 100.0, None)
    assert (result.mean, result.variance) == (95.0, 25.0)
    with pytest.raises(ValueError, match="at least one"):
        class_fairness([0], [0])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_on_balanced_data_mean_recall_is_accuracy(correct):
    accuracy = 100 * sum(correct) / (50 * len(correct))
    assert class_fairness(correct, [50] * len(correct)).mean == pytest.approx(accuracy)
