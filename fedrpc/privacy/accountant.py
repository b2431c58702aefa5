"""Composes what a client released into epsilons: by the closed form where one holds, else by Opacus's accountants."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from fedrpc.privacy.gaussian import solve_epsilon
from fedrpc.privacy.mechanisms import History

MAX_ENTRIES = 64  # of a history: accountants take up to 0.05 s for each
_GRIDS = (8, 4, 2, 1, 0.5, 0.25)  # values in an octave, each grid a part of the one before; the last has 45 entries
LEAST_NOISE = 1e-3  # beside none: with less, accountants overflow
_SLACK = 1e-9  # a value that is on a grid stays there, whatever its logarithm is rounded to
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


def merge_histories(histories: Iterable[History]) -> History:
    """Joins histories into one; steps of equal noise and sampling rate add up in one entry.

    Accountants take time for each entry. Where there are too many, entries are rounded to the finest grid on which they
    are few enough, to less noise and a higher rate: that costs more, so an epsilon is never understated.
    """
    found = _add_up(entry for history in histories for entry in history)
    for per_octave in _GRIDS:
        if len(found) <= MAX_ENTRIES:
            break
        found = _add_up(
            (_round_down(noise, per_octave), _round_up(rate, per_octave), steps) for noise, rate, steps in found
        )
    return found


def _add_up(entries: Iterable[tuple[float, float, int]]) -> History:
    out: dict[tuple[float, float], int] = {}
    for noise, rate, steps in entries:
        out[noise, rate] = out.get((noise, rate), 0) + steps
    return tuple((noise, rate, steps) for (noise, rate), steps in out.items() if steps)


def _round_down(value: float, per_octave: float) -> float:
    """The largest power of two with an exponent in steps of 1 / `per_octave` that is not above a value; 0 stays 0."""
    if value == 0:
        return 0.0
    exponent = math.floor(math.log2(value) * per_octave + _SLACK)
    found = math.exp2(exponent / per_octave)
    found = found if found <= value else math.exp2((exponent - 1) / per_octave)
    return max(found, min(value, LEAST_NOISE))


def _round_up(rate: float, per_octave: float) -> float:
    exponent = math.ceil(math.log2(rate) * per_octave - _SLACK)
    found = math.exp2(exponent / per_octave)
    return min(1.0, found if found >= rate else math.exp2((exponent + 1) / per_octave))


def choose_accountant(history: History) -> str:
    """The accountant of the reported epsilon: "gdp", the closed form, where it holds, else "rdp"."""
    return "gdp" if all(rate == 1.0 for _, rate, _ in history) else "rdp"


@functools.lru_cache(maxsize=4096)
def compute_epsilon(history: History, delta: float) -> float:
    """Computes the epsilon that is reported and compared with a budget, without the slow PRV accountant."""
    gdp = _compute_gdp(history, delta)
    return _compute_rdp(history, delta) if gdp is None else gdp


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

    if not history:
        return 0.0
    if any(noise == 0 for noise, _, _ in history):
        return math.inf
    accountant = RDPAccountant()
    # Its series do not converge for much noise; less noise costs more, so the result is still an upper bound.
    accountant.history = [
        (noise if rate == 1 else min(noise, _MOST_NOISE), rate, steps) for noise, rate, steps in history
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the best order may be the last of its list: a looser bound, but a bound
        return max(0.0, float(accountant.get_epsilon(delta)))


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
