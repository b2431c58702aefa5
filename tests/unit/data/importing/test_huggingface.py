"""Data sets of Hugging Face's `datasets`, by the real library where it is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedrpc.data import import_dataset, import_path
from fedrpc.errors import ConfigError, DataError

NAMES = ["cat", "dog"]

needs_library = pytest.mark.skipif(
    "not __import__('importlib.util').util.find_spec('datasets')",
    reason="datasets is not installed: pip install 'fedrpc[huggingface]'",
)


def make_table():
    import datasets

    rows = {
        "weight": [float(i % 7) for i in range(40)],
        "owner": [f"o{i // 5}" for i in range(40)],
        "label": [i % 2 for i in range(40)],
    }
    features = datasets.Features(
        weight=datasets.Value("float32"), owner=datasets.Value("string"), label=datasets.ClassLabel(names=NAMES)
    )
    return datasets.Dataset.from_dict(rows, features=features)


@needs_library
def test_a_table_with_class_names(tmp_path: Path) -> None:
    found = import_dataset(make_table(), "pets", tmp_path, group="owner", test=0.25)
    assert (found.data.classes, found.data.shape) == (("cat", "dog"), (1,))
    assert (len(found.data.train), len(found.data.test)) == (30, 10)
    rows = make_table().select(range(0, 40, 2))  # a selection, which datasets keeps as indices
    assert set(import_dataset(rows, "cats", tmp_path, label="owner").data.classes) == {f"o{i}" for i in range(8)}


@needs_library
def test_splits_of_images_and_what_was_saved(tmp_path: Path) -> None:
    import datasets

    images = [Image.new("L", (12, 12), 40 * (i % 2) + i) for i in range(10)]
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=NAMES))
    whole = datasets.Dataset.from_dict({"image": images, "label": [i % 2 for i in range(10)]}, features=features)
    both = datasets.DatasetDict(train=whole, validation=whole.select([3, 8]))
    both.save_to_disk(tmp_path / "saved")
    found = import_path(tmp_path / "saved", tmp_path, "pets")
    assert (found.data.classes, found.data.shape) == (("cat", "dog"), (1, 12, 12))
    assert np.array_equal(found.data.train.x[:, 0, 0, 0], [40 * (i % 2) + i for i in range(10)])
    assert found.data.test.x[:, 0, 5, 5].tolist() == [43, 8]
    assert np.array_equal(import_dataset(both, "again", tmp_path).data.train.x, found.data.train.x)


@needs_library
def test_mistakes_are_one_line(tmp_path: Path) -> None:
    import datasets

    with pytest.raises(DataError, match=r"expected a column 'labl' \(--label\), got .*did you mean 'label'"):
        import_dataset(make_table(), "pets", tmp_path, label="labl")
    with pytest.raises(DataError, match="expected a split 'train', got a, b; rename one of them"):
        import_dataset(datasets.DatasetDict(a=make_table(), b=make_table()), "pets", tmp_path)
    unknown = datasets.Dataset.from_dict(
        {"x": [1, 2, 3, 4], "label": [0, -1, 1, -1]},
        features=datasets.Features(x=datasets.Value("int64"), label=datasets.ClassLabel(names=NAMES)),
    )
    with pytest.raises(DataError, match="column 'label': expected a label from 0 to 1 in every row, got -1"):
        import_dataset(unknown, "pets", tmp_path)


def test_without_the_library_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"which is not installed; `pip install 'fedrpc\[huggingface\]'`"):
        import_path(tmp_path / "saved", tmp_path, "pets")
