"""The weighted mean of client models: float64 inside, cast once, integer counters by maximum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedrpc.errors import QuorumError
from fedrpc.wire.message import Tensors


class WeightedMean:
    """Adds one model at a time, so memory does not grow with the cohort.

    BatchNorm's float buffers are averaged like parameters; an integer such as `num_batches_tracked` has no mean, so
    the largest is kept.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._total = 0.0

    def add(self, tensors: Tensors, weight: float) -> None:
        """Adds one model; a client without examples (weight 0, or a lie below it) has no say."""
        if not 0 < weight < math.inf:
            return
        for name, tensor in tensors.items():
            self._add(name, tensor, weight)
        self._total += weight

    def _add(self, name: str, tensor: Tensor, weight: float) -> None:
        self._dtypes[name] = tensor.dtype
        if not tensor.is_floating_point():
            known = self._sums.get(name)
            self._sums[name] = tensor.clone() if known is None else torch.maximum(known, tensor)
        elif name in self._sums:
            self._sums[name].add_(tensor.double(), alpha=weight)
        else:
            self._sums[name] = tensor.double() * weight

    @property
    def total(self) -> float:
        """The sum of weights so far; 0 while there is nothing to average."""
        return self._total

    @property
    def value(self) -> Tensors:
        """The mean, in the dtypes that came."""
        if not self._total:
            raise QuorumError("no client that answered had any training data, so there is nothing to average")
        return {
            name: (total / self._total).to(self._dtypes[name]) if self._dtypes[name].is_floating_point else total
            for name, total in self._sums.items()
        }
