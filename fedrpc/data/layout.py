"""Writes a data set folder: arrays as raw .npy, a meta.json with their checksums, completely or not at all.

    <data-dir>/<name>/{x_train,y_train,x_test,y_test}.npy   uint8 (N, C, ...) divided by `scale`, or float32 signals
    <data-dir>/<name>/{group_train,group_test}.npy          optional: person, speaker or recording of each sample
    <data-dir>/<name>/meta.json                             classes, shape, dtype, scale, mean, std, sha256, ...

Such a folder is all that a data set of your own needs; `write` makes one from arrays in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedrpc.errors import DataError

SPLITS = ("train", "test")
BLOCK_BYTES = 16 * 2**20

Progress = Callable[[str, int, int], None]  # (step, done, total)


@dataclass(frozen=True, eq=False)
class Raw:
    """A data set in memory, ready to be written.

    Attributes:
        arrays: "x_train", "y_train", "x_test", "y_test" and, where samples have one, "group_train", "group_test".
        classes: The name of each label, in order.
        scale: The divisor that brings stored values into [0, 1]; 1 for signals.
    """

    arrays: Mapping[str, np.ndarray]
    classes: tuple[str, ...]
    scale: float


def write(folder: Path, name: str, raw: Raw, *, licence: str, source: str) -> None:
    """Writes the arrays and meta.json of data set `name` into `folder`, which is created if needed.

    Labels and groups are stored as int64, so that a reader maps them without a copy.
    """
    for split in SPLITS:
        if (bad := find_not_finite(raw.arrays[f"x_{split}"])) is not None:
            raise DataError(
                f"data set '{name}', x_{split}: expected finite numbers, got NaN or infinity in sample {bad}"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for key, values in raw.arrays.items():
        stored = np.ascontiguousarray(values if key.startswith("x_") else np.asarray(values, dtype=np.int64))
        np.save(folder / f"{key}.npy", stored, allow_pickle=False)
    write_meta(folder, name, raw.classes, raw.scale, licence=licence, source=source)


def write_meta(
    folder: Path,
    name: str,
    classes: Sequence[str],
    scale: float,
    *,
    licence: str,
    source: str,
    standardise: bool = True,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Writes the meta.json of the arrays that are in `folder`, which are read by memory map.

    Args:
        standardise: Whether the training set's mean and deviation of each channel are written, by which inputs are
            standardised when they are read; otherwise 0 and 1, which change nothing.
        more: Further keys, for people to read.
    """
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}
    x = arrays["x_train"]
    channels = x.shape[1]
    mean, std = measure_channels(x, scale) if standardise else ([0.0] * channels, [1.0] * channels)
    meta: dict[str, Any] = {
        "name": name,
        "classes": list(classes),
        "shape": list(x.shape[1:]),
        "dtype": str(x.dtype),
        "scale": float(scale),
        "mean": mean,
        "std": std,
        "licence": licence,
        "source": source,
        **(more or {}),
        "sha256": {key: hash_array(values) for key, values in arrays.items()},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder that replaces `folder` if the block succeeds and is removed if it fails.

    Processes that have the old folder's files mapped keep them.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def iterate_blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    """The rows of `values` in contiguous blocks of a bounded size, so that a mapped array is never loaded whole."""
    row_bytes = max(1, values.nbytes // max(1, len(values)))
    step = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, len(values), step):
        yield np.ascontiguousarray(values[start : start + step])


def find_not_finite(x: np.ndarray) -> int | None:
    """The first sample with NaN or infinity in it; integer arrays are not checked."""
    start = 0
    for block in iterate_blocks(x) if x.dtype.kind == "f" else ():
        bad = np.flatnonzero(~np.isfinite(block).reshape(len(block), -1).all(axis=1))
        if bad.size:
            return start + int(bad[0])
        start += len(block)
    return None


def hash_array(values: np.ndarray) -> str:
    """SHA-256 of the values in C order, without the .npy header."""
    digest = hashlib.sha256()
    for block in iterate_blocks(values):
        digest.update(block.data)
    return digest.hexdigest()


def measure_channels(x: np.ndarray, scale: float) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel after division by `scale`, to six digits.

    A constant channel gets deviation 1, so that standardising it gives zeros rather than NaN.
    """
    axes = (0, *range(2, x.ndim))
    count = x.size / x.shape[1]
    total = sum((block.sum(axes, dtype=np.float64) for block in iterate_blocks(x)), np.zeros(x.shape[1]))
    mean = total / count
    centre = mean.reshape(-1, *(1,) * (x.ndim - 2))
    squares = sum((((block - centre) ** 2).sum(axes) for block in iterate_blocks(x)), np.zeros(x.shape[1]))
    std = np.sqrt(squares / count)
    std = np.where(std / scale < 1e-6, scale, std)
    return (mean / scale).round(6).tolist(), (std / scale).round(6).tolist()
