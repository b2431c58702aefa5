"""MP-GAN's schedule of A_f: how many generated images a client has for each of its own, by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise


@dataclass(frozen=True)
class Level:
    """From a round on, every client has `a_f` generated images for each of its own."""

    start: int
    a_f: str  # as it was written, so that 0.29 of 100 is 29

    def count_images(self, num_examples: int) -> int:
        """The number of generated images for a client, rounded down."""
        return int(Fraction(self.a_f) * num_examples)


def parse_schedule(text: str) -> tuple[Level, ...]:
    """Parses "0.1", or "0.01,100:0.1": 0.01 at first, 0.1 from round 100 on.

    Raises:
        ValueError: The text has another form, or a later level is not above the one before.
    """
    levels = []
    for number, item in enumerate(text.split(",")):
        start, sign, a_f = item.strip().rpartition(":")
        if bool(sign) != bool(number):
            raise ValueError(f"expected a_f like 0.1 or 0.01,100:0.1, got '{text}'")
        try:
            levels.append(Level(int(start or 0), a_f.strip()))
            Fraction(levels[-1].a_f)
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"expected a_f like 0.1 or 0.01,100:0.1, got '{text}'") from None
    if Fraction(levels[0].a_f) < 0:
        raise ValueError(f"a_f must be 0 or more, got '{text}'")
    for one, two in pairwise(levels):
        if one.start >= two.start or Fraction(one.a_f) >= Fraction(two.a_f):
            raise ValueError(f"a_f can only rise from round to round, got '{text}'")
    return tuple(levels)


def count_added_images(levels: Sequence[Level], index: int, num_examples: int) -> int:
    """The number of images that a level adds to those of the levels before."""
    before = levels[index - 1].count_images(num_examples) if index else 0
    return levels[index].count_images(num_examples) - before
