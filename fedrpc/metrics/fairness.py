"""How evenly a model serves clients and classes, in percent and percent squared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ClientFairness:
    """Of one global model on every client's local test.

    Attributes:
        mean: Unweighted mean of the clients' accuracies, percent.
        variance: Population variance of the same, percent squared.
        worst_decile: Mean accuracy of the worst tenth of the clients (rounded up), percent.
        jain: Jain's index, 1 when all are equal and 1/K when one client has everything.
    """

    mean: float
    variance: float
    worst_decile: float
    jain: float


@dataclass(frozen=True)
class ClassFairness:
    """Of one global model on the external test.

    Attributes:
        recalls: Percent correct of each class; None for a class without examples.
        mean: Over the classes with examples, percent; on balanced data this is the accuracy.
        variance: Population variance over the same, percent squared.
    """

    recalls: tuple[float | None, ...]
    mean: float
    variance: float


def client_fairness(percentages: Sequence[float]) -> ClientFairness:
    """Fairness over clients from their accuracies in percent.

    Values that look like fractions are refused: they would give a variance ten thousand times too small.
    Counts are unambiguous: prefer `client_fairness_of_counts`.

    Raises:
        ValueError: No client, a value outside 0 to 100, or fractions.
    """
    values = _check_percentages(percentages)
    return ClientFairness(_mean(values), _variance(values), _worst_decile(values), jain_index(values))


def client_fairness_of_counts(correct: Sequence[int], total: Sequence[int]) -> ClientFairness:
    """Fairness over clients from their numbers of correct and of all test examples.

    Raises:
        ValueError: No client, or a client without test examples: leave it out.
    """
    values = [_percent(*pair) for pair in zip(correct, total, strict=True)]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        raise ValueError(f"client {values.index(None)} has no test examples, so no accuracy; leave it out")
    _require_values(known)
    return ClientFairness(_mean(known), _variance(known), _worst_decile(known), jain_index(known))


def class_fairness(correct: Sequence[int], total: Sequence[int]) -> ClassFairness:
    """Fairness over classes from each true class's numbers of correct and of all test examples.

    Raises:
        ValueError: No class has an example.
    """
    recalls = tuple(_percent(*pair) for pair in zip(correct, total, strict=True))
    known = [recall for recall in recalls if recall is not None]
    _require_values(known)
    return ClassFairness(recalls, _mean(known), _variance(known))


def jain_index(values: Sequence[float]) -> float:
    """(sum of values)^2 / (number * sum of squares), free of units; all zero counts as equal."""
    _require_values(values)
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _check_percentages(percentages: Sequence[float]) -> Sequence[float]:
    _require_values(percentages)
    for value in percentages:
        if not 0 <= value <= 100:  # also refuses NaN
            raise ValueError(f"accuracies are percentages from 0 to 100, got {value}")
    if max(percentages) <= 1 and any(0 < value < 1 for value in percentages):
        raise ValueError(f"accuracies are percentages, but these look like fractions: at most {max(percentages)}")
    return percentages


def _percent(part: int, whole: int) -> float | None:
    if not 0 <= part <= whole:
        raise ValueError(f"{part} correct of {whole} examples is impossible")
    return 100.0 * part / whole if whole else None


def _require_values(values: Sequence[float]) -> None:
    if not values:
        raise ValueError("fairness needs at least one value, got none")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)


def _worst_decile(values: Sequence[float]) -> float:
    return _mean(sorted(values)[: math.ceil(len(values) / 10)])
