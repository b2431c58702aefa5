"""The Gaussian mechanism in closed form: exact epsilon by Gaussian differential privacy, and the classic bound.

A release of sensitivity 1 with noise of standard deviation s is exactly mu-GDP with mu = 1/s (Dong, Roth and Su, 2022);
independent releases compose to the root of the sum of squares.
"""

from __future__ import annotations

import math


def compute_delta(mu: float, epsilon: float) -> float:
    """Computes the smallest delta at which a mu-GDP release is (epsilon, delta)-DP."""
    from scipy.special import log_ndtr  # here, since SciPy is slow to import, and most runs do without

    if mu == 0:
        return max(0.0, 1 - math.exp(epsilon)) if epsilon < 0 else 0.0
    # In logarithms, since exp(epsilon) overflows long before the product does.
    first = log_ndtr(-epsilon / mu + mu / 2)
    second = epsilon + log_ndtr(-epsilon / mu - mu / 2)
    return float(math.exp(first) * -math.expm1(min(0.0, second - first)))


def solve_epsilon(mu: float, delta: float) -> float:
    """Finds the smallest epsilon at which a mu-GDP release is (epsilon, delta)-DP: exact, up to the root finder."""
    from scipy.optimize import brentq

    if not 0 < delta < 1:
        raise ValueError(f"expected a delta between 0 and 1, got {delta}")
    if math.isinf(mu):
        return math.inf
    if compute_delta(mu, 0.0) <= delta:
        return 0.0
    # delta(epsilon) < Phi(mu/2 - epsilon/mu), which is far below any delta here at 60 standard deviations.
    return float(brentq(lambda epsilon: compute_delta(mu, epsilon) - delta, 0.0, mu * (mu / 2 + 60), xtol=1e-12))


def compute_classic_epsilon(noise_multiplier: float, delta: float) -> float:
    """Computes the textbook bound sqrt(2 ln(1.25/delta)) / noise multiplier, which is a theorem only below 1."""
    return math.sqrt(2 * math.log(1.25 / delta)) / noise_multiplier
