"""A second opinion on epsilon, by Google's dp-accounting: shares no code with Opacus or with our closed form."""

from __future__ import annotations

import math

from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    get_epsilon_gaussian,
    pld,
    rdp,
)
from opacus.accountants import RDPAccountant

from fedrpc.privacy.mechanisms import History

_PLD_LIMIT = 30  # its grid grows with epsilon: beyond this it takes more than a minute


def recompute_epsilon(history: History, delta: float, accountant: str) -> float:
    """Recomputes a history's epsilon by the same kind of accountant ("gdp": exact, "rdp": Renyi)."""
    if not history:
        return 0.0
    if any(noise == 0 for noise, _, _ in history):
        return math.inf
    if accountant == "gdp":
        total = math.sqrt(math.fsum(steps / noise**2 for noise, _, steps in history))
        return float(get_epsilon_gaussian(1 / total, delta))
    renyi = rdp.RdpAccountant(orders=RDPAccountant.DEFAULT_ALPHAS)  # other orders would give another bound
    renyi.compose(_build_event(history))
    return float(renyi.get_epsilon(delta))


def compute_tight_epsilon(history: History, delta: float, about: float) -> float | None:
    """Computes epsilon by privacy loss distributions, which is nearly exact; None where that would take too long.

    Args:
        about: An estimate of epsilon.
    """
    if not history or about > _PLD_LIMIT or any(noise == 0 for noise, _, _ in history):
        return None
    accountant = pld.PLDAccountant()
    accountant.compose(_build_event(history))
    return float(accountant.get_epsilon(delta))


def _build_event(history: History) -> ComposedDpEvent:
    def build_step(noise: float, rate: float) -> GaussianDpEvent | PoissonSampledDpEvent:
        return GaussianDpEvent(noise) if rate == 1 else PoissonSampledDpEvent(rate, GaussianDpEvent(noise))

    return ComposedDpEvent([SelfComposedDpEvent(build_step(noise, rate), steps) for noise, rate, steps in history])
