"""A meta.json written by hand: what it leaves out is measured on first use, and a later change is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedrpc.data import measured
from fedrpc.data.datasets import load, open_folder, verify
from fedrpc.data.layout import Raw
from fedrpc.errors import DataError

Place = Callable[..., Path]
FULL = {"shape", "dtype", "scale", "mean", "std", "sha256"}


@pytest.fixture(autouse=True)
def _nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_IN_MEMORY", {})


def write_by_hand(folder: Path, **keys: object) -> dict[str, object]:
    """Replaces a folder's meta.json by a hand-written one; returns the one that was there."""
    path = folder / "meta.json"
    before = json.loads(path.read_text())
    path.write_text(json.dumps({"classes": before["classes"], **keys}))
    return before


def refuse(*_: object, **__: object) -> None:
    """Writes nothing: root may write anywhere, so a mode would not do."""
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("kind", ["images", "signals"])
def test_classes_are_all_that_one_must_write(request: pytest.FixtureRequest, place: Place, kind: str) -> None:
    folder = place(request.getfixturevalue(kind))
    expected = open_folder(folder)
    before = write_by_hand(folder)
    data = load("own", folder.parent)
    assert (data.digest, data.shape, data.scale) == (expected.digest, expected.shape, expected.scale)
    assert (data.mean, data.std) == (expected.mean, expected.std)
    kept = json.loads((folder / measured.FILE).read_text())["measured"]
    assert kept == {key: before[key] for key in FULL}
    assert verify(folder).digest == expected.digest
    assert sorted(path.name for path in folder.glob(".*")) == []


def test_what_is_written_by_hand_wins(images: Raw, place: Place) -> None:
    folder = place(images)
    write_by_hand(folder, scale=51, mean=[0, 0], std=[2, 3])
    data = open_folder(folder)
    assert (data.scale, data.mean, data.std) == (51.0, (0.0, 0.0), (2.0, 3.0))
    write_by_hand(folder, scale=255)
    assert open_folder(folder).mean == pytest.approx(images.arrays["x_train"].mean((0, 2, 3)) / 255, abs=1e-6)


def test_arrays_are_read_once_only(images: Raw, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place(images)
    write_by_hand(folder)
    digest = open_folder(folder).digest
    monkeypatch.setattr(measured, "hash_array", lambda values: pytest.fail("read again"))
    assert open_folder(folder).digest == digest


def test_a_folder_that_cannot_be_written_is_measured_in_memory(
    images: Raw, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place(images)
    expected = open_folder(folder).digest
    write_by_hand(folder)
    monkeypatch.setattr(Path, "write_text", refuse)
    assert open_folder(folder).digest == expected
    assert not (folder / measured.FILE).exists()
    monkeypatch.setattr(measured, "hash_array", lambda values: pytest.fail("read again"))
    assert open_folder(folder).digest == expected


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_changed_array_is_refused(
    images: Raw, place: Place, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place(images)
    write_by_hand(folder)
    if in_memory:
        monkeypatch.setattr(Path, "write_text", refuse)
    digest = open_folder(folder).digest
    np.save(folder / "x_test.npy", images.arrays["x_test"] ^ 1)
    with pytest.raises(DataError, match=r"x_test.npy: checksum: expected [0-9a-f]{64}, as measured on first use, got"):
        open_folder(folder)
    np.save(folder / "x_test.npy", images.arrays["x_test"])
    assert open_folder(folder).digest == digest


def test_removing_the_file_accepts_the_change(images: Raw, place: Place) -> None:
    folder = place(images)
    write_by_hand(folder)
    digest = open_folder(folder).digest
    (folder / "group_train.npy").unlink()
    with pytest.raises(DataError, match=r"group_train.npy: checksum: .*got no such file; restore it, or remove"):
        open_folder(folder)
    (folder / measured.FILE).unlink()
    assert open_folder(folder).digest != digest


def test_a_copy_with_other_times_is_the_same_data(images: Raw, place: Place) -> None:
    folder = place(images)
    write_by_hand(folder)
    digest = open_folder(folder).digest
    os.utime(folder / "x_train.npy", ns=(1, 1))
    assert open_folder(folder).digest == digest
    assert json.loads((folder / measured.FILE).read_text())["files"]["x_train"][1] == 1


def test_what_cannot_be_used_is_refused_as_ever(images: Raw, signals: Raw, place: Place) -> None:
    folder = place(images, "wide")
    write_by_hand(folder)
    np.save(folder / "x_train.npy", images.arrays["x_train"].astype(np.float64))
    with pytest.raises(DataError, match="dtype: expected uint8 or float32, got 'float64'"):
        open_folder(folder)
    folder = place(signals, "holes")
    write_by_hand(folder)
    x = signals.arrays["x_train"].copy()
    x[4] = np.nan
    np.save(folder / "x_train.npy", x)
    with pytest.raises(DataError, match="expected finite numbers, got NaN or infinity in sample 4"):
        open_folder(folder)
    folder = place(images, "scaled")
    write_by_hand(folder, scale=0)
    with pytest.raises(DataError, match="scale: expected a number above 0, got 0"):
        open_folder(folder)
    folder = place(images, "torn")
    write_by_hand(folder)
    (folder / measured.FILE).write_text('{"sha')
    with pytest.raises(DataError, match=r"measured.json: expected what fedrpc measured.*remove it to measure again"):
        open_folder(folder)
