from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedrpc.data.datasets import DATASETS, EMBEDDED, load
from fedrpc.data.layout import Progress, Raw
from fedrpc.data.origins import Origin
from fedrpc.data.prepare import prepare
from fedrpc.errors import DataError, UnknownName


@pytest.fixture
def birdsong(images: Raw, monkeypatch: pytest.MonkeyPatch) -> dict[str, Raw]:
    """A data set as a third party registers it; tests may change what it makes."""
    holder = {"raw": images}

    def make(source: Path | None, cache: Path, progress: Progress) -> Raw:
        cache.mkdir(parents=True)
        (cache / "archive").write_text("downloaded")
        progress("listen", 1, 1)
        return holder["raw"]

    monkeypatch.setitem(DATASETS._items, "birdsong", Origin("CC0", "birds of the yard", "patience", 5, make))
    return holder


def test_a_third_party_set_is_prepared(birdsong: dict[str, Raw], tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    folder = prepare("birdsong", tmp_path / "deep" / "out", progress=lambda *step: steps.append(step))
    data = load("birdsong", tmp_path / "deep" / "out")
    assert folder == tmp_path / "deep" / "out" / "birdsong"
    assert (data.licence, data.source) == ("CC0", "birds of the yard")
    assert steps == [("listen", 1, 1), ("write", 0, 1), ("write", 1, 1)]
    assert [path.name for path in (tmp_path / "deep" / "out").iterdir()] == ["birdsong"]


def test_a_failed_verification_leaves_the_old_folder_and_the_download(birdsong: dict[str, Raw], tmp_path: Path) -> None:
    before = load("birdsong", prepare("birdsong", tmp_path).parent).digest
    raw = birdsong["raw"]
    birdsong["raw"] = Raw({**raw.arrays, "y_test": np.full(6, 3)}, raw.classes, raw.scale)
    with pytest.raises(DataError, match=r"labels: expected 0 to 2, got 3 to 3"):
        prepare("birdsong", tmp_path)
    assert load("birdsong", tmp_path).digest == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".downloads", "birdsong"]
    assert (tmp_path / ".downloads" / "birdsong" / "archive").exists()


def test_a_set_can_be_prepared_again(birdsong: dict[str, Raw], tmp_path: Path) -> None:
    prepare("birdsong", tmp_path)
    mapped = load("birdsong", tmp_path)
    first = mapped.train.x[0].copy()
    raw = birdsong["raw"]
    birdsong["raw"] = Raw({**raw.arrays, "x_train": raw.arrays["x_train"] ^ 255}, raw.classes, raw.scale)
    prepare("birdsong", tmp_path)
    assert np.array_equal(mapped.train.x[0], first)
    assert np.array_equal(load("birdsong", tmp_path).train.x[0], first ^ 255)


def test_a_full_disk_is_named(birdsong: dict[str, Raw], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataError, match=r"cannot make data set 'birdsong' in .*No space left"):
        prepare("birdsong", tmp_path)
    assert not (tmp_path / "birdsong").exists()


def test_unknown_and_embedded_names(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'cifar10'"):
        prepare("cifar", tmp_path)
    assert prepare("fmnist-mini", tmp_path) == EMBEDDED / "fmnist-mini"


@pytest.mark.data("mnist", "fmnist", "cifar10")
def test_full_sets_have_their_well_known_statistics() -> None:
    known = {"mnist": (0.1307, 0.3081), "fmnist": (0.2860, 0.3530), "cifar10": (0.4914, 0.2470)}
    for name, (mean, std) in known.items():
        data = load(name)
        assert data.mean[0] == pytest.approx(mean, abs=1e-4)
        assert data.std[0] == pytest.approx(std, abs=1e-4)
        assert len(data.test) == 10_000
