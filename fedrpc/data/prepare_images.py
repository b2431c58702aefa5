"""Reads MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 through torchvision, which checks what it downloads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from fedrpc.data.layout import SPLITS, Progress, Raw
from fedrpc.errors import DataError


def make_mnist(source: Path | None, cache: Path, progress: Progress) -> Raw:
    """MNIST: 60,000 + 10,000 grey images of 28x28."""
    arrays, _ = _read("MNIST", source, cache, progress)
    return Raw(arrays, tuple(map(str, range(10))), 255.0)


def make_fmnist(source: Path | None, cache: Path, progress: Progress) -> Raw:
    """Fashion-MNIST: 60,000 + 10,000 grey images of 28x28."""
    return Raw(*_read("FashionMNIST", source, cache, progress), 255.0)


def make_cifar10(source: Path | None, cache: Path, progress: Progress) -> Raw:
    """CIFAR-10: 50,000 + 10,000 colour images of 32x32."""
    return Raw(*_read("CIFAR10", source, cache, progress), 255.0)


def make_cifar100(source: Path | None, cache: Path, progress: Progress) -> Raw:
    """CIFAR-100 with its fine labels."""
    return Raw(*_read("CIFAR100", source, cache, progress), 255.0)


def _read(
    kind: str, source: Path | None, cache: Path, progress: Progress
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Both splits of torchvision's data set class `kind`, and its class names."""
    import torchvision  # slow to import, and only needed here

    reader = getattr(torchvision.datasets, kind)
    root, download = (cache, True) if source is None else _stage(reader, source, cache)
    arrays: dict[str, np.ndarray] = {}
    names: tuple[str, ...] = ()
    for done, split in enumerate(SPLITS):
        progress("read" if source else "download", done, len(SPLITS))
        opened = _open(reader, root, split, download)
        arrays[f"x_{split}"], arrays[f"y_{split}"] = (
            _put_channels_first(opened),
            np.asarray(opened.targets, dtype=np.int64),
        )
        names = tuple(opened.classes)
    progress("read", len(SPLITS), len(SPLITS))
    return arrays, names


def _open(reader: Any, root: Path, split: str, download: bool) -> Any:
    try:
        return reader(str(root), train=split == "train", download=download)
    except (RuntimeError, OSError) as error:  # torchvision raises both; URLError is an OSError
        archives = ", ".join(path for path, _ in _list_archives(reader))
        raise DataError(
            f"cannot {'download' if download else 'read'} {reader.__name__} in {root}: {error}; "
            f"without a network, put {archives} in a folder and give it as --source"
        ) from error


def _put_channels_first(opened: Any) -> np.ndarray:
    x = np.asarray(opened.data)
    return x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def _list_archives(reader: Any) -> list[tuple[str, str]]:
    """The files that torchvision would download, below its root, with their MD5."""
    if hasattr(reader, "resources"):
        return [(f"{reader.__name__}/raw/{name}", md5) for name, md5 in reader.resources]
    return [(reader.filename, reader.tgz_md5)]


def _stage(reader: Any, source: Path, cache: Path) -> tuple[Path, bool]:
    """The folder for torchvision to read, and whether it must unpack; archives are copied: `source` is not changed."""
    from torchvision.datasets.utils import check_integrity

    archives = _list_archives(reader)
    first = archives[0][0]
    unpacked = source / (first.removesuffix(".gz") if hasattr(reader, "resources") else reader.base_folder)
    if unpacked.exists():
        return source, False
    if not all(check_integrity(str(source / path), md5) for path, md5 in archives):
        raise DataError(
            f"source of {reader.__name__}: expected {unpacked}, or {', '.join(path for path, _ in archives)} with the "
            f"original checksums, got neither in {source}; give the folder that torchvision uses as its root"
        )
    for path, _ in archives:
        (cache / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, cache / path)
    return cache, True
