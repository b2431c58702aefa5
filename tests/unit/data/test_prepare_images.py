from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fedrpc.data.datasets import load
from fedrpc.data.prepare import prepare
from fedrpc.errors import DataError

torchvision = pytest.importorskip("torchvision")


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def grey(root: Path, kind: str) -> dict[str, np.ndarray]:
    """A torchvision root of MNIST's form with 20 + 10 images."""
    rng = np.random.default_rng(0)
    folder = root / kind / "raw"
    folder.mkdir(parents=True)
    arrays = {}
    for stem, split, n in (("train", "train", 20), ("t10k", "test", 10)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        arrays[f"y_{split}"] = (np.arange(n) % 10).astype(np.uint8)
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(idx(arrays[f"x_{split}"]))
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(idx(arrays[f"y_{split}"]))
    return arrays


def colour(root: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> dict[str, np.ndarray]:
    """A torchvision root of CIFAR's form; the checksums that torchvision asks for are made to fit."""
    reader = getattr(torchvision.datasets, kind)
    folder = root / reader.base_folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)
    key = "labels" if kind == "CIFAR10" else "fine_labels"

    def put(name: str, content: object) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    arrays: dict[str, np.ndarray] = {}
    for split, names in (("train", reader.train_list), ("test", reader.test_list)):
        parts = [(rng.integers(0, 256, (4, 3072), dtype=np.uint8), rng.integers(0, 10, 4)) for _ in names]
        listed = [put(name, {"data": x, key: y.tolist()}) for (name, _), (x, y) in zip(names, parts, strict=True)]
        monkeypatch.setattr(reader, f"{split}_list", listed)
        arrays[f"x_{split}"] = np.concatenate([x for x, _ in parts]).reshape(-1, 3, 32, 32)
        arrays[f"y_{split}"] = np.concatenate([y for _, y in parts])
    classes = [f"class {i}" for i in range(10 if kind == "CIFAR10" else 100)]
    _, md5 = put(reader.meta["filename"], {reader.meta["key"]: classes})
    monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": md5})
    return arrays


@pytest.mark.parametrize(("name", "kind"), [("mnist", "MNIST"), ("fmnist", "FashionMNIST")])
def test_grey_images_from_a_torchvision_root(tmp_path: Path, name: str, kind: str) -> None:
    arrays = grey(tmp_path / "root", kind)
    prepare(name, tmp_path / "out", tmp_path / "root")
    data = load(name, tmp_path / "out")
    assert (data.shape, data.scale, data.num_classes) == ((1, 28, 28), 255.0, 10)
    assert data.classes[9] == ("9" if name == "mnist" else "Ankle boot")
    for half, split in ((data.train, "train"), (data.test, "test")):
        assert np.array_equal(half.x[:, 0], arrays[f"x_{split}"])
        assert np.array_equal(half.y, arrays[f"y_{split}"])


@pytest.mark.parametrize(("name", "kind"), [("cifar10", "CIFAR10"), ("cifar100", "CIFAR100")])
def test_colour_images_from_a_torchvision_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    arrays = colour(tmp_path / "root", monkeypatch, kind)
    prepare(name, tmp_path / "out", tmp_path / "root")
    data = load(name, tmp_path / "out")
    assert (data.shape, data.classes[3]) == ((3, 32, 32), "class 3")
    assert np.array_equal(data.train.x, arrays["x_train"])
    assert np.array_equal(data.test.x, arrays["x_test"])
    assert np.array_equal(data.train.y, arrays["y_train"])


def test_archives_with_the_right_checksum_are_unpacked_without_touching_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = grey(tmp_path / "root", "MNIST")
    raw = tmp_path / "root" / "MNIST" / "raw"
    resources = []
    for path in sorted(raw.iterdir()):
        (raw / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        resources.append((f"{path.name}.gz", hashlib.md5((raw / f"{path.name}.gz").read_bytes()).hexdigest()))
        path.unlink()
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    prepare("mnist", tmp_path / "out", tmp_path / "root")
    assert np.array_equal(load("mnist", tmp_path / "out").test.x[:, 0], arrays["x_test"])
    assert sorted(path.name for path in raw.iterdir()) == sorted(name for name, _ in resources)
    assert not (tmp_path / "out" / ".downloads" / "mnist").exists()


def test_a_cifar_archive_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = colour(tmp_path / "root", monkeypatch, "CIFAR10")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(tmp_path / "root" / "cifar-10-batches-py", "cifar-10-batches-py")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "cifar-10-python.tar.gz").write_bytes(packed.getvalue())
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "tgz_md5", hashlib.md5(packed.getvalue()).hexdigest())
    prepare("cifar10", tmp_path / "out", tmp_path / "source")
    assert np.array_equal(load("cifar10", tmp_path / "out").train.x, arrays["x_train"])


def test_a_source_without_the_files_names_the_expected_ones(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(DataError, match=r"FashionMNIST/raw/train-images-idx3-ubyte, or .*original checksums"):
        prepare("fmnist", tmp_path / "out", tmp_path / "root")
    assert not (tmp_path / "out" / "fmnist").exists()


def test_a_damaged_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    colour(tmp_path / "root", monkeypatch, "CIFAR10")
    path = tmp_path / "root" / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="cannot read CIFAR10"):
        prepare("cifar10", tmp_path / "out", tmp_path / "root")


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", fail)
    with pytest.raises(DataError, match=r"cannot download MNIST .*no route to host.*give it as --source"):
        prepare("mnist", tmp_path / "out")
