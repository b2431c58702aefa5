"""Computes an epsilon together with all that it depends on: what a summary keeps, and `words.py` puts into a line."""

from __future__ import annotations

import functools
from typing import Any

from fedrpc.privacy.accountant import choose_accountant, compute_epsilon
from fedrpc.privacy.ledger import NOISE
from fedrpc.privacy.mechanisms import History
from fedrpc.privacy.words import describe_epsilon

UNIT = "one record of one client"
SECOND = {"gdp": "dp-accounting Gaussian", "rdp": "dp-accounting RDP"}
# Who sees what. Noise that a server adds to an aggregate would need other words: there, the server sees everything.
TRUST = {
    "seeded": "local, noise added at each client, from a seed that the server and all clients know",
    "secret": "local, noise added at each client, so that the server and other clients see only noisy releases",
}


def state_epsilon(history: History, delta: float, adjacency: str, noise: str) -> dict[str, Any]:
    """Computes a history's epsilon, and names accountants, unit, neighbours, sampling, trust model and noise.

    Args:
        adjacency: How neighbouring data sets differ.
        noise: The source of the run's noise: "seeded" or "secret".
    """
    accountant = choose_accountant(history)
    return {
        "epsilon": compute_epsilon(history, delta),
        "delta": delta,
        "accountant": accountant,
        "second": ask_second(history, delta, accountant),
        "unit": UNIT,
        "adjacency": adjacency,
        "sampling": describe_sampling(history),
        "trust": TRUST[noise],
        "noise": NOISE[noise],
    }


def describe_excess(before: History, after: History, budget: float, delta: float, adjacency: str, noise: str) -> str:
    """Why a release is not made: what was spent before it, and what it would bring that to."""
    spent, told = compute_epsilon(before, delta), describe_epsilon(state_epsilon(after, delta, adjacency, noise))
    return f"privacy budget: no release, since the budget is {budget:g} ({spent:.4g} spent) and it would come to {told}"


def ask_second(history: History, delta: float, accountant: str) -> dict[str, Any]:
    """The second accountant's name, and its epsilon or None where it fails."""
    return {"accountant": SECOND[accountant], "epsilon": _recompute(history, delta, accountant)}


@functools.lru_cache(maxsize=4096)
def _recompute(history: History, delta: float, accountant: str) -> float | None:
    try:
        from fedrpc.privacy.second import recompute_epsilon  # here, since its library is slow to import

        return recompute_epsilon(history, delta, accountant)
    except Exception:  # a finished run must not fail over a second opinion; the line says that there is none
        return None


def describe_sampling(history: History) -> str:
    """How the records of each step were chosen, as far as the epsilon relies on it."""
    rates = sorted({rate for _, rate, _ in history})
    if rates in ([], [1.0]):
        return "no sampling assumed"
    told = f"rate {rates[0]:.3g}" if len(rates) == 1 else f"rates {rates[0]:.3g} to {rates[-1]:.3g}"
    return f"Poisson sampling at {told}, assuming that nobody sees the samples"
