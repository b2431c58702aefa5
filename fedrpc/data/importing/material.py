"""What every importer gives: what lies there, before anything is converted, and how to convert it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedrpc.data.layout import Progress
from fedrpc.data.prepare_audio import RATE, SECONDS
from fedrpc.errors import DataError

TEST_SHARE = 0.2
LISTED = 8  # names in a message


@dataclass(frozen=True)
class Options:
    """What a person may decide about an import; None leaves it to what lies there.

    Attributes:
        label: The column with the label.
        group: The column with the person, device or site; for folders "folder" (below the class) or "prefix" (of a
            file's name, up to the first `_` or `-`).
        text: The column with text, of which each word becomes an input.
        max_words: The most words of a text column that become inputs, the most frequent ones.
        drop: Columns to leave out.
        max_categories: The most inputs that one column of categories becomes; rarer categories share the last one.
        test: The share of the examples to test on.
        test_path: Examples to test on, in a folder or file of their own.
        seed: Decides who is tested.
        size: The side of images, in pixels.
        grey: Whether images become grey.
        signals: Whether arrays (n, a, b) are signals of a channels, or grey images.
        standardise: Whether inputs get zero mean and unit deviation over the training examples.
        seconds: The length of a sound.
        rate: The rate to which sounds are resampled, in Hz.
    """

    label: str | None = None
    group: str | None = None
    text: str | None = None
    max_words: int = 1000
    drop: tuple[str, ...] = ()
    max_categories: int = 32
    test: float | None = None
    test_path: Path | None = None
    seed: int = 0
    size: int | None = None
    grey: bool | None = None
    signals: bool | None = None
    standardise: bool = True
    seconds: float = SECONDS
    rate: int = RATE


@dataclass(frozen=True)
class Converted:
    """What converting found out.

    Attributes:
        scale: The divisor of the stored values.
        standardise: Whether a network's inputs are standardised by channel when they are read.
        notes: What was done that the person should know, a sentence each.
        more: Further keys of meta.json.
    """

    scale: float
    standardise: bool
    notes: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


Rows = Mapping[str, np.ndarray]  # positions by "train" and "test"
Convert = Callable[[Path, Rows, Progress], Converted]


@dataclass(frozen=True, eq=False)
class Material:
    """Labelled examples as they lie there.

    Attributes:
        what: What was found, in words, such as "a table of 600 rows".
        labels: The label of each example.
        classes: The name of each label.
        groups: The name of each example's group.
        in_test: Which examples their owner has put aside to test on; None when nobody has.
        convert: Writes x_train.npy and x_test.npy into a folder, by memory map where they may be large.
        notes: As of Converted.
    """

    what: str
    labels: np.ndarray
    classes: tuple[str, ...]
    groups: np.ndarray | None
    in_test: np.ndarray | None
    convert: Convert
    notes: tuple[str, ...] = ()


def name_classes(values: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels from the names of classes, and these names in order: numbers by value, others by letter."""
    names, labels = np.unique(values.astype(str), return_inverse=True)
    order = _sort_by_number(names)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank[labels], tuple(str(names[position]) for position in order)


def _sort_by_number(names: np.ndarray) -> np.ndarray:
    try:
        return np.argsort(names.astype(np.float64), kind="stable")
    except ValueError:
        return np.arange(len(names))


def join_names(names: Sequence[str]) -> str:
    """Names for a message, the first few of them."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{', '.join(names[:LISTED])}{more}"


def require(condition: bool, where: object, expected: str, got: object, remedy: str) -> None:
    """Raises DataError in one line unless `condition` holds."""
    if not condition:
        raise DataError(f"{where}: expected {expected}, got {got}; {remedy}")
