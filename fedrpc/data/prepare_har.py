"""Reads the official UCI HAR archive, unpacked or zipped: 2.56 s windows of a waist smartphone, by person."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedrpc.data.layout import SPLITS, Progress, Raw
from fedrpc.errors import DataError

CLASSES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("total_acc", "body_gyro") for axis in "xyz")
WINDOW = 128
MARKER = "train/y_train.txt"


def make(source: Path | None, cache: Path, progress: Progress) -> Raw:
    """Total acceleration and body gyroscope as (N, 6, 128) float32, labels 0 to 5, subjects as groups."""
    if source is None:
        raise DataError(
            "data set 'uci-har' is not downloaded for you: expected --source with the official archive "
            "(UCI HAR Dataset.zip of archive.ics.uci.edu/dataset/240) or its unpacked folder, got none"
        )
    read = _open_source(source)
    arrays: dict[str, np.ndarray] = {}
    total = len(SPLITS) * len(SIGNALS)
    for number, split in enumerate(SPLITS):
        channels: list[np.ndarray] = []
        for signal in SIGNALS:
            progress("read", number * len(SIGNALS) + len(channels), total)
            channels.append(_read_matrix(read, f"{split}/Inertial Signals/{signal}_{split}.txt"))
        arrays[f"x_{split}"] = np.stack(channels, axis=1)
        arrays[f"y_{split}"] = _read_column(read, f"{split}/y_{split}.txt", len(channels[0])) - 1
        arrays[f"group_{split}"] = _read_column(read, f"{split}/subject_{split}.txt", len(channels[0]))
    progress("read", total, total)
    return Raw(arrays, CLASSES, 1.0)


def _open_source(source: Path) -> Callable[[str], bytes]:
    """A function that gives a file of the archive by its path below "UCI HAR Dataset"."""
    if source.is_dir():
        root = next((path.parent.parent for path in sorted(source.rglob("y_train.txt"))), None)
        if root is None:
            raise _not_there(source, MARKER)
        return lambda name: (root / name).read_bytes()
    if not zipfile.is_zipfile(source):
        raise DataError(f"{source}: expected a folder or a zip file, got neither; unpack it and give the folder")
    archive = zipfile.ZipFile(source)
    inner = [name for name in archive.namelist() if name.endswith("UCI HAR Dataset.zip")]
    if inner:  # the site's present download wraps the original archive in another
        archive = zipfile.ZipFile(io.BytesIO(archive.read(inner[0])))
    names = [name for name in archive.namelist() if name.endswith(MARKER) and "__MACOSX" not in name]
    prefix = names[0].removesuffix(MARKER) if names else None
    if prefix is None:
        raise _not_there(source, MARKER)
    return lambda name: archive.read(prefix + name)


def _not_there(source: object, name: str) -> DataError:
    return DataError(f"{source}: expected the UCI HAR layout, got no '{name}'; give the whole, official archive")


def _open_text(read: Callable[[str], bytes], name: str) -> io.StringIO:
    try:
        return io.StringIO(read(name).decode("ascii"))
    except (OSError, KeyError, UnicodeDecodeError) as error:
        raise _not_there("uci-har", name) from error


def _read_matrix(read: Callable[[str], bytes], name: str) -> np.ndarray:
    try:
        values = np.loadtxt(_open_text(read, name), dtype=np.float64, ndmin=2)
    except ValueError as error:
        raise DataError(f"uci-har, {name}: expected lines of {WINDOW} numbers, got {error}") from error
    if values.shape[1] != WINDOW:
        raise DataError(f"uci-har, {name}: expected {WINDOW} numbers a line, got {values.shape[1]}")
    return values.astype(np.float32)


def _read_column(read: Callable[[str], bytes], name: str, rows: int) -> np.ndarray:
    values = np.loadtxt(_open_text(read, name), dtype=np.int64, ndmin=1)
    if values.shape != (rows,):
        raise DataError(f"uci-har, {name}: expected {rows} lines, one for each window, got {len(values)}")
    return values
