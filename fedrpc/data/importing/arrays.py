"""Imports arrays from an .npz file: x and y, or halves such as x_train and y_test, by any of their usual names."""

from __future__ import annotations

import functools
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedrpc.data.importing.columns import encode_numbers, write_columns
from fedrpc.data.importing.material import Converted, Material, Options, Rows, join_names, name_classes, require
from fedrpc.data.layout import Progress
from fedrpc.errors import DataError

NAMES = {
    "x": ("x", "data", "images", "image", "features", "inputs", "samples"),
    "y": ("y", "label", "labels", "target", "targets", "class", "classes"),
    "group": ("group", "groups", "subject", "subjects", "user", "users", "speaker", "speakers"),
}
HALVES = ("train", "test", "val")
IMAGE_CHANNELS = (1, 3)


def open_npz(path: Path, options: Options) -> Material:
    """The labelled arrays in a file, and in `options.test_path` if it is given."""
    halves = _read(path)
    notes: tuple[str, ...] = ()
    if options.test_path is not None:
        require(options.test_path.suffix == ".npz", options.test_path, "an .npz file", "another", "convert it first")
        tested = _read(options.test_path)
        halves = {"train": _pick(halves, "train"), "test": _pick(tested, "test")}
    if "train" in halves and "val" in halves:
        notes = ("left out: the arrays of val, since train and test are there",) if "test" in halves else ()
        halves.setdefault("test", halves["val"])
    used = [halves[half] for half in (("train", "test") if "test" in halves else ("", "train")) if halves.get(half)]
    require(bool(used), path, "x and y", join_names([*halves]) or "neither", "name the arrays x and y")
    x, y, group = (_join(path, [part[key] for part in used if key in part], key) for key in ("x", "y", "group"))
    assert x is not None, "a half has x"
    assert y is not None, "a half has y"
    in_test = np.repeat([False, True], [len(part["y"]) for part in used]) if len(used) == 2 else None
    labels, classes = name_classes(y)
    images, shaped = arrange(x)
    what = f"{len(y):,} arrays of {'x'.join(map(str, x.shape[1:]))} {x.dtype}"
    convert = functools.partial(_write, images, options)
    return Material(what, labels, classes, group, in_test, convert, (*notes, *shaped))


def _read(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """The arrays by half ("" for all) and by what they are."""
    halves: dict[str, dict[str, np.ndarray]] = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            for name in file.files:
                if found := _parse_name(name):
                    half, key = found
                    halves.setdefault(half, {})[key] = file[name]
            names = list(file.files)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: expected arrays in an .npz file, got {type(error).__name__}: {error}") from error
    for half, arrays in halves.items():
        _check(path, half, arrays, names)
    halves = {half: arrays for half, arrays in halves.items() if "x" in arrays}
    require(bool(halves), path, "arrays named x and y", join_names(names) or "none", "rename them")
    return halves


def _pick(halves: dict[str, dict[str, np.ndarray]], half: str) -> dict[str, np.ndarray]:
    """The arrays of one half of a file, or all of them when it has no halves."""
    return halves[half] if half in halves else next(iter(halves.values()))


def _parse_name(name: str) -> tuple[str, str] | None:
    words = re.split(r"[_.-]", name.lower())
    half = next((half for half in HALVES if half in words), "")
    rest = [word for word in words if word != half]
    if len(rest) != 1:
        return None
    return next(((half, key) for key, known in NAMES.items() if rest[0] in known), None)


def _check(path: Path, half: str, arrays: dict[str, np.ndarray], names: Sequence[str]) -> None:
    where = f"{path}, {half}" if half else str(path)
    require({"x", "y"} <= set(arrays), where, "both x and y", join_names(names), "add what is missing")
    for key in ("y", "group"):
        if key in arrays and arrays[key].ndim == 2 and arrays[key].shape[1] == 1:
            arrays[key] = arrays[key][:, 0]
    expected = (len(arrays["x"]),)
    for key in sorted({"y", "group"} & set(arrays)):
        require(
            arrays[key].shape == expected, f"{where}: {key}", f"shape {expected}", arrays[key].shape, "one for each row"
        )
    kind = arrays["y"].dtype.kind
    require(kind in "iubUS", f"{where}: y", "whole numbers or names", arrays["y"].dtype, "convert the labels first")
    require(arrays["x"].ndim > 1, f"{where}: x", "2 dimensions or more", arrays["x"].ndim, "give it as (n, columns)")
    require(arrays["x"].dtype.kind in "iufb", f"{where}: x", "numbers", arrays["x"].dtype, "convert it first")


def _join(path: Path, parts: Sequence[np.ndarray], key: str) -> np.ndarray | None:
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = " and ".join(str(part.shape[1:]) for part in parts)
        raise DataError(f"{path}: {key}: expected one shape in train and test, got {shapes}; make them equal")
    return np.concatenate(parts) if parts else None


def arrange(x: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """The samples with channels first, and a note if that changed something: (n, h, w) of uint8 are grey images."""
    if x.ndim == 3 and x.dtype == np.uint8:
        return x[:, None], ()
    if x.ndim == 4 and x.shape[1] not in IMAGE_CHANNELS and x.shape[3] in IMAGE_CHANNELS:
        return x.transpose(0, 3, 1, 2), ("channels, which were last, come first",)
    return x, ()


def _write(x: np.ndarray, options: Options, folder: Path, rows: Rows, progress: Progress) -> Converted:
    if x.ndim == 2:
        names = [str(number) for number in range(x.shape[1])]
        return write_columns([encode_numbers(x, names, rows["train"], options)], folder, rows)
    stored = x if x.dtype == np.uint8 else x.astype(np.float32)
    for split, index in rows.items():
        bad = np.flatnonzero(~np.isfinite(stored[index].reshape(len(index), -1)).all(axis=1))
        place = f"NaN or infinity in sample {index[bad[0]]}" if len(bad) else ""
        require(not len(bad), "x", "finite numbers", place, "correct it")
        np.save(folder / f"x_{split}.npy", np.ascontiguousarray(stored[index]))
    return Converted(255.0 if stored.dtype == np.uint8 else 1.0, options.standardise)
