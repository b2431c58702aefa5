"""The Gaussian mechanism's closed form against integration, hand figures and the audit of FedDPMS's claims."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from fedrpc.privacy.gaussian import compute_classic_epsilon, compute_delta, solve_epsilon

# Draws, values of a latent, noise; then epsilon at delta 1e-5 and 0.01 of one draw of the whole vector, of all draws,
# and of all draws for three classes; means over 100 examples.
AUDIT = [
    (50, 32, 0.03, (9.30, 5.52), (144.9, 119.0), (364.2, 319.4)),
    (50, 32, 0.3, (0.680, 0.242), (6.13, 3.42), (11.95, 7.36)),
    (50, 32, 3.0, (0.055, 0.0), (0.466, 0.145), (0.849, 0.322)),
    (200, 128, 0.04, (15.5, 9.86), (969.6, 892.1), (2694.5, 2560.2)),
    (200, 128, 0.4, (1.06, 0.427), (24.4, 16.5), (52.8, 39.3)),
    (200, 128, 4.0, (0.086, 0.003), (1.56, 0.682), (2.88, 1.42)),
]


@pytest.mark.parametrize(("draws", "length", "std", "one", "all_", "classes"), AUDIT)
@pytest.mark.parametrize(("which", "delta"), [(0, 1e-5), (1, 0.01)])
def test_epsilons_equal_the_audited_values(draws, length, std, one, all_, classes, which, delta) -> None:
    mu = math.sqrt(length) / (100 * std)
    for expected, releases in ((one, 1), (all_, draws), (classes, 3 * draws)):
        found = solve_epsilon(mu * math.sqrt(releases), delta)
        assert found == pytest.approx(expected[which], rel=0.01, abs=6e-4)  # the smallest figures have three decimals


@pytest.mark.parametrize("mu", [0.05, 0.7, 3.0, 20.0])
@pytest.mark.parametrize("share", [0.2, 1.0, 2.0])
def test_delta_is_what_integration_gives(mu: float, share: float) -> None:
    """The mass of N(mu, 1) over exp(epsilon) times that of N(0, 1), where it is larger."""
    epsilon = share * mu * mu / 2
    start = epsilon / mu + mu / 2
    mass, _ = quad(
        lambda x: norm.pdf(x - mu) - math.exp(epsilon) * norm.pdf(x), start, max(start, mu) + 12, epsabs=1e-14
    )
    assert compute_delta(mu, epsilon) == pytest.approx(mass, rel=1e-6, abs=1e-13)


@given(mu=st.floats(1e-3, 60), delta=st.floats(1e-9, 0.3))
def test_epsilon_and_delta_are_inverse(mu: float, delta: float) -> None:
    epsilon = solve_epsilon(mu, delta)
    assert epsilon >= 0
    if epsilon > 0:
        assert compute_delta(mu, epsilon) == pytest.approx(delta, rel=1e-5)
    else:
        assert compute_delta(mu, 0.0) <= delta


@given(mu=st.floats(1e-3, 50), more=st.floats(1.01, 3), delta=st.floats(1e-8, 0.1))
def test_epsilon_grows_with_mu_and_falls_with_delta(mu: float, more: float, delta: float) -> None:
    assert solve_epsilon(mu * more, delta) >= solve_epsilon(mu, delta)
    assert solve_epsilon(mu, delta / more) >= solve_epsilon(mu, delta)


def test_limits_of_mu_and_delta() -> None:
    assert solve_epsilon(0.0, 1e-5) == 0
    assert solve_epsilon(math.inf, 1e-5) == math.inf
    with pytest.raises(ValueError, match="expected a delta between 0 and 1"):
        solve_epsilon(1.0, 0.0)


def test_the_classic_bound_equals_the_textbook_formula() -> None:
    """FedDPMS's example: epsilon 0.5 at delta 0.01 takes 6.215, not the 3.9 that a decimal logarithm gives."""
    assert compute_classic_epsilon(6.215, 0.01) == pytest.approx(0.5, rel=1e-4)
    assert compute_classic_epsilon(100 * 0.03, 1e-5) == pytest.approx(1.61, rel=0.01)
