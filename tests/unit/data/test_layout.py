from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedrpc.data import layout
from fedrpc.data.layout import Raw, hash_array, measure_channels, replace_folder
from fedrpc.errors import DataError


def test_meta_describes_the_arrays(images: Raw, place: Callable[..., Path]) -> None:
    folder = place(images)
    meta = json.loads((folder / "meta.json").read_text())
    x = images.arrays["x_train"] / 255.0
    assert meta["shape"] == [2, 4, 5]
    assert meta["dtype"] == "uint8"
    assert np.allclose(meta["mean"], x.mean((0, 2, 3)), atol=1e-6)
    assert np.allclose(meta["std"], x.std((0, 2, 3)), atol=1e-6)
    stored = np.load(folder / "y_test.npy")
    assert stored.dtype == np.int64
    assert meta["sha256"]["y_test"] == hashlib.sha256(stored.tobytes()).hexdigest()


@pytest.mark.parametrize("block_bytes", [1, 100, 2**20])
def test_blocks_change_no_result(monkeypatch: pytest.MonkeyPatch, images: Raw, block_bytes: int) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", block_bytes)
    x = images.arrays["x_train"]
    assert hash_array(x) == hashlib.sha256(x.tobytes()).hexdigest()
    assert hash_array(np.asfortranarray(x)) == hashlib.sha256(x.tobytes()).hexdigest()
    mean, std = measure_channels(x, 255.0)
    assert np.allclose(mean, x.mean((0, 2, 3)) / 255, atol=1e-6)
    assert np.allclose(std, x.std((0, 2, 3)) / 255, atol=1e-6)


def test_nan_is_not_written(signals: Raw, place: Callable[..., Path]) -> None:
    x = signals.arrays["x_test"].copy()
    x[2, 1, 0] = np.nan
    with pytest.raises(DataError, match=r"'own', x_test: expected finite numbers, got NaN or infinity in sample 2"):
        place(Raw({**signals.arrays, "x_test": x}, signals.classes, 1.0))


def test_a_constant_channel_has_deviation_one() -> None:
    x = np.full((5, 1, 3), 7, np.uint8)
    assert measure_channels(x, 255.0) == ([round(7 / 255, 6)], [1.0])


def test_the_old_folder_stays_when_writing_fails(tmp_path: Path) -> None:
    target = tmp_path / "set"
    target.mkdir()
    (target / "old").write_text("old")

    def fail() -> None:
        with replace_folder(target) as fresh:
            (fresh / "half").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [path.name for path in tmp_path.rglob("*")] == ["set", "old"]


def test_the_new_folder_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "set"
    target.mkdir()
    (target / "old").write_text("old")
    with replace_folder(target) as fresh:
        (fresh / "new").write_text("new")
        assert (target / "old").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["set", "new"]
