"""The bytes of a run by a method's own formula, to compare with the measured ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from fedrpc.methods.phases import ClientId
from fedrpc.methods.runtime import Env, P_co
from fedrpc.wire.kinds import Direction, Kind


@dataclass(frozen=True)
class Shapes(Generic[P_co]):
    """The inputs of a cost formula: sizes only.

    Args:
        weights_bytes: The network's payload: 4 bytes a float and 8 a BatchNorm counter.
        cohorts: The clients asked in each round.
        num_examples: Training examples of every client.
        class_counts: The same by class.
    """

    weights_bytes: int
    cohorts: Sequence[Sequence[ClientId]]
    num_examples: Sequence[int]
    class_counts: Sequence[Sequence[int]]
    env: Env[P_co]

    @property
    def sample_floats(self) -> int:
        """The number of values of one input."""
        return math.prod(self.env.shape)

    @property
    def num_asked(self) -> int:
        """The number of participations over all rounds."""
        return sum(len(cohort) for cohort in self.cohorts)


@dataclass
class Cost:
    """Tensor bytes that a formula predicts, by direction and kind.

    Args:
        at_most: Where a run may send less than predicted, since how much depends on what it learns.
    """

    down: dict[Kind, int] = field(default_factory=dict)
    up: dict[Kind, int] = field(default_factory=dict)
    at_most: set[tuple[Direction, Kind]] = field(default_factory=set)

    def add(self, direction: Direction, kind: Kind, size_bytes: int, *, at_most: bool = False) -> Cost:
        """Adds bytes, and returns itself so that a formula reads as one sum."""
        side = self.down if direction == "down" else self.up
        side[kind] = side.get(kind, 0) + size_bytes
        if at_most:
            self.at_most.add((direction, kind))
        return self
