"""Imports a folder of images or WAV files, with a subfolder for each class."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.format import open_memmap

from fedrpc.data.importing.material import Converted, Material, Options, Rows, join_names, name_classes, require
from fedrpc.data.layout import Progress
from fedrpc.data.prepare_audio import BANDS, FRAMES, RANGE_DB, compute_log_mel
from fedrpc.data.wav import read_wav
from fedrpc.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
SOUNDS = (".wav", ".wave")
TRAIN, TEST, OTHER_TEST = ("train", "training"), ("test", "testing"), ("val", "valid", "validation", "dev")
GROUPS = ("folder", "prefix")
DEFAULT_SIZE, LARGEST_KEPT = 32, 64


@dataclass(frozen=True)
class Item:
    """A file with the name of its class, its group, and whether its owner put it aside to test on."""

    path: Path
    label: str
    group: str
    in_test: bool


def find_files(root: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files below a folder by their suffixes, without hidden ones, in order."""
    return sorted(
        path
        for path in root.rglob("*")
        if path.suffix.lower() in suffixes
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    )


def find_halves(root: Path) -> tuple[Path, Path | None, tuple[str, ...]]:
    """The folders of the training and the test set, and a note about one that is left out."""
    named = {path.name.lower(): path for path in sorted(root.iterdir()) if path.is_dir()}
    train = next((named[name] for name in TRAIN if name in named), None)
    tests = [named[name] for name in (*TEST, *OTHER_TEST) if name in named]
    if train is None or not tests:
        return root, None, ()
    left = [path.name for path in named.values() if path not in (train, tests[0])]
    notes = (f"left out: {join_names(left)}, since {train.name} and {tests[0].name} are there",) if left else ()
    return train, tests[0], notes


def open_folder(root: Path, options: Options) -> Material:
    """The labelled images or sounds in a folder."""
    suffixes, noun = guess_kind(root)
    train, test, notes = find_halves(root)
    test = options.test_path or test
    items = _list_items(train, suffixes, noun, options, in_test=False)
    if test is not None:
        items += _list_items(test, suffixes, noun, options, in_test=True)
    labels, classes = name_classes(np.array([item.label for item in items]))
    require(
        len(classes) > 1, root, "a folder for each of 2 classes or more", classes[0], "put each class in its own folder"
    )
    paths = [item.path for item in items]
    convert = _plan_images(paths, options) if suffixes is IMAGES else functools.partial(_write_sounds, paths, options)
    return Material(
        f"{len(items):,} {noun} in {len(classes)} class folders",
        labels,
        classes,
        np.array([item.group for item in items]) if options.group else None,
        np.array([item.in_test for item in items]) if test is not None else None,
        convert,
        notes,
    )


def guess_kind(root: Path) -> tuple[tuple[str, ...], str]:
    """Whether a folder has images or sounds: their suffixes, and a noun."""
    counts = {noun: len(find_files(root, kinds)) for kinds, noun in ((IMAGES, "images"), (SOUNDS, "WAV files"))}
    found = [noun for noun, count in counts.items() if count]
    expected = f"images ({' '.join(IMAGES)}) or WAV files in a folder for each class, or one of the other formats"
    require(bool(found), root, expected, "none", "see `fedrpc data import --help`")
    both = " and ".join(f"{count} {noun}" for noun, count in counts.items())
    require(len(found) == 1, root, "images or WAV files", both, "import them from folders of their own")
    return (IMAGES, "images") if found == ["images"] else (SOUNDS, "WAV files")


def _list_items(root: Path, suffixes: Sequence[str], noun: str, options: Options, *, in_test: bool) -> list[Item]:
    require(root.is_dir(), root, "a folder", "none", "name the folder that holds the class folders")
    if options.group is not None:
        require(
            options.group in GROUPS,
            "--group of a folder",
            "'folder' (class/GROUP/file) or 'prefix' (class/GROUP_file)",
            f"'{options.group}'",
            "choose one, or leave it out",
        )
    stray = [path for path in sorted(root.iterdir()) if path.suffix.lower() in suffixes and path.is_file()]
    got = f"{len(stray)} {noun} outside, {stray[0].name} first" if stray else ""
    require(not stray, root, f"{noun} in a folder for each class", got, "move them into class folders")
    items = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        paths = find_files(folder, suffixes)
        require(bool(paths), folder, noun, "none", "remove this class folder, or put some in")
        items += [Item(path, folder.name, _name_group(path, folder, options.group), in_test) for path in paths]
    require(bool(items), root, "a folder for each class", "none", "put each class in its own folder")
    return items


def _name_group(path: Path, folder: Path, rule: str | None) -> str:
    if rule is None:
        return ""
    inner = path.relative_to(folder)
    if rule == "folder":
        require(len(inner.parts) > 1, path, "a group's folder between class and file", "none", "or use --group prefix")
        return inner.parts[0]
    prefix = re.match(r"([^_-]+)[_-]", inner.name)
    require(prefix is not None, path, "a name that begins with a group, such as anna_1", inner.name, "rename it")
    assert prefix is not None
    return prefix[1]


# Images


def _plan_images(paths: Sequence[Path], options: Options) -> Callable[[Path, Rows, Progress], Converted]:
    """Reads the images' headers only, and decides about colour and size."""
    modes, sizes = set(), set()
    for path in paths:
        with _open_image(path) as image:
            modes.add(image.mode)
            sizes.add(image.size)
    grey = options.grey if options.grey is not None else modes <= {"1", "L", "LA"}
    first = next(iter(sizes))
    kept = len(sizes) == 1 and first[0] == first[1] <= LARGEST_KEPT
    size = options.size or (first[0] if kept else DEFAULT_SIZE)
    notes = []
    if sizes != {(size, size)}:
        given = f"{first[0]}x{first[1]}" if len(sizes) == 1 else f"{len(sizes)} different sizes"
        notes.append(f"images of {given} are cropped to squares and scaled to {size}x{size} (--size)")
    if grey and not modes <= {"1", "L", "LA"}:
        notes.append("images in colour become grey (--grey)")
    return functools.partial(write_images, functools.partial(_read_image, paths), size, grey, options, notes)


def write_images(
    read: Callable[[int], Image.Image],
    size: int,
    grey: bool,
    options: Options,
    notes: Sequence[str],
    folder: Path,
    rows: Rows,
    progress: Progress,
) -> Converted:
    """Writes images, one at a time, into files by memory map."""
    channels, total, done = 1 if grey else 3, sum(map(len, rows.values())), 0
    for split, index in rows.items():
        out = open_memmap(folder / f"x_{split}.npy", "w+", np.uint8, (len(index), channels, size, size))
        for place, position in enumerate(index):
            progress("images", done, total)
            out[place] = _to_array(read(int(position)), size, grey)
            done += 1
        out.flush()
    progress("images", total, total)
    return Converted(255.0, options.standardise, notes)


def _to_array(image: Image.Image, size: int, grey: bool) -> np.ndarray:
    from PIL import Image, ImageOps

    square = ImageOps.fit(image.convert("L" if grey else "RGB"), (size, size), Image.Resampling.BICUBIC)
    values = np.asarray(square)
    return values[None] if grey else values.transpose(2, 0, 1)


def _open_image(path: Path) -> Image.Image:
    from PIL import Image

    try:
        image = Image.open(path)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _unreadable(path, error) from error
    eight_bits = image.mode in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB")
    if not eight_bits:
        image.close()
    require(eight_bits, path, "8 bits a channel", f"mode {image.mode}", "convert it to 8 bits first")
    return image


def _read_image(paths: Sequence[Path], position: int) -> Image.Image:
    from PIL import ImageOps

    with _open_image(paths[position]) as image:
        try:
            return ImageOps.exif_transpose(image).convert("RGBA" if image.mode == "P" else image.mode)
        except (OSError, ValueError, SyntaxError) as error:
            raise _unreadable(paths[position], error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: expected an image, got {type(error).__name__}: {error}; remove or replace it")


# Sounds


def _write_sounds(paths: Sequence[Path], options: Options, folder: Path, rows: Rows, progress: Progress) -> Converted:
    """Writes sounds as log-mel pictures, one at a time, into files by memory map."""
    total, done, cut = sum(map(len, rows.values())), 0, 0
    for split, index in rows.items():
        out = open_memmap(folder / f"x_{split}.npy", "w+", np.uint8, (len(index), 1, BANDS, FRAMES))
        for place, position in enumerate(index):
            progress("log-mel", done, total)
            wave, rate = read_wav(paths[position])
            cut += len(wave) > options.seconds * rate
            out[place, 0] = compute_log_mel(wave, rate, options.rate, options.seconds)
            done += 1
        out.flush()
    progress("log-mel", total, total)
    notes = [f"sounds are log-mel pictures of {options.seconds:g} s at {options.rate} Hz (--seconds, --rate)"]
    if cut:
        notes.append(f"{cut} sounds are longer than {options.seconds:g} s and were cut (--seconds)")
    return Converted(float(RANGE_DB), options.standardise, notes)
