"""Composition: the closed form, Opacus's own figures, and where an accountant does not apply."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant, RDPAccountant

from fedrpc.privacy import mechanisms
from fedrpc.privacy.accountant import choose_larger, compute_epsilon, compute_epsilons, describe_weak_delta
from fedrpc.privacy.mechanisms import MAX_ENTRIES, merge_histories

ENTRIES = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.1, 1.0]), st.integers(0, 5)))


def test_nothing_released_costs_nothing() -> None:
    assert vars(compute_epsilons((), 1e-5)) == {"gdp": 0.0, "rdp": 0.0, "prv": 0.0}


def test_at_sampling_rate_one_the_closed_form_is_reported() -> None:
    found = compute_epsilons(((3 * 100 / math.sqrt(32), 1.0, 50),), 1e-5)
    assert found.best == (found.gdp, "gdp")
    assert found.gdp == pytest.approx(0.466, rel=0.01)
    assert found.rdp == pytest.approx(0.512, rel=0.01)
    assert found.prv == pytest.approx(found.gdp, abs=0.02)


def test_below_sampling_rate_one_epsilon_equals_opacus_bit_for_bit() -> None:
    history = [(1.1, 0.05, 40), (0.9, 0.02, 7)]
    found = compute_epsilons(tuple(history), 1e-5)
    for cls, value in ((RDPAccountant, found.rdp), (PRVAccountant, found.prv)):
        theirs = cls()
        theirs.history = list(history)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert value == theirs.get_epsilon(1e-5)
    assert found.gdp is None
    assert found.best == (found.rdp, "rdp")
    assert compute_epsilon(tuple(history), 1e-5) == found.rdp


def test_where_the_prv_accountant_fails_the_others_remain() -> None:
    found = compute_epsilons(((0.04 * 100 / math.sqrt(128), 1.0, 200),), 1e-5)
    assert found.prv is None
    assert found.gdp == pytest.approx(969.6, rel=0.01)
    assert found.rdp >= found.gdp


def test_without_noise_epsilon_is_infinite() -> None:
    assert compute_epsilon(((0.0, 1.0, 1),), 1e-5) == math.inf
    assert compute_epsilon(((0.0, 0.5, 1),), 1e-5) == math.inf


@given(first=ENTRIES, second=ENTRIES)
def test_merging_keeps_every_step(first, second) -> None:
    whole = merge_histories([tuple(first), tuple(second)])
    flat = Counter()
    for noise, rate, steps in (*first, *second):
        flat[noise, rate] += steps
    assert {entry[:2]: entry[2] for entry in whole} == +flat
    assert len({entry[:2] for entry in whole}) == len(whole)


# Histories of too many entries

ANY = st.lists(
    st.tuples(
        st.one_of(st.just(0.0), st.floats(1e-3, 1e6)), st.one_of(st.just(1.0), st.floats(1e-6, 1)), st.integers(1, 9)
    ),
    min_size=MAX_ENTRIES + 1,
    max_size=4 * MAX_ENTRIES,
)


@given(ANY)
def test_a_history_has_a_bounded_number_of_entries(entries) -> None:
    whole = merge_histories([tuple(entries)])
    assert len(whole) <= MAX_ENTRIES
    assert sum(steps for _, _, steps in whole) == sum(steps for _, _, steps in entries)
    assert merge_histories([whole]) == whole, "what was rounded is not rounded again"


@given(st.floats(1e-3, 1e6), st.floats(1e-6, 1), st.sampled_from(mechanisms._GRIDS))
def test_rounding_never_makes_an_entry_cheaper(noise, rate, per_octave) -> None:
    less, more = mechanisms._round_down(noise, per_octave), mechanisms._round_up(rate, per_octave)
    assert 1e-3 <= less <= noise
    assert rate <= more <= 1
    assert less >= noise / 2 ** (1.01 / per_octave)
    assert more <= rate * 2 ** (1.01 / per_octave)
    assert (mechanisms._round_down(less, per_octave), mechanisms._round_up(more, per_octave)) == (less, more)


def test_few_entries_are_never_rounded() -> None:
    entries = tuple((1.0 + index / 7, 0.01, 1) for index in range(MAX_ENTRIES))
    assert merge_histories([entries]) == entries


@pytest.mark.parametrize("rates", [[1.0], [0.01, 0.013, 0.02]], ids=["whole", "sampled"])
def test_an_epsilon_of_many_entries_is_an_upper_bound_and_a_near_one(rates) -> None:
    entries = tuple((2.0 + index / 50, rates[index % len(rates)], 1) for index in range(150))
    exact, bound = (compute_epsilon(history, 1e-5) for history in (entries, merge_histories([entries])))
    assert exact <= bound <= 1.35 * exact


def test_however_many_entries_a_client_claims_its_epsilon_takes_seconds() -> None:
    spent = ()
    for index in range(200):
        row = tuple((1.0 + (64 * index + i) / 1000, 0.001 + (64 * index + i) / 1e6, 1) for i in range(64))
        spent = merge_histories([spent, row])
    started = time.process_time()
    assert 0 < compute_epsilon(spent, 1e-5) < math.inf
    assert time.process_time() - started < 5


@pytest.mark.parametrize(("noise", "rate", "steps"), [(0.8, 0.01, 50), (1.0, 0.5, 1), (5.0, 1.0, 20), (1.3, 0.07, 9)])
def test_more_steps_and_less_noise_cost_more(noise: float, rate: float, steps: int) -> None:
    base = compute_epsilon(((noise, rate, steps),), 1e-5)
    assert compute_epsilon(((noise, rate, steps + 1),), 1e-5) >= base
    assert compute_epsilon(((noise * 1.1, rate, steps),), 1e-5) <= base


def test_the_larger_history_is_chosen_for_each_notion_of_neighbours() -> None:
    one = {"a": ((1.0, 1.0, 5),), "b": ((1.0, 1.0, 1),)}
    other = {"a": ((1.0, 1.0, 4),), "b": ((0.5, 1.0, 1),), "c": ((2.0, 1.0, 1),)}
    assert choose_larger(one, other, 1e-5) == {"a": one["a"], "b": other["b"], "c": other["c"]}
    assert choose_larger({}, {}, 1e-5) == {}


@pytest.mark.parametrize(("delta", "warns"), [(1e-5, False), (0.0399, False), (0.04, True), (0.5, True)])
def test_a_delta_that_is_not_below_one_record_of_the_smallest_client_is_told(delta: float, warns: bool) -> None:
    assert ("n = 25 " in describe_weak_delta(delta, [400, 0, 25])) == warns
    assert describe_weak_delta(delta, [0]) == ""
