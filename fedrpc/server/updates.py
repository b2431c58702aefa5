"""Holds the answers of one question against what the server knows: the partition, and the other clients' updates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedrpc.methods.phases import ClientId, Phase
from fedrpc.wire.message import Tensors, counted_fields, fields_by_epoch

_LEAST_UPDATES = 3  # fewer have no majority that could be right
_MOST_NORM = 1e9  # of any update: a network so far away has no use for its training
_BLOCK = 1 << 16  # values at a time: small enough to stay in the cache
_GROUPS = ("", " (integers)")  # counters of batches would hide what weights do: they have a norm of their own


def check_counts(answer: Any, most: int, epochs: int) -> None:
    """Raises ValueError when an answer counts what cannot be.

    Args:
        most: The most examples that its client can have trained on.
        epochs: The epochs of a local training.
    """
    cls: type = type(answer)
    for name in counted_fields(cls):
        counts = _list_numbers(getattr(answer, name))
        if any(not count >= 0 for count in counts) or sum(counts) > most:
            raise ValueError(f"'{name}' should count at most {most} examples, got {_shorten(counts)}")
    for name in fields_by_epoch(cls):
        if len(values := _list_numbers(getattr(answer, name))) > max(1, epochs):
            raise ValueError(f"'{name}' should have a value for each of {epochs} epochs, got {len(values)}")


def _list_numbers(value: Any) -> Sequence[Any]:
    if isinstance(value, Tensor):
        return value.reshape(-1).tolist()
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _shorten(counts: Sequence[Any]) -> str:
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[:10]}"


class UpdateNorms:
    """The norms of a cohort's updates: how far each moved from what its client was sent.

    An update whose norm is out of all proportion to the others' is refused. It is measured when it is read, and judged
    when all were read, since the first could be the wrong one.

    Args:
        phase: The question.
        weighers: The fields that are averaged, with what gives an answer's weight.
        num_examples: Of every client. One that has more than the median takes more steps, and may move farther.
        ratio: The largest norm, in medians.
    """

    def __init__(
        self,
        phase: Phase[Any, Any],
        weighers: Mapping[str, Callable[[Any], float]],
        num_examples: Sequence[int],
        ratio: float,
    ) -> None:
        self._weighers, self._num_examples, self._ratio = weighers, num_examples, ratio
        self._sent = {name for name, asked in phase.same_fields.items() if name == asked}
        self._norms: dict[str, dict[ClientId, float]] = {}

    def measure(self, client: ClientId, question: Any, answer: Any) -> None:
        """Notes the norms of one update; those without a weight are in no mean, and are left out."""
        for name, weigh in self._weighers.items():
            tensors: Tensors | None = getattr(answer, name)
            if tensors is None or not weigh(answer) > 0:
                continue
            start: Tensors = getattr(question, name) if name in self._sent else {}
            for group, norm in zip(_GROUPS, _measure_norms(tensors, start), strict=True):
                self._norms.setdefault(name + group, {})[client] = norm

    def find_outliers(self) -> dict[ClientId, str]:
        """Finds the clients whose updates are refused, with the reasons."""
        found: dict[ClientId, str] = {}
        for name, norms in self._norms.items():
            median = statistics.median(norms.values()) if len(norms) >= _LEAST_UPDATES else 0.0
            usual = statistics.median(self._num_examples[client] for client in norms)
            for client, norm in norms.items():
                # A median of 0 says nothing: most clients did not move at all.
                larger = max(1.0, self._num_examples[client] / usual) if usual else 1.0
                limit = min(_MOST_NORM, self._ratio * median * larger if median else math.inf)
                if not norm <= limit:
                    found.setdefault(
                        client,
                        f"its update of {name} has a norm of {norm:.3g}, expected {limit:.3g} at most; the median of "
                        f"{len(norms)} updates is {statistics.median(norms.values()):.3g} (limits.update_norm)",
                    )
        return found


def _measure_norms(tensors: Tensors, start: Tensors) -> tuple[float, float]:
    """The norms of the difference, of real tensors and of all others; infinity where a float cannot hold it."""
    squares = [0.0, 0.0]
    for name, tensor in tensors.items():
        values, origin = tensor.reshape(-1), start[name].reshape(-1) if name in start else None
        for at in range(0, len(values), _BLOCK):
            block = _widen(values[at : at + _BLOCK])
            if origin is not None:
                block = block - _widen(origin[at : at + _BLOCK])
            squares[not tensor.is_floating_point()] += float(torch.linalg.vector_norm(block)) ** 2
    return math.sqrt(squares[0]), math.sqrt(squares[1])


def _widen(values: Tensor) -> Tensor:
    """Values of a type that has norms."""
    if values.is_complex():
        return values.to(torch.complex128)
    return values if values.dtype in (torch.float32, torch.float64) else values.double()
