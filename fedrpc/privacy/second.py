"""A second opinion on epsilon, by Google's dp-accounting: shares no code and no settings with the first accountant."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator

from absl import logging
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    get_epsilon_gaussian,
    pld,
    rdp,
)

from fedrpc.privacy.mechanisms import History

_FINEST = 1e-4  # the interval of the grid of privacy losses, as dp-accounting has it ...
_GRID = 1e-5  # ... or this share of epsilon: a large epsilon needs no finer one, and would take minutes with it


def recompute_epsilon(history: History, delta: float, accountant: str) -> float:
    """Recomputes a history's epsilon by the same kind of accountant.

    Args:
        accountant: "gdp", where everything is sampled at rate 1: exact. Or "rdp": an upper bound by Renyi divergences,
            at dp-accounting's own orders. The first accountant's bound has others, so either may be the smaller one.
    """
    if not history:
        return 0.0
    if any(noise == 0 for noise, _, _ in history):
        return math.inf
    if accountant == "gdp":
        total = math.sqrt(math.fsum(steps / noise**2 for noise, _, steps in history))
        return float(get_epsilon_gaussian(1 / total, delta))
    renyi = rdp.RdpAccountant()
    with _without_warnings():
        renyi.compose(_build_event(history))
    return float(renyi.get_epsilon(delta))


@functools.lru_cache(maxsize=256)
def compute_tight_epsilon(history: History, delta: float, about: float) -> float | None:
    """Computes epsilon by privacy loss distributions: nearly exact, and never too small; None where that fails.

    Args:
        about: An estimate of epsilon.
    """
    if not history or any(noise == 0 for noise, _, _ in history):
        return None
    try:
        accountant = pld.PLDAccountant(value_discretization_interval=max(_FINEST, _GRID * about))
        accountant.compose(_build_event(history))
        return float(accountant.get_epsilon(delta))
    except (ArithmeticError, ValueError, MemoryError):
        return None


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Without the warnings about orders whose series does not converge: it leaves them out, and the bound holds."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _build_event(history: History) -> ComposedDpEvent:
    def build_step(noise: float, rate: float) -> GaussianDpEvent | PoissonSampledDpEvent:
        return GaussianDpEvent(noise) if rate == 1 else PoissonSampledDpEvent(rate, GaussianDpEvent(noise))

    return ComposedDpEvent([SelfComposedDpEvent(build_step(noise, rate), steps) for noise, rate, steps in history])
