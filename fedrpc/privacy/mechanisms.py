"""Mechanisms that cover a release, and the guarantees that they give: noise, private training, or a declaration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
NO_GUARANTEE = "no guarantee"

# How neighbouring data sets differ; guarantees under different notions are not added up.
REPLACE_ONE = "replace-one"
SAME_LABEL = "replace-one, same label"  # a record's class is no secret
ZERO_OUT = "zero-out, sizes public"  # one record becomes an empty one: the number of records is no secret

History = tuple[tuple[float, float, int], ...]  # (noise multiplier, sampling rate, steps), as Opacus writes it
Histories = Mapping[str, History]  # by adjacency
MAX_ENTRIES = 64  # of a history: accountants take up to 0.07 s for each
LEAST_NOISE = 1e-3  # beside none: with less, accountants overflow
_GRIDS = (8, 4, 2, 1, 0.5, 0.25)  # values in an octave, each grid a part of the one before; the last has 45 entries
_SLACK = 1e-9  # a value that is on a grid stays there, whatever its logarithm is rounded to


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


def add_histories(several: Iterable[Histories]) -> dict[str, History]:
    """Joins what was spent at several places: the histories of one adjacency into one, and each by itself."""
    out: dict[str, History] = {}
    for histories in several:
        for adjacency, history in histories.items():
            out[adjacency] = merge_histories([out.get(adjacency, ()), history])
    return {adjacency: history for adjacency, history in out.items() if history}


class Coverage(StrEnum):
    """Whether a release is covered by a guarantee."""

    COVERED = "covered"  # a theorem holds, and the row has its cost
    CHARGED_ELSEWHERE = "charged_elsewhere"  # the same theorem; the row of another kind in the same answer has its cost
    PUBLIC = "public"
    NONE = "none"


_PREFIX = {Coverage.PUBLIC: "public: ", Coverage.NONE: f"{NO_GUARANTEE}: "}


@dataclass(frozen=True, eq=False)
class Guarantee:
    """What is promised for the parts that it is given to.

    Attributes:
        mechanism: Its name; None when nothing was done.
        parameters: The mechanism's settings, for a reader.
        about: What is promised, or why nothing is, or why the value is public.
        history: What accountants compose; empty where nothing is promised.
        adjacency: Between which data sets the promise holds.
    """

    mechanism: str | None
    parameters: Mapping[str, Any]
    about: str
    history: History = ()
    adjacency: str = ""
    coverage: Coverage = Coverage.COVERED

    @property
    def covers(self) -> str:
        """The sentence for privacy rows and tables."""
        return _PREFIX.get(self.coverage, "") + self.about

    @property
    def is_uncovered(self) -> bool:
        """Whether nothing is promised; a guarantee that claims coverage without a cost counts as none."""
        return self.coverage is Coverage.NONE or (self.coverage is Coverage.COVERED and not self.history)

    @property
    def histories(self) -> dict[str, History]:
        """Its cost, by adjacency."""
        return {self.adjacency: self.history} if self.history else {}


class Mechanism(Protocol):
    """Turns a value into what may leave a client, and states the guarantee."""

    @property
    def guarantee(self) -> Guarantee:
        """Always the same object: parts that share it are one release."""
        ...

    def apply(self, value: T, noise: torch.Generator) -> T:
        """The value as it leaves."""
        ...


@dataclass(frozen=True)
class Declared:
    """Leaves a value as it is and declares that it is already covered, public, or uncovered."""

    guarantee: Guarantee

    def apply(self, value: T, noise: torch.Generator) -> T:
        """The value itself."""
        return value


class Trainings:
    """All private trainings of one answer, as one release: each may depend on the results of the others."""

    def __init__(self) -> None:
        self.count = 0
        self._guarantee: Guarantee | None = None

    def add(self, guarantee: Guarantee) -> Trainings:
        """Adds a training's guarantee; returns itself, as the mechanism that covers the result."""
        before = self._guarantee
        if before is not None:
            # What is not covered stays so, whatever was trained with noise beside it.
            weakest = before if before.coverage == Coverage.NONE else guarantee
            guarantee = replace(weakest, history=merge_histories([before.history, guarantee.history]))
        self._guarantee, self.count = guarantee, self.count + 1
        return self

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of all trainings so far."""
        assert self._guarantee is not None, "nothing was trained privately"
        return self._guarantee

    def apply(self, value: T, noise: torch.Generator) -> T:
        """The value itself, which training has made noisy already."""
        return value


def no_guarantee(why: str) -> Declared:
    """Declares that no theorem covers a release."""
    return Declared(Guarantee(None, {}, why, coverage=Coverage.NONE))


def public(why: str) -> Declared:
    """Declares that a value is known to everybody or does not depend on data."""
    return Declared(Guarantee(None, {}, why, coverage=Coverage.PUBLIC))


class Gaussian:
    """Adds independent noise to every value of a tensor.

    Args:
        std: Standard deviation of the noise, in the tensor's own units.
        sensitivity: How far one record can move one draw, in the 2-norm.
        draws: How many independent noisy draws of one record the tensor holds.
        covers: What is protected under which condition: the end of the sentence "record-level, ...".
        adjacency: How neighbouring data sets differ.
        parameters: More settings for the privacy row.
    """

    def __init__(
        self,
        std: float,
        sensitivity: float,
        *,
        draws: int = 1,
        covers: str,
        adjacency: str = REPLACE_ONE,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if not (std >= 0 and sensitivity > 0 and draws >= 1):
            raise ValueError(
                "expected noise of at least 0, draws of at least 1 and a sensitivity above 0, "
                f"got {std}, {draws} and {sensitivity}"
            )
        self.std, self._used = std, False
        settings = {"std": std, "sensitivity": sensitivity, "draws": draws} | dict(parameters or {})
        self.guarantee = (
            Guarantee("gaussian", settings, f"record-level, {covers}", ((std / sensitivity, 1.0, draws),), adjacency)
            if std
            else Guarantee("gaussian", settings, "the noise is zero", coverage=Coverage.NONE)
        )

    def apply(self, value: Any, noise: torch.Generator) -> Any:
        """Adds the noise; works once, since another value would be another release."""
        if self._used:
            raise ValueError("a Gaussian mechanism covers one release: build another one for another value")
        self._used = True
        if not isinstance(value, Tensor):
            raise TypeError(f"the Gaussian mechanism takes a tensor, got {type(value).__name__}")
        drawn = torch.randn(value.shape, generator=noise, dtype=torch.float64)
        return (value.double() + self.std * drawn.to(value.device)).to(value.dtype)
