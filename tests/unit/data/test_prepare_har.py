from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedrpc.data.datasets import load
from fedrpc.data.prepare import prepare
from fedrpc.data.prepare_har import CLASSES, SIGNALS
from fedrpc.errors import DataError


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """The official folder with 6 + 4 windows, whose values name their channel and row."""
    root = tmp_path / "UCI HAR Dataset"
    for split, rows in (("train", 6), ("test", 4)):
        folder = root / split / "Inertial Signals"
        folder.mkdir(parents=True)
        for number, signal in enumerate((*SIGNALS, "body_acc_x")):
            values = number + np.arange(rows)[:, None] / 10 + np.arange(128) / 10000
            lines = ["  " + " ".join(f"{v: .7e}" for v in row) for row in values]
            (folder / f"{signal}_{split}.txt").write_text("\n".join(lines) + "\n")
        (root / split / f"y_{split}.txt").write_text("\n".join(str(1 + i % 6) for i in range(rows)) + "\n")
        (root / split / f"subject_{split}.txt").write_text("\n".join(str(1 + i // 2) for i in range(rows)) + "\n")
    return root


def zip_folder(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("__MACOSX/UCI HAR Dataset/train/y_train.txt", "no")
        for file in sorted(folder.rglob("*.txt")):
            archive.write(file, file.relative_to(folder.parent))
    return path


def nest_zip(folder: Path, path: Path) -> Path:
    inner = io.BytesIO(zip_folder(folder, path.with_name("inner.zip")).read_bytes())
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("UCI HAR Dataset.names", "text")
        archive.writestr("UCI HAR Dataset.zip", inner.getvalue())
    return path


@pytest.mark.parametrize("form", ["folder", "parent", "zip", "zip in zip"])
def test_the_official_layout(official: Path, tmp_path: Path, form: str) -> None:
    source = {
        "folder": lambda: official,
        "parent": lambda: official.parent,
        "zip": lambda: zip_folder(official, tmp_path / "a.zip"),
        "zip in zip": lambda: nest_zip(official, tmp_path / "b.zip"),
    }[form]()
    prepare("uci-har", tmp_path / "out", source)
    data = load("uci-har", tmp_path / "out")
    assert (data.shape, data.classes, data.scale) == ((6, 128), CLASSES, 1.0)
    assert data.train.x.dtype == np.float32
    assert data.train.y.tolist() == [0, 1, 2, 3, 4, 5]
    assert data.test.y.tolist() == [0, 1, 2, 3]
    assert data.train.group is not None
    assert data.train.group.tolist() == [1, 1, 2, 2, 3, 3]
    expected = np.arange(6)[:, None] + 0.3 + np.arange(128) / 10000
    assert np.allclose(data.train.x[3], expected, atol=1e-5)


def test_channels_are_total_acceleration_then_body_gyroscope() -> None:
    assert SIGNALS == ("total_acc_x", "total_acc_y", "total_acc_z", "body_gyro_x", "body_gyro_y", "body_gyro_z")


def test_errors_name_the_missing_file(official: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"expected --source with the official archive"):
        prepare("uci-har", out)
    with pytest.raises(DataError, match=r"which does not exist"):
        prepare("uci-har", out, tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="expected a folder or a zip file"):
        prepare("uci-har", out, tmp_path / "a.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"got no 'train/y_train.txt'"):
        prepare("uci-har", out, tmp_path / "empty")
    (official / "test" / "subject_test.txt").write_text("1\n2\n")
    with pytest.raises(DataError, match=r"subject_test.txt: expected 4 lines, one for each window, got 2"):
        prepare("uci-har", out, official)
    (official / "train" / "Inertial Signals" / "body_gyro_z_train.txt").write_text("1 2 3\n")
    with pytest.raises(DataError, match=r"body_gyro_z_train.txt: expected 128 numbers a line, got 3"):
        prepare("uci-har", out, official)
    shutil.rmtree(official / "train" / "Inertial Signals")
    with pytest.raises(DataError, match=r"got no 'train/Inertial Signals/total_acc_x_train.txt'"):
        prepare("uci-har", out, official)
    assert not (out / "uci-har").exists()
