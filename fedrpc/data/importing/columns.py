"""Encodes columns as numbers: imputed, standardised, one-hot; everything is learned from the training rows only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedrpc.data.importing.material import Converted, Options, Rows, join_names, require
from fedrpc.errors import DataError

MISSING = "(missing)"
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Encoded:
    """Some columns as inputs of a network.

    Attributes:
        values: Of all rows, (n, inputs).
        columns: A description of each input, for meta.json.
        notes: As of Converted.
    """

    values: np.ndarray
    columns: Sequence[dict[str, Any]]
    notes: Sequence[str]


def encode_numbers(values: np.ndarray, names: Sequence[str], train: np.ndarray, options: Options) -> Encoded:
    """Columns of numbers, NaN where one is missing: filled by the training rows' median, constants left out.

    Of a constant that is missing in some training rows, there is an input that says where.
    """
    x = np.asarray(values, dtype=np.float64)
    _refuse_large(x, names, "")
    missing = np.isnan(x)
    present = ~missing[train].all(axis=0)
    median = np.zeros(x.shape[1])
    median[present] = np.nanmedian(x[train][:, present], axis=0)
    x = np.where(missing, median, x)
    mean, std = _measure(x[train])
    varies = present & (x[train].max(axis=0) > x[train].min(axis=0))
    gaps = present & ~varies & missing[train].any(axis=0)
    if options.standardise:
        with np.errstate(over="ignore"):  # what overflows is refused
            x = (x - mean) / np.where(varies, std, 1.0)
        _refuse_large(x, names, ", in deviations of the training rows")
    columns: list[dict[str, Any]] = [
        {
            "name": names[at],
            "kind": "number",
            "mean": float(mean[at]),
            "std": float(std[at]),
            "median": float(median[at]),
        }
        for at in np.flatnonzero(varies).tolist()
    ]
    columns += [{"name": f"{names[at]}={MISSING}", "kind": "category"} for at in np.flatnonzero(gaps).tolist()]
    notes = _describe(names, missing, varies, gaps)
    return Encoded(np.concatenate([x[:, varies], missing[:, gaps]], axis=1), columns, notes)


def _measure(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of columns, also of those whose squares would be too small for a float."""
    mean = x.mean(axis=0)
    spread = np.abs(x - mean).max(axis=0)
    unit = np.where((spread > 0) & (spread < 1e-100), spread, 1.0)
    return mean, (x / unit).std(axis=0) * unit


def _describe(names: Sequence[str], missing: np.ndarray, varies: np.ndarray, gaps: np.ndarray) -> list[str]:
    counted = [f"{name} ({count})" for name, count in zip(names, missing.sum(axis=0).tolist(), strict=True)]
    notes = []
    if filled := [counted[at] for at in np.flatnonzero(missing.any(axis=0) & varies).tolist()]:
        notes.append(f"missing numbers are filled by the training median: {join_names(filled)}")
    if only := [counted[at] for at in np.flatnonzero(gaps).tolist()]:
        notes.append(
            f"the input is whether it is missing, since all other training rows are the same: {join_names(only)}"
        )
    if constant := [names[at] for at in np.flatnonzero(~varies & ~gaps).tolist()]:
        notes.append(f"left out, the same in every training row: {join_names(constant)}")
    return notes


def _refuse_large(x: np.ndarray, names: Sequence[str], unit: str) -> None:
    """Raises DataError for numbers that a float32, in which inputs are stored, cannot hold."""
    found = np.argwhere(np.abs(x) > LARGEST)
    if not len(found):
        return
    row, column = found[0].tolist()
    infinite = np.isinf(x[row, column])
    expected = "finite numbers" if infinite else f"numbers of at most {LARGEST:.1e}"
    got = f"{'infinity' if infinite else f'{x[row, column]:g}'} in row {row + 1}{unit}"
    require(False, f"column '{names[column]}'", expected, got, "correct or empty it")


def encode_categories(values: np.ndarray, name: str, train: np.ndarray, options: Options) -> Encoded:
    """A column of names as one input for each; rare ones, and those not seen in training, share the last."""
    from sklearn.preprocessing import OneHotEncoder  # slow to import

    encoder = OneHotEncoder(
        max_categories=options.max_categories, handle_unknown="infrequent_if_exist", sparse_output=False
    )
    x = encoder.fit(values[train, None]).transform(values[:, None])
    rare = encoder.infrequent_categories_[0]
    rare = [] if rare is None else [str(each) for each in rare]
    kept = [str(each) for each in encoder.categories_[0] if str(each) not in set(rare)]
    notes = []
    if len(kept) + len(rare) == 1:
        return Encoded(x[:, :0], [], [f"left out, the same in every training row: {name}"])
    if rare:
        notes.append(
            f"{name}: the {len(rare)} rarest of {len(kept) + len(rare)} values share one input (--max-categories)"
        )
    names = [f"{name}={each}" for each in kept] + ([f"{name}=(rare)"] if rare else [])
    return Encoded(x, [{"name": each, "kind": "category"} for each in names], notes)


def encode_words(values: Sequence[str], name: str, train: np.ndarray, options: Options) -> Encoded:
    """A column of text as one input for each of the most frequent words of the training rows, weighted by TF-IDF.

    Words are lower-case runs of two or more letters or digits. Rows have unit length, so that long texts weigh no more.
    A network's first layer is then an embedding: the weighted sum of its words' vectors, without their order.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer  # slow to import

    vectorizer = TfidfVectorizer(max_features=options.max_words, dtype=np.float32)
    try:
        vectorizer.fit([values[row] for row in train])
    except ValueError:
        raise DataError(
            f"column '{name}': expected text, got no word of two letters or more in any training row; choose another "
            "--text"
        ) from None
    words = vectorizer.get_feature_names_out().tolist()
    notes = [f"{name}: each of {len(words):,} words of the training rows is an input, by TF-IDF (--max-words)"]
    return Encoded(
        vectorizer.transform(values).toarray(), [{"name": f"{name}~{word}", "kind": "word"} for word in words], notes
    )


def write_columns(parts: Sequence[Encoded], folder: Path, rows: Rows) -> Converted:
    """Writes the encoded columns side by side as float32; they are standardised already, or are not to be."""
    x = np.concatenate([part.values for part in parts], axis=1).astype(np.float32)
    require(x.shape[1] > 0, "the table", "a column that differs between rows", "none", "give more columns")
    for split, index in rows.items():
        np.save(folder / f"x_{split}.npy", x[index])
    notes = [note for part in parts for note in part.notes]
    return Converted(1.0, False, notes, {"columns": [column for part in parts for column in part.columns]})
