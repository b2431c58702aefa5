"""The weighted mean of client models: float64 inside, cast once, integer counters by maximum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedrpc.aggregation.aggregator import Aggregator, register_aggregator
from fedrpc.errors import QuorumError
from fedrpc.methods.phases import ClientId
from fedrpc.wire.message import Tensors

_BLOCK = 1 << 16  # values converted at a time: small enough to stay in the cache


class WeightedMean:
    """Adds one model at a time, so memory does not grow with the cohort.

    BatchNorm's float buffers are averaged like parameters; an integer such as `num_batches_tracked` has no mean, so
    the largest is kept.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._total = 0.0

    def add(self, tensors: Tensors, weight: float, client: ClientId | None = None) -> None:
        """Adds one model; one without a positive weight (a client without examples) is left out.

        Raises:
            ValueError: It has other names or shapes than the models before.
        """
        if not 0 < weight < math.inf:
            return
        if self._sums and (other := _find_difference(self._sums, tensors)):
            raise ValueError(f"the models of a mean must have the same tensors: '{other}' differs")
        for name, tensor in tensors.items():
            self._add(name, tensor, weight)
        self._total += weight

    def _add(self, name: str, tensor: Tensor, weight: float) -> None:
        self._dtypes[name] = tensor.dtype
        if not tensor.is_floating_point():
            known = self._sums.get(name)
            self._sums[name] = tensor.clone() if known is None else torch.maximum(known, tensor)
        elif name in self._sums:
            # A whole float64 copy of a large tensor would pass through memory twice: five times as slow.
            sums, values = self._sums[name].view(-1), tensor.reshape(-1)
            for start in range(0, len(values), _BLOCK):
                end = start + _BLOCK
                sums[start:end].add_(values[start:end].double(), alpha=weight)
        else:
            self._sums[name] = tensor.double().contiguous() * weight

    @property
    def total(self) -> float:
        """The sum of weights so far; 0 while there is nothing to average."""
        return self._total

    def combine(self) -> Tensors:
        """The mean, in the dtypes of the models that were added."""
        if not self._total:
            raise QuorumError("no client that answered had any training data, so there is nothing to average")
        return {
            name: (total / self._total).to(self._dtypes[name]) if self._dtypes[name].is_floating_point else total
            for name, total in self._sums.items()
        }


def _find_difference(one: Tensors, other: Tensors) -> str | None:
    """A name that only one has, or under which shapes differ."""
    for name in [*one, *other]:
        if name not in one or name not in other or one[name].shape != other[name].shape:
            return name
    return None


@register_aggregator
class Mean(Aggregator[None]):
    """The weighted mean, as in FedAvg."""

    name = "mean"
    combines = True

    def make_combiner(self, state: None) -> WeightedMean:
        """A fresh mean."""
        return WeightedMean()
