"""Imports arrays from an .npz file: x and y, or halves such as x_train and y_test, by any of their usual names."""

from __future__ import annotations

import functools
import re
import zipfile
import zlib
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
RGBA = 4

Arrays = dict[str, np.ndarray]


def open_npz(path: Path, options: Options) -> Material:
    """The labelled arrays in a file, and in `options.test_path` if it is given."""
    used, notes = _choose_halves(path, options)
    _check_groups(path, used, options)
    x, y, group = (_join(path, [part[key] for part in used if key in part], key) for key in ("x", "y", "group"))
    assert x is not None, "a half has x"
    assert y is not None, "a half has y"
    in_test = np.repeat([False, True], [len(part["y"]) for part in used]) if len(used) == 2 else None
    labels, classes = name_classes(y)
    images, shaped = arrange(x, options.signals)
    what = f"{len(y):,} arrays of {'x'.join(map(str, x.shape[1:]))} {x.dtype}"
    convert = functools.partial(_write, images, options)
    return Material(what, labels, classes, group, in_test, convert, (*notes, *shaped))


def _choose_halves(path: Path, options: Options) -> tuple[list[Arrays], tuple[str, ...]]:
    """The arrays to train on and, if there are such, those to test on; and a note of what is left out.

    Arrays without a half in their names are the training half beside x_test, or all there is.
    """
    halves = _read(path)
    train = next((halves[half] for half in ("train", "") if half in halves), None)
    if train is None:
        got, remedy = f"only those of {join_names([*halves])}", "name them x and y to have them divided"
        raise DataError(f"{path}: expected arrays to train on, x and y or x_train and y_train, got {got}; {remedy}")
    held = [half for half in ("test", "val") if half in halves]
    if options.test_path is not None:
        tested = _read_other(options.test_path)
        test = next(tested[half] for half in ("test", "val", "", "train") if half in tested)
        return [train, test], tuple(f"left out: the arrays of {half}, since --test names others" for half in held)
    notes = ("left out: the arrays of val, since train and test are there",) if len(held) == 2 else ()
    return [train, *(halves[half] for half in held[:1])], notes


def _check_groups(path: Path, used: Sequence[Arrays], options: Options) -> None:
    """Groups of one half alone would belong to the wrong rows."""
    having = [half for half, part in zip(("train", "test"), used, strict=False) if "group" in part]
    if len(used) == 1 or len(having) != 1:
        return
    lacking = "test" if having == ["train"] else "train"
    name = f"group_{lacking}"
    if options.test_path is not None:
        name = f"group to {options.test_path if lacking == 'test' else path}"
    raise DataError(
        f"{path}: expected groups in train and in test, got those of {having[0]} only; add an array {name}, or leave "
        "the groups out"
    )


def _read_other(path: Path) -> dict[str, Arrays]:
    require(path.suffix.lower() == ".npz", path, "an .npz file", path.suffix or "another", "convert it first")
    return _read(path)


def _read(path: Path) -> dict[str, Arrays]:
    """The arrays by half ("" where a name has none) and by what they are."""
    names, found = _load(path)
    halves: dict[str, Arrays] = {}
    origin: dict[tuple[str, str], str] = {}
    for name, values in found.items():
        place = _parse_name(name)
        assert place is not None, "only such arrays are loaded"
        half, key = place
        shown = f"one array for {key}{'_' if half else ''}{half}"
        require(place not in origin, path, shown, f"{origin.get(place)} and {name}", "leave one of them out")
        origin[place] = name
        halves.setdefault(half, {})[key] = values
    for half, arrays in halves.items():
        _check(path, half, arrays, names)
    require(bool(halves), path, "arrays named x and y", join_names(names) or "none", "rename them")
    require(not {"", "train"} <= set(halves), path, "either x or x_train", "both", "leave one of them out")
    return halves


def _load(path: Path) -> tuple[list[str], Arrays]:
    """The names of all arrays in a file, and those arrays by name that we know."""
    expected, remedy = "arrays in an .npz file", "write it with numpy.savez"
    require(path.is_file(), path, expected, "no file", "check the path")
    require(zipfile.is_zipfile(path), path, expected, "a file of another kind", remedy)
    try:
        with np.load(path, allow_pickle=False) as file:
            names = list(file.files)
            found = {name: file[name] for name in names if _parse_name(name)}
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle" in str(error):
            remedy = "convert them to numbers or text"
            raise DataError(f"{path}: expected {expected}, got Python objects in one; {remedy}") from error
        raise DataError(f"{path}: expected {expected}, got a damaged one ({error}); {remedy} again") from error
    for name, values in found.items():
        require(isinstance(values, np.ndarray), f"{path}: {name}", "an array", "something else", remedy)
    return names, found


def _parse_name(name: str) -> tuple[str, str] | None:
    words = re.split(r"[_.-]", name.lower())
    half = next((half for half in HALVES if half in words), "")
    rest = [word for word in words if word != half]
    if len(rest) != 1:
        return None
    return next(((half, key) for key, known in NAMES.items() if rest[0] in known), None)


def _check(path: Path, half: str, arrays: Arrays, names: Sequence[str]) -> None:
    where = f"{path}, {half}" if half else str(path)
    require({"x", "y"} <= set(arrays), where, "both x and y", join_names(names), "add what is missing")
    require(arrays["x"].ndim > 1, f"{where}: x", "2 dimensions or more", arrays["x"].ndim, "give it as (n, columns)")
    require(arrays["x"].dtype.kind in "iufb", f"{where}: x", "numbers", arrays["x"].dtype, "convert it first")
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


def _join(path: Path, parts: Sequence[np.ndarray], key: str) -> np.ndarray | None:
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = " and ".join(str(part.shape[1:]) for part in parts)
        raise DataError(f"{path}: {key}: expected one shape in train and test, got {shapes}; make them equal")
    return np.concatenate(parts) if parts else None


def arrange(x: np.ndarray, signals: bool | None = None) -> tuple[np.ndarray, tuple[str, ...]]:
    """The samples with channels first, and a note of what they are taken for where their shape leaves that open.

    (n, h, w, 1 or 3) are images with channels last.

    Args:
        signals: Whether (n, a, b) are signals of a channels and b time steps; when it is None, they are grey images if
            they are uint8 or their sides are equal, else signals.
    """
    sides = "x".join(map(str, x.shape[1:]))
    if x.ndim == 3 and signals is not None:
        return (x if signals else x[:, None]), ()
    if x.ndim == 3 and x.dtype == np.uint8:
        return x[:, None], ()
    if x.ndim == 3 and x.shape[1] == x.shape[2]:
        return x[:, None], (f"samples of {sides} are taken for grey images, since both sides are equal (--signals)",)
    if x.ndim == 3:
        channels, steps = x.shape[1:]
        what = f"signals of {channels} channels and {steps} time steps"
        return x, (f"samples of {sides} are taken for {what} (--images)",)
    if x.ndim != 4 or x.shape[1] in IMAGE_CHANNELS:
        return x, ()
    if x.shape[3] in IMAGE_CHANNELS:
        return x.transpose(0, 3, 1, 2), ("channels, which were last, come first",)
    if x.shape[3] == RGBA and x.shape[1] != RGBA:
        return _drop_opacity(x).transpose(0, 3, 1, 2), ("channels, which were last, come first, without the opacity",)
    height, width = x.shape[2:]
    return x, (f"samples of {sides} are taken for images of {x.shape[1]} channels and {height}x{width} pixels",)


def _drop_opacity(x: np.ndarray) -> np.ndarray:
    """Images with channels last, without a fourth channel that is the same everywhere."""
    require(
        bool((x[..., 3] == x[:1, :1, :1, 3]).all()),
        "x",
        "1 or 3 channels, or opaque images",
        f"4 in shape {x.shape}, the last of which differs between pixels",
        "give (n, height, width, 3), or (n, 4, height, width) if it is no opacity",
    )
    return x[..., :3]


def _write(x: np.ndarray, options: Options, folder: Path, rows: Rows, progress: Progress) -> Converted:
    if x.ndim == 2:
        names = [str(number) for number in range(x.shape[1])]
        return write_columns([encode_numbers(x, names, rows["train"], options)], folder, rows)
    with np.errstate(over="ignore"):  # what does not fit is infinite, and refused below
        stored = x if x.dtype == np.uint8 else x.astype(np.float32)
    for split, index in rows.items():
        bad = np.flatnonzero(~np.isfinite(stored[index].reshape(len(index), -1)).all(axis=1))
        place = f"NaN or infinity in sample {index[bad[0]]}" if len(bad) else ""
        require(not len(bad), "x", "finite numbers of 32 bits", place, "correct it")
        np.save(folder / f"x_{split}.npy", np.ascontiguousarray(stored[index]))
    return Converted(255.0 if stored.dtype == np.uint8 else 1.0, options.standardise)
