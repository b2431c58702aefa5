"""The examples in data/README do what it says."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from fedrpc.data import import_path
from fedrpc.data.datasets import load, verify

TEXT = (Path(__file__).parents[3] / "fedrpc" / "data" / "README.md").read_text()


def find_block(language: str, word: str) -> str:
    found = [block for block in re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL) if word in block]
    assert len(found) == 1, word
    return str(found[0])


@pytest.fixture
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (8, 1, 5, 5), dtype=np.uint8), np.arange(8) % 2
    return {"x": x, "y": y, "tx": x[:4], "ty": y[:4]}


def test_arrays_are_written_by_layout_write(arrays: dict[str, np.ndarray]) -> None:
    exec(find_block("python", "layout import"), dict(arrays))
    assert load("mine", Path("data")).classes == ("cat", "dog")


def test_a_meta_of_one_line_is_enough(arrays: dict[str, np.ndarray]) -> None:
    Path("data/mine").mkdir(parents=True)
    for key, name in (("x", "x_train"), ("y", "y_train"), ("tx", "x_test"), ("ty", "y_test")):
        np.save(f"data/mine/{name}.npy", arrays[key])
    text = find_block("json", "classes")
    assert json.loads(text)
    Path("data/mine/meta.json").write_text(text)
    assert load("mine", Path("data")).scale == 255
    assert verify(Path("data/mine")).num_classes == 2


@pytest.mark.skipif(not find_spec("datasets"), reason="datasets is not installed: pip install 'fedrpc[huggingface]'")
def test_a_data_set_of_hugging_face_is_imported(arrays: dict[str, np.ndarray]) -> None:
    import datasets

    rows = {
        "species": ["cat", "dog"] * 20,
        "owner": [f"o{i // 5}" for i in range(40)],
        "weight": [i % 9 for i in range(40)],
    }
    exec(find_block("python", "import_dataset"), {"pets": datasets.Dataset.from_dict(rows)})
    assert len(load("pets", Path("data")).test) == 10


def test_the_formats_of_the_table_are_those_that_are_read(tmp_path: Path) -> None:
    from fedrpc.data.importing.folders import IMAGES
    from fedrpc.data.importing.importer import TABLES

    for suffix in {*TABLES, *IMAGES} - {".txt", ".pq", ".jpeg", ".tiff", ".pgm"}:
        assert suffix.removeprefix(".") in TEXT, suffix
    np.savez(tmp_path / "a.npz", train_images=np.zeros((4, 5, 5), np.uint8), train_labels=[0, 1, 0, 1])
    assert import_path(tmp_path / "a.npz", tmp_path, "a", None).data.shape == (1, 5, 5)
