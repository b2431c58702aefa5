"""Mix-up (Zhang et al., 2018): convex combinations of paired samples and of their labels."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def mix(ours: Tensor, theirs: Tensor, weight: Tensor) -> Tensor:
    """Computes weight * ours + (1 - weight) * theirs: exactly ours at 1, exactly theirs at 0.

    Args:
        ours: Samples along the first axis; the result has their dtype and device.
        theirs: The same number of samples, of the same shape.
        weight: One for each sample, or one for all.
    """
    return torch.lerp(theirs.to(ours), ours, weight.to(ours).reshape(-1, *[1] * (ours.dim() - 1)))


def one_hot(y: Tensor, num_classes: int) -> Tensor:
    """Labels as float32 rows that sum to 1, which can be mixed."""
    return F.one_hot(y.long(), num_classes).float()


def soft_cross_entropy(log_p: Tensor, wanted: Tensor) -> Tensor:
    """The cross-entropy of log-probabilities under label distributions, mean over the batch."""
    return -(wanted * log_p).sum(dim=1).mean()


class EndlessOrder:
    """Positions of a set in shuffled passes, one after the other, in batches of any size.

    A set smaller than a batch is repeated within it.

    Args:
        rng: Shuffles each pass.
        size: The size of the set.
    """

    def __init__(self, rng: np.random.Generator, size: int) -> None:
        if size < 1:
            raise ValueError("an empty set has no order")
        self._rng, self._size = rng, size
        self._left = np.empty(0, dtype=np.int64)

    def take(self, count: int) -> np.ndarray:
        """The next `count` positions."""
        while len(self._left) < count:
            self._left = np.concatenate([self._left, self._rng.permutation(self._size)])
        taken, self._left = self._left[:count], self._left[count:]
        return taken
