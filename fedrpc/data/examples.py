"""Examples: labelled inputs that become float tensors only a batch at a time, so that clients stay small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Fetch = Callable[[np.ndarray], Tensor]


class Examples:
    """A labelled set of inputs.

    Args:
        y: Labels.
        fetch: Returns the normalised float32 inputs at some positions.
    """

    def __init__(self, y: Tensor, fetch: Fetch) -> None:
        self.y = y
        self._fetch = fetch

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Examples:
        """Examples that are in memory as float tensors already."""
        return cls(y, lambda index: x[torch.from_numpy(index)])

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and labels at some positions."""
        return self._fetch(index), self.y[torch.from_numpy(index)]

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Everything once, in order."""
        for start in range(0, len(self), size):
            yield self.batch(np.arange(start, min(start + size, len(self))))

    def all(self) -> tuple[Tensor, Tensor]:
        """Everything at once."""
        return self.batch(np.arange(len(self)))

    def subset(self, index: np.ndarray) -> Examples:
        """Some positions as a set of their own."""
        return Examples(self.y[torch.from_numpy(index)], lambda inner: self._fetch(index[inner]))

    def __add__(self, other: Examples) -> Examples:
        """Both sets, one after the other."""
        first = len(self)

        def fetch(index: np.ndarray) -> Tensor:
            mine = index < first
            if mine.all():
                return self._fetch(index)
            if not mine.any():
                return other._fetch(index - first)
            left, right = self._fetch(index[mine]), other._fetch(index[~mine] - first)
            out = torch.empty((len(index), *left.shape[1:]), dtype=left.dtype)
            out[torch.from_numpy(mine)], out[torch.from_numpy(~mine)] = left, right
            return out

        return Examples(torch.cat([self.y, other.y]), fetch)


@dataclass(frozen=True)
class ClientData:
    """One client's own data, normalised."""

    train: Examples
    test: Examples
    num_classes: int
    shape: tuple[int, ...]
