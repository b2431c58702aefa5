"""Imports what a person has into the layout of a data set, complete and verified or not at all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedrpc.data.datasets import EMBEDDED, DataSet, verify
from fedrpc.data.importing import folders, huggingface
from fedrpc.data.importing.arrays import open_npz
from fedrpc.data.importing.folders import OTHER_TEST, TEST, TRAIN
from fedrpc.data.importing.material import Material, Options, require
from fedrpc.data.importing.split import split_rows
from fedrpc.data.importing.tables import CSV, PARQUET, open_tables
from fedrpc.data.layout import Progress, replace_folder, write_meta
from fedrpc.data.origins import DATASETS
from fedrpc.data.prepare import ignore_progress
from fedrpc.errors import DataError

TABLES = (*CSV, *PARQUET)


@dataclass(frozen=True)
class Imported:
    """An imported data set.

    Attributes:
        data: The data set, open.
        folder: Where it is.
        what: What was found, in words.
        notes: What was done that the person should know, a sentence each.
    """

    data: DataSet
    folder: Path
    what: str
    notes: tuple[str, ...]


def import_path(
    path: Path,
    data_dir: Path,
    name: str | None = None,
    options: Options | None = None,
    *,
    force: bool = False,
    licence: str = "not stated",
    progress: Progress = ignore_progress,
) -> Imported:
    """Imports a folder or a file.

    Args:
        path: A folder of class folders with images or WAV files, a table, an .npz file, a folder with train.csv and
            test.csv, or what `save_to_disk` of Hugging Face's `datasets` has left.
        data_dir: The folder of data sets.
        name: Of the new data set; by default the path's own.
        force: Whether a data set of that name is replaced.
        progress: Called as progress(step, done, total).
    """
    options = options or Options()
    name = name or re.sub(r"[^\w.-]+", "-", path.resolve().stem).strip("-.").lower()
    check_name(name, data_dir, force=force)
    material = open_source(path, options)
    return write_material(material, data_dir, name, options, licence, f"imported from {path.name}", progress)


def open_source(path: Path, options: Options) -> Material:
    """What lies at a path, by its name and contents."""
    require(path.exists(), path, "a folder or a file", "nothing", "check the path")
    if path.is_file():
        if path.suffix.lower() == ".npz":
            return open_npz(path, options)
        known = (*TABLES, ".npz")
        kinds = f"a folder, or a file that ends in {' '.join(known)}"
        require(path.suffix.lower() in known, path, kinds, path.suffix or "no ending", "convert it to one of these")
        return open_tables(path, options)
    if huggingface.is_saved(path):
        return huggingface.open_saved(path, options)
    if halves := _find_tables(path):
        train, test = halves
        found = options if options.test_path else Options(**{**vars(options), "test_path": test})
        return open_tables(train, found)
    return folders.open_folder(path, options)


def _find_tables(folder: Path) -> tuple[Path, Path] | None:
    """The tables train and test of a folder, or None."""
    named = {path.stem.lower(): path for path in sorted(folder.iterdir()) if path.suffix.lower() in TABLES}
    train = next((named[name] for name in TRAIN if name in named), None)
    test = next((named[name] for name in (*TEST, *OTHER_TEST) if name in named), None)
    if train is not None and test is not None:
        return train, test
    got = ", ".join(path.name for path in named.values())
    require(not named, folder, "train and test as two tables", got, "name the file itself")
    return None


def check_name(name: str, data_dir: Path, *, force: bool) -> None:
    """Raises DataError for a name that cannot be used, that another data set has, or that hides a known one."""
    plain = re.fullmatch(r"\w[\w.-]*", name) is not None
    require(plain, "--name", "letters, digits, '_', '-' and '.'", f"'{name}'", "choose another name")
    known = name in DATASETS or (EMBEDDED / name).is_dir()
    require(not known, "--name", "a name of its own", f"'{name}', which fedrpc knows already", "choose another name")
    folder = data_dir / name
    if not folder.exists():
        return
    own = (folder / "meta.json").is_file()
    require(own, folder, "a data set, or nothing", "something else", "choose another --name")
    require(force, folder, "nothing", "a data set of that name", "choose another --name, or replace it with --force")


def write_material(
    material: Material, data_dir: Path, name: str, options: Options, licence: str, source: str, progress: Progress
) -> Imported:
    """Converts, writes and verifies a data set."""
    rows = split_rows(material, options)
    try:
        with replace_folder(data_dir / name) as folder:
            converted = material.convert(folder, rows, progress)
            more = dict(converted.more)
            for split, index in rows.items():
                np.save(folder / f"y_{split}.npy", material.labels[index].astype(np.int64))
            if material.groups is not None:
                names, groups = np.unique(material.groups.astype(str), return_inverse=True)
                more["groups"] = names.tolist()
                for split, index in rows.items():
                    np.save(folder / f"group_{split}.npy", groups[index].astype(np.int64))
            write_meta(
                folder,
                name,
                material.classes,
                converted.scale,
                licence=licence,
                source=source,
                standardise=converted.standardise,
                more=more,
            )
            verify(folder, name)
    except OSError as error:
        raise DataError(
            f"cannot write data set '{name}' in {data_dir}: {error}; check free space and permissions"
        ) from error
    final = data_dir / name
    return Imported(verify(final, name), final, material.what, (*material.notes, *converted.notes))
