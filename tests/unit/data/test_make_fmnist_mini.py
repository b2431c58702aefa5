from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedrpc.data import make_fmnist_mini
from fedrpc.data.datasets import EMBEDDED, open_folder
from fedrpc.data.layout import Raw


@pytest.mark.data("fmnist")
def test_the_same_input_gives_the_embedded_bytes(tmp_path: Path) -> None:
    folder = make_fmnist_mini.make(Path(os.environ["FEDRPC_DATA"]), tmp_path)
    shipped = EMBEDDED / "fmnist-mini"
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in shipped.iterdir())
    for path in folder.iterdir():
        assert path.read_bytes() == (shipped / path.name).read_bytes(), path.name


def test_it_chooses_evenly_and_repeatably(
    tmp_path: Path, place: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_fmnist_mini, "PER_CLASS", {"train": 3, "test": 1})
    x = np.arange(40, dtype=np.uint8).reshape(40, 1, 1, 1)
    y = np.arange(40) % 4
    place(Raw({"x_train": x, "y_train": y, "x_test": x, "y_test": y}, tuple("abcd"), 255.0), "fmnist")
    data = open_folder(make_fmnist_mini.make(tmp_path, tmp_path))
    assert np.bincount(data.train.y).tolist() == [3] * 4
    assert np.bincount(data.test.y).tolist() == [1] * 4
    assert (np.diff(data.train.x.ravel().astype(int)) > 0).all()
    assert np.array_equal(data.train.x.ravel() % 4, data.train.y)
    assert open_folder(make_fmnist_mini.make(tmp_path, tmp_path / "again")).digest == data.digest
