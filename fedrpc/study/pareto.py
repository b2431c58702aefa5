"""Which rows of a comparison are not dominated: no other is at least as good in everything, and better in something."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

OBJECTIVES = ("accuracy", "bytes", "seconds", "epsilon")


def find_front(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the entries of compare.json that no other dominates; those without an accuracy are left out.

    No epsilon counts as an infinite one.
    """
    known = {entry["name"]: _list_losses(entry) for entry in entries if entry["accuracy"]}
    return [name for name, losses in known.items() if not any(dominates(other, losses) for other in known.values())]


def _list_losses(entry: Mapping[str, Any]) -> tuple[float, ...]:
    """The objectives in their order, each the smaller the better."""
    epsilon = entry["privacy"]["epsilon"]
    return (
        -entry["accuracy"]["last"],
        entry["bytes"]["message"],
        entry["time"]["measured"],
        math.inf if epsilon is None else epsilon,
    )


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether losses are nowhere larger than others, and somewhere smaller."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)
