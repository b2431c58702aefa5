"""Composes what a client released into epsilons: by the closed form where one holds, else by Opacus's accountants."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fedrpc.privacy.gaussian import solve_epsilon
from fedrpc.privacy.mechanisms import Histories, History

_MOST_NOISE = 100.0
_PRV_LIMIT = 200  # its grid grows with epsilon: beyond this it takes a minute, and then fails


@dataclass(frozen=True)
class Epsilons:
    """The epsilon of one history by each accountant; None where one does not apply or fails.

    Attributes:
        gdp: Closed form, exact; only at sampling rate 1.
        rdp: Opacus's Renyi accountant: never too small.
        prv: Opacus's PRV accountant: tight, but it fails for some histories.
    """

    gdp: float | None
    rdp: float | None
    prv: float | None

    @property
    def best(self) -> tuple[float, str]:
        """The reported epsilon and its accountant: the exact one where it applies, else RDP, which never fails."""
        if self.gdp is not None:
            return self.gdp, "gdp"
        assert self.rdp is not None
        return self.rdp, "rdp"


def choose_accountant(history: History) -> str:
    """The accountant of the reported epsilon: "gdp", the closed form, where it holds, else "rdp"."""
    return "gdp" if all(rate == 1.0 for _, rate, _ in history) else "rdp"


@functools.lru_cache(maxsize=4096)
def compute_epsilon(history: History, delta: float) -> float:
    """Computes the epsilon that is reported and compared with a budget, without the slow PRV accountant."""
    gdp = _compute_gdp(history, delta)
    return _compute_rdp(history, delta) if gdp is None else gdp


def choose_larger(one: Histories, other: Histories, delta: float = 1e-5) -> dict[str, History]:
    """Chooses, of two records of what was spent, the one that spent more, for each adjacency by itself.

    Args:
        delta: At which epsilons are compared; nearly any value would do.
    """
    return {
        adjacency: max(
            (found.get(adjacency, ()) for found in (one, other)), key=lambda history: compute_epsilon(history, delta)
        )
        for adjacency in {**one, **other}
    }


def describe_weak_delta(delta: float, sizes: Iterable[int]) -> str:
    """Says why a delta promises too little to the smallest client, or "".

    Args:
        sizes: Every client's number of training examples.
    """
    least = min((size for size in sizes if size), default=0)
    if not least or delta < 1 / least:
        return ""
    return (
        f"delta {delta:g} is not below 1/n for a client with n = {least} training examples: to publish one of "
        f"them at random would satisfy it, too; set privacy.delta far below {1 / least:.2g}"
    )


@functools.lru_cache(maxsize=4096)
def compute_epsilons(history: History, delta: float) -> Epsilons:
    """Computes a history's epsilon by every accountant."""
    gdp = _compute_gdp(history, delta)
    rdp = _compute_rdp(history, delta)
    return Epsilons(gdp, rdp, _compute_prv(history, delta) if rdp <= _PRV_LIMIT else None)


def _compute_gdp(history: History, delta: float) -> float | None:
    if choose_accountant(history) != "gdp":
        return None
    if any(noise == 0 for noise, _, _ in history):
        return math.inf
    return solve_epsilon(math.sqrt(math.fsum(steps / noise**2 for noise, _, steps in history)), delta)


def _compute_rdp(history: History, delta: float) -> float:
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis import rdp

    if not history:
        return 0.0
    if any(noise == 0 for noise, _, _ in history):
        return math.inf
    # As RDPAccountant.get_epsilon does, but a step of the same noise and rate is computed once, which takes 70 ms.
    total = sum(_compute_step_rdp(noise, rate) * steps for noise, rate, steps in history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the best order may be the last of its list: a looser bound, but a bound
        epsilon, _ = rdp.get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=total, delta=delta)
    return max(0.0, float(epsilon))


@functools.lru_cache(maxsize=4096)
def _compute_step_rdp(noise: float, rate: float) -> Any:
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis import rdp

    # Its series do not converge for much noise; less noise costs more, so the result is still an upper bound.
    noise = noise if rate == 1 else min(noise, _MOST_NOISE)
    return rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=RDPAccountant.DEFAULT_ALPHAS)


def _compute_prv(history: History, delta: float) -> float | None:
    from opacus.accountants import PRVAccountant

    if not history:
        return 0.0
    accountant = PRVAccountant()
    accountant.history = list(history)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = float(accountant.get_epsilon(delta))
    except (ValueError, RuntimeError, ArithmeticError, MemoryError):
        return None  # its grid does not fit histories of little noise and many steps
    return found if math.isfinite(found) else None
