"""The second accountant is another one, honest runs agree with it, and an epsilon that is too small does not."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from fedrpc.privacy.accountant import choose_accountant, compute_epsilon
from fedrpc.privacy.mechanisms import History
from fedrpc.privacy.second import compute_tight_epsilon, recompute_epsilon
from fedrpc.study.audit import Line, find_disagreements

DELTA = 1e-5
HISTORIES: list[History] = [
    ((noise, rate, steps),)
    for noise, rate, steps in itertools.product((0.5, 1.1, 4.0, 150.0), (0.01, 1 / 3, 1.0), (10, 3000))
]
MIXED: History = ((0.7, 0.1, 30), (1.1, 0.25, 20), (3.0, 1.0, 2))

every_history = pytest.mark.parametrize("history", [*HISTORIES, MIXED], ids=str)


def build_line(history: History, reported: float, again: float) -> Line:
    accountant = choose_accountant(history)
    second = recompute_epsilon(history, DELTA, accountant)
    tight = compute_tight_epsilon(history, DELTA, reported)
    return Line("the run", reported, again, second, tight, None, accountant, "all")


def test_it_shares_nothing_with_the_first() -> None:
    first = ("opacus", "fedrpc.privacy.accountant", "fedrpc.privacy.gaussian")
    code = f"import sys, fedrpc.privacy.second; sys.exit(any(name in sys.modules for name in {first}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@every_history
def test_an_honest_epsilon_is_no_fault(history: History) -> None:
    epsilon = compute_epsilon(history, DELTA)
    assert find_disagreements(build_line(history, epsilon, epsilon)) == []


@every_history
def test_an_epsilon_that_is_two_per_cent_too_small_is_a_fault(history: History) -> None:
    honest = compute_epsilon(history, DELTA)
    assert find_disagreements(build_line(history, 0.98 * honest, honest))
    # Even if the first accountant gave it: no bound can be below the true value.
    tight = compute_tight_epsilon(history, DELTA, honest)
    assert tight is not None
    if tight > 1e-3:
        assert find_disagreements(build_line(history, 0.98 * tight, 0.98 * tight))


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_it_gives_about_the_same(rate: float) -> None:
    history = ((1.1, rate, 5),)
    second = recompute_epsilon(history, DELTA, choose_accountant(history))
    assert second == pytest.approx(compute_epsilon(history, DELTA), rel=0.01)


def test_it_does_not_complain_about_orders_that_it_leaves_out() -> None:
    code = "from fedrpc.privacy.second import recompute_epsilon; recompute_epsilon(((1.1, 1 / 7, 35),), 1e-5, 'rdp')"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stderr == b""


def test_nothing_costs_nothing_and_no_noise_costs_everything() -> None:
    assert recompute_epsilon((), DELTA, "rdp") == 0
    assert recompute_epsilon(((0.0, 0.5, 1),), DELTA, "rdp") == float("inf")
    assert compute_tight_epsilon((), DELTA, 0.0) is None
