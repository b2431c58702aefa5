"""A small data set folder that tests can break."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrpc.data.layout import Raw, write


@pytest.fixture
def images() -> Raw:
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", 12), ("test", 6)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (n, 2, 4, 5), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(n) % 3
        arrays[f"group_{split}"] = np.arange(n) // 2
    return Raw(arrays, ("a", "b", "c"), 255.0)


@pytest.fixture
def signals() -> Raw:
    rng = np.random.default_rng(1)
    arrays = {}
    for split, n in (("train", 10), ("test", 4)):
        arrays[f"x_{split}"] = rng.normal(3.0, 2.0, (n, 6, 16)).astype(np.float32)
        arrays[f"y_{split}"] = np.arange(n) % 2
    return Raw(arrays, ("still", "moving"), 1.0)


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., Path]:
    """Writes a Raw as the data set `name` below tmp_path and returns its folder."""

    def put(raw: Raw, name: str = "own") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        write(folder, name, raw, licence="CC0", source="made here")
        return folder

    return put


@pytest.fixture
def edit() -> Callable[..., None]:
    """Changes keys of a folder's meta.json; a value of None removes the key."""

    def change(folder: Path, **keys: Any) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        meta = {key: value for key, value in {**meta, **keys}.items() if value is not None}
        (folder / "meta.json").write_text(json.dumps(meta))

    return change
