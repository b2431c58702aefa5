from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedrpc.cli.prepare import prepare_with_progress
from fedrpc.data import datasets
from fedrpc.data.layout import Raw
from fedrpc.data.origins import DATASETS, Origin
from fedrpc.errors import ConfigError, UnknownName


@pytest.fixture(autouse=True)
def _no_data_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDRPC_DATA", raising=False)


def prepared(name: str, folder: Path | None) -> str:
    out = io.StringIO()
    prepare_with_progress(name, folder, None, Console(file=out, width=80))
    return out.getvalue()


def test_preparing_shows_its_steps_and_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.zeros((4, 1, 2, 2), np.uint8), np.array([0, 1, 0, 1])

    def make(source: Path | None, cache: Path, progress: object) -> Raw:
        progress("listen", 3, 3)  # type: ignore[operator]
        return Raw({"x_train": x, "y_train": y, "x_test": x, "y_test": y}, ("no", "yes"), 255.0)

    monkeypatch.setitem(DATASETS._items, "birds", Origin("CC0", "birds", "patience", 100, make))
    text = prepared("birds", tmp_path)
    assert "birds: listen" in text
    assert f"birds is in {tmp_path / 'birds'}" in text
    assert f"set FEDRPC_DATA={tmp_path}." in text
    assert datasets.load("birds", tmp_path).num_classes == 2
    shutil.rmtree(tmp_path / "birds")
    monkeypatch.setenv("FEDRPC_DATA", str(tmp_path))
    assert "names that folder already" in prepared("birds", tmp_path)


def test_an_embedded_data_set_needs_no_preparation(tmp_path: Path) -> None:
    assert prepared("fmnist-mini", tmp_path).startswith("fmnist-mini comes with fedrpc")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_data_set_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'cifar100'"):
        prepared("cifar-100", tmp_path)


def test_no_folder_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"give --data-dir DIR, or set FEDRPC_DATA"):
        prepared("cifar10", None)
