"""Imports data sets of Hugging Face's `datasets`: images, or columns of numbers and categories."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrpc.data.importing.folders import DEFAULT_SIZE, LARGEST_KEPT, OTHER_TEST, TEST, TRAIN, write_images
from fedrpc.data.importing.material import Material, Options, require
from fedrpc.data.importing.tables import describe_table, read_keys
from fedrpc.errors import ConfigError, DataError

if TYPE_CHECKING:
    import datasets as hf

MARKERS = ("dataset_dict.json", "dataset_info.json")


def is_saved(path: Path) -> bool:
    """Whether a folder is one that `save_to_disk` has left."""
    return any((path / marker).is_file() for marker in MARKERS)


def open_saved(path: Path, options: Options) -> Material:
    """What `save_to_disk` has left."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{path} was saved by Hugging Face's datasets, which is not installed; "
            "`pip install 'fedrpc[huggingface]'` installs it"
        ) from None
    require(options.test_path is None, "--test", "a share", options.test_path, "save both as one DatasetDict")
    try:
        return open_dataset(datasets.load_from_disk(str(path)), options, str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected what save_to_disk writes, got {type(error).__name__}: {error}") from error


def open_dataset(data: hf.Dataset | hf.DatasetDict, options: Options, where: str) -> Material:
    """The rows of a Dataset, or of the train and test splits of a DatasetDict."""
    halves = [data] if not isinstance(data, dict) else _find_splits(data, where)
    in_test = np.repeat([False, True], [len(half) for half in halves]) if len(halves) == 2 else None
    features = halves[0].features
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    sounds = [name for name, kind in kinds.items() if kind in ("Audio", "Video")]
    remedy = "write WAV files into class folders and import these"
    require(not sounds, where, "images or a table", f"a column '{(sounds or [''])[0]}' of sound or video", remedy)
    names = _find_class_names(features, options.label)
    images = [name for name, kind in kinds.items() if kind == "Image"]
    if images:
        return _open_images(halves, images[0], in_test, options, where, names)
    import pyarrow as pa

    table = pa.concat_tables([half.with_format("arrow")[:] for half in halves])
    return describe_table(table, in_test, options, where, names)


def _find_splits(data: hf.DatasetDict, where: str) -> Sequence[hf.Dataset]:
    train = next((data[name] for name in TRAIN if name in data), None)
    if train is None:
        only = next(iter(data.values()))
        require(len(data) == 1, where, "a split 'train'", ", ".join(data), "rename one of them")
        return [only]
    test = next((data[name] for name in (*TEST, *OTHER_TEST) if name in data), None)
    return [train] if test is None else [train, test]


def _find_class_names(features: Any, label: str | None) -> tuple[str, ...] | None:
    """The names that a ClassLabel knows."""
    named = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    chosen = label if label is not None else named[0] if len(named) == 1 else None
    return tuple(features[chosen].names) if chosen in named else None


def _open_images(
    halves: Sequence[hf.Dataset],
    column: str,
    in_test: np.ndarray | None,
    options: Options,
    where: str,
    names: tuple[str, ...] | None,
) -> Material:
    import pyarrow as pa

    others = [name for name in halves[0].column_names if name != column]
    table = pa.concat_tables([half.select_columns(others).with_format("arrow")[:] for half in halves])
    keys = read_keys(table, options, where, names)
    starts = np.cumsum([0, *(len(half) for half in halves)])

    def read(position: int) -> Any:
        half = int(np.searchsorted(starts, position, side="right")) - 1
        return halves[half][position - int(starts[half])][column]

    first = read(0)
    kept = first.size[0] == first.size[1] <= LARGEST_KEPT
    size = options.size or (first.size[0] if kept else DEFAULT_SIZE)
    grey = options.grey if options.grey is not None else first.mode in ("1", "L", "LA")
    notes = (
        f"images become {size}x{size}, {'grey' if grey else 'in colour'}, as the first one suggests (--size, --grey)",
    )
    convert = functools.partial(write_images, read, size, grey, options, ())
    what = f"{len(table):,} images, label '{keys.column}'"
    return Material(what, keys.labels, keys.classes, keys.groups, in_test, convert, notes)
