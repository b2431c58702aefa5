"""Composes what a client released into epsilons: by the closed form where one holds, else by Opacus's accountants."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from fedrpc.privacy.gaussian import epsilon_of
from fedrpc.privacy.mechanisms import History

_MOST_NOISE = 100.0
_PRV_LIMIT = 200  # its grid grows with epsilon: beyond this it takes a minute, and then fails


@dataclass(frozen=True)
class Epsilons:
    """The same history by each accountant; None where one does not apply or fails.

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
        """The figure that is reported, and whose it is: the exact one, or else the one that never fails."""
        if self.gdp is not None:
            return self.gdp, "gdp"
        assert self.rdp is not None
        return self.rdp, "rdp"


def merged(histories: Iterable[History]) -> History:
    """All of them as one: releases of the same noise and sampling rate are one entry, in order of their first."""
    out: dict[tuple[float, float], int] = {}
    for noise, rate, steps in (entry for history in histories for entry in history):
        out[noise, rate] = out.get((noise, rate), 0) + steps
    return tuple((noise, rate, steps) for (noise, rate), steps in out.items() if steps)


@functools.lru_cache(maxsize=4096)
def spent(history: History, delta: float) -> float:
    """The epsilon that is reported and held against a budget; without the PRV accountant."""
    gdp = _gdp(history, delta)
    return _rdp(history, delta) if gdp is None else gdp


@functools.lru_cache(maxsize=4096)
def epsilons(history: History, delta: float) -> Epsilons:
    """What a history amounts to by every accountant."""
    gdp = _gdp(history, delta)
    rdp = _rdp(history, delta)
    return Epsilons(gdp, rdp, _prv(history, delta) if rdp <= _PRV_LIMIT else None)


def _gdp(history: History, delta: float) -> float | None:
    if any(rate != 1.0 for _, rate, _ in history):
        return None
    if any(noise == 0 for noise, _, _ in history):
        return math.inf
    return epsilon_of(math.sqrt(math.fsum(steps / noise**2 for noise, _, steps in history)), delta)


def _rdp(history: History, delta: float) -> float:
    from opacus.accountants import RDPAccountant

    if not history:
        return 0.0
    if any(noise == 0 for noise, _, _ in history):
        return math.inf
    accountant = RDPAccountant()
    # Its series never end for much noise; less noise costs more, so that this is a bound still.
    accountant.history = [
        (noise if rate == 1 else min(noise, _MOST_NOISE), rate, steps) for noise, rate, steps in history
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order is at the end of its list: a looser bound, still a bound
        return max(0.0, float(accountant.get_epsilon(delta)))


def _prv(history: History, delta: float) -> float | None:
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
        return None  # its grid does not fit some histories (little noise, many steps)
    return found if math.isfinite(found) else None
