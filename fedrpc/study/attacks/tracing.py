"""Finds the originals of shared items by computing every item again and comparing bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidate:
    """An item of one client, computed again.

    Args:
        item: A digest of the item as it would have travelled.
        origin: Positions in the training set of the inputs behind it.
        inputs: A digest of these inputs: equal ones are the same original, wherever they lie.
        label: Its class; None where classes do not travel.
    """

    item: bytes
    origin: tuple[int, ...]
    inputs: bytes
    label: int | None = None


@dataclass(frozen=True)
class Trace:
    """Which shared rows are traced to their originals.

    Args:
        rows: The rows whose originals were found.
        origins: For each of them, positions in the training set.
        unknown: Rows that no candidate equals.
        ambiguous: Rows that candidates with different inputs equal, such as activations that are all zero.
    """

    rows: tuple[int, ...]
    origins: tuple[tuple[int, ...], ...]
    unknown: int
    ambiguous: int


def digest(values: Tensor) -> bytes:
    """One hash of a tensor's bits, in any dtype."""
    return hashlib.blake2b(values.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()


def trace(items: Tensor, labels: Tensor | None, candidates: Iterable[Candidate]) -> Trace:
    """Compares every shared row with every candidate: bits and, if they travelled, classes must be equal.

    Args:
        items: Shared rows, as they travelled.
        labels: Their classes; None where none travelled or where they are distributions.
    """
    known: dict[tuple[bytes, int | None], dict[bytes, tuple[int, ...]]] = {}
    for candidate in candidates:
        label = None if labels is None else candidate.label
        known.setdefault((candidate.item, label), {}).setdefault(candidate.inputs, candidate.origin)
    rows, origins, unknown, ambiguous = [], [], 0, 0
    for row, item in enumerate(items):
        found = known.get((digest(item), None if labels is None else int(labels[row])), {})
        if len(found) == 1:
            rows.append(row)
            origins.append(next(iter(found.values())))
        elif found:
            ambiguous += 1
        else:
            unknown += 1
    return Trace(tuple(rows), tuple(origins), unknown, ambiguous)
