"""Generated images as training data: how many by round, which of them, under what label, and for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrpc.methods.blocks.mixup import EndlessOrder


@dataclass(frozen=True)
class Level:
    """From a round on, every client has this many generated images for each of its own."""

    start: int
    a_f: str  # as it was written, so that 0.29 of 100 is 29

    def images(self, num_examples: int) -> int:
        """How many, rounded down."""
        return int(Fraction(self.a_f) * num_examples)


def schedule(text: str) -> tuple[Level, ...]:
    """The levels of "0.1", or of "0.01,100:0.1": 0.01 at first, 0.1 from round 100 on.

    Raises:
        ValueError: It does not read like that, or a later level is not above the one before.
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
            raise ValueError(f"a_f can only rise, from round to later round, got '{text}'")
    return tuple(levels)


def added(levels: Sequence[Level], index: int, num_examples: int) -> int:
    """How many images a level adds to those of the levels before."""
    before = levels[index - 1].images(num_examples) if index else 0
    return levels[index].images(num_examples) - before


@dataclass(frozen=True)
class Labelled:
    """Images that were accepted under a label, and what it took."""

    x: Tensor
    y: Tensor
    num_wanted: int
    num_candidates: int
    num_confident: int

    def record(self, num_classes: int) -> dict[str, Any]:
        """For records.jsonl."""
        return {
            "wanted": self.num_wanted,
            "candidates": self.num_candidates,
            "confident": self.num_confident,
            "acceptance_rate": self.num_confident / self.num_candidates if self.num_candidates else None,
            "kept": len(self.y),
            "label_histogram": torch.bincount(self.y, minlength=num_classes).tolist(),
        }


Candidates = tuple[Tensor, Tensor, Tensor]  # images, their labels, and which of these are good enough


def judged_by(classifier: nn.Module, tau: float, device: torch.device) -> Callable[[Tensor], Candidates]:
    """Labels by a classifier, good enough where its confidence is `tau` at least."""
    classifier = classifier.to(device).eval()

    @torch.no_grad()
    def judge(x: Tensor) -> Candidates:
        confidence, y = F.softmax(classifier(x.to(device)), dim=1).max(dim=1)
        return x, y.cpu(), confidence.cpu() >= tau

    return judge


def accepted(batches: Iterator[Candidates], num_wanted: int, num_classes: int, max_candidates: int) -> Labelled:
    """Images with a good label, as many of each class, until there are enough.

    Args:
        batches: Without end.
        max_candidates: After so many no more are looked at: a class that is never seen must not hold up a run.
    """
    room = torch.full((num_classes,), ceil(num_wanted / num_classes))
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    num_kept = candidates = confident = 0
    while num_kept < num_wanted and candidates < max_candidates:
        x, y, good = next(batches)
        candidates, confident = candidates + len(y), confident + int(good.sum())
        rows = [row for row in good.nonzero()[:, 0].tolist() if _takes(room, int(y[row]))][: num_wanted - num_kept]
        xs.append(x[rows])
        ys.append(y[rows])
        num_kept += len(rows)
    return Labelled(torch.cat(xs), torch.cat(ys), num_wanted, candidates, confident)


def _takes(room: Tensor, label: int) -> bool:
    room[label] -= 1
    return bool(room[label] >= 0)


def drawn(pool_size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """A client's random images of a pool; a larger count only adds to a smaller one, a small pool is repeated."""
    return EndlessOrder(rng, pool_size).take(count)
