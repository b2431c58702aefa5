"""A data set of noise in MNIST's shape, made on the spot: benches need no download, and speed needs no digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedrpc.data.layout import Raw, write

NAME = "mnist-like"


def write_mnist_like(data_dir: Path, num_train: int) -> None:
    """Writes the folder of a data set of noise in ten classes."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, size in (("train", num_train), ("test", 1000)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (size, 1, 28, 28), np.uint8)
        arrays[f"y_{split}"] = np.arange(size) % 10
    raw = Raw(arrays, tuple(map(str, range(10))), 255.0)
    write(data_dir / NAME, NAME, raw, licence="none", source="noise")
