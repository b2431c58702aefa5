"""Completes a meta.json that was written by hand: measures what it leaves out, once, and notices later changes.

The result is kept beside it in measured.json, with size and time of each array. Where the folder cannot be written, it
is kept in memory, and every process measures for itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedrpc.data.layout import find_not_finite, hash_array, measure_channels
from fedrpc.errors import DataError

FILE = "measured.json"
MEASURED = ("shape", "dtype", "scale", "mean", "std", "sha256")
ARRAYS = ("x_train", "y_train", "group_train", "x_test", "y_test", "group_test")

_IN_MEMORY: dict[Path, dict[str, Any]] = {}

OpenArray = Callable[[str], np.ndarray]


def complete(folder: Path, meta: Mapping[str, Any], open_array: OpenArray) -> Mapping[str, Any]:
    """A data set's meta with what it leaves out of shape, dtype, scale, mean, std and sha256.

    Args:
        folder: The data set's folder.
        meta: Its meta.json.
        open_array: Maps an array of the folder by its name, such as "x_train".

    Raises:
        DataError: The arrays are others than those that were measured on first use.
    """
    if all(key in meta for key in MEASURED):
        return meta
    kept = _read(folder)
    stamps = {key: _stamp(folder, key) for key in ARRAYS if (folder / f"{key}.npy").is_file()}
    given = {key: meta[key] for key in MEASURED if key in meta}
    if kept is None or (kept["files"], kept["given"]) != (stamps, given):
        fresh = {"measured": _measure(folder, given, stamps, open_array), "given": given, "files": stamps}
        if kept is not None:
            _refuse_changes(folder, kept, fresh)
        _keep(folder, fresh)
        kept = fresh
    return {**kept["measured"], **meta}


def _stamp(folder: Path, key: str) -> list[int]:
    found = (folder / f"{key}.npy").stat()
    return [found.st_size, found.st_mtime_ns]


def _measure(folder: Path, given: Mapping[str, Any], keys: Mapping[str, Any], open_array: OpenArray) -> dict[str, Any]:
    """What can be measured; what the caller's own checks refuse anyway is left out."""
    x = open_array("x_train")
    measured: dict[str, Any] = {"shape": list(x.shape[1:]), "dtype": str(x.dtype)}
    measured["scale"] = scale = given.get("scale", 255.0 if x.dtype == np.uint8 else 1.0)
    for key in ("x_train", "x_test"):
        if (bad := find_not_finite(open_array(key))) is not None:
            raise DataError(
                f"{folder / key}.npy: values: expected finite numbers, got NaN or infinity in sample {bad}; correct it"
            )
    if x.size and x.ndim > 1 and isinstance(scale, int | float) and scale > 0:
        measured["mean"], measured["std"] = measure_channels(x, scale)
    measured["sha256"] = {key: hash_array(open_array(key)) for key in keys}
    return measured


def _refuse_changes(folder: Path, kept: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
    before, now = kept["measured"]["sha256"], fresh["measured"]["sha256"]
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise DataError(
                f"{folder / key}.npy: checksum: expected {before.get(key, 'no such file')}, as measured on first use, "
                f"got {now.get(key, 'no such file')}; restore it, or remove {folder / FILE} to use it as it is now"
            )


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / FILE
    if not path.is_file():
        return _IN_MEMORY.get(folder)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert set(kept) == {"measured", "given", "files"}
        assert set(MEASURED) >= set(kept["measured"]) >= {"sha256"}
    except (OSError, ValueError, TypeError, KeyError, AssertionError) as error:
        raise DataError(
            f"{path}: expected what fedrpc measured, got {type(error).__name__}; remove it to measure again"
        ) from error
    return kept  # type: ignore[no-any-return]


def _keep(folder: Path, fresh: dict[str, Any]) -> None:
    path = folder / FILE
    mine = path.with_name(f".{FILE}.{os.getpid()}")  # several processes may measure at the same time
    try:
        mine.write_text(json.dumps(fresh, indent=1) + "\n", encoding="utf-8")
        mine.replace(path)
    except OSError:
        _IN_MEMORY[folder] = fresh
