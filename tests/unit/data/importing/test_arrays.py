"""Arrays in .npz files."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrpc.data import import_path
from fedrpc.data.importing import Imported, Options
from fedrpc.errors import DataError

Bring = Callable[..., Imported]
RNG = np.random.default_rng(0)
Y = np.arange(30) % 3
X = np.arange(60.0).reshape(30, 2)
XY = {"x": X, "y": Y}


@pytest.fixture
def bring(tmp_path: Path) -> Bring:
    def do(arrays: dict[str, Any], **options: Any) -> Imported:
        np.savez(tmp_path / "mine.npz", **arrays)
        return import_path(tmp_path / "mine.npz", tmp_path / "data", None, Options(**options), force=True)

    return do


def test_x_and_y_are_divided(bring: Bring) -> None:
    x = RNG.integers(0, 256, (30, 3, 5, 5), dtype=np.uint8)
    found = bring({"x": x, "y": Y, "group": np.arange(30) // 3})
    assert (found.data.shape, found.data.classes, found.data.scale) == ((3, 5, 5), ("0", "1", "2"), 255.0)
    assert (len(found.data.train), len(found.data.test)) == (24, 6)
    assert found.what == "30 arrays of 3x5x5 uint8"
    by_group = {int(row.sum()): group for row, group in zip(x.astype(int), np.arange(30) // 3, strict=True)}
    for half in (found.data.train, found.data.test):
        assert [by_group[int(row.astype(int).sum())] for row in half.x] == half.group.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "names", ["x_train y_train x_test y_test", "train_images train_labels test_images test_labels"]
)
def test_halves_by_their_usual_names(names: str, bring: Bring) -> None:
    x = RNG.integers(0, 256, (30, 8, 8), dtype=np.uint8)
    found = bring(dict(zip(names.split(), (x, Y[:, None], x[:6], Y[:6, None]), strict=True)))
    assert np.array_equal(found.data.train.x, x[:, None])
    assert np.array_equal(found.data.test.x, x[:6, None])
    assert np.array_equal(found.data.test.y, Y[:6])


@pytest.mark.parametrize("names", ["x y x_test y_test", "x_test y_test x y", "data target x_val y_val"])
def test_arrays_without_a_half_are_the_training_half_beside_a_test_half(names: str, bring: Bring) -> None:
    x = RNG.integers(0, 256, (30, 8, 8), dtype=np.uint8)
    by_key = {"x": x, "data": x, "y": Y, "target": Y, "x_test": x[:6], "y_test": Y[:6], "x_val": x[:6], "y_val": Y[:6]}
    found = bring({name: by_key[name] for name in names.split()})
    assert np.array_equal(found.data.train.x, x[:, None])
    assert np.array_equal(found.data.test.x, x[:6, None])


def test_groups_are_those_of_their_rows(bring: Bring) -> None:
    group = np.arange(30) // 3
    found = bring({**XY, "group": group, "x_test": X[:6], "y_test": Y[:6], "group_test": group[:6]})
    assert found.data.train.group.tolist() == group.tolist()  # type: ignore[union-attr]
    assert found.data.test.group.tolist() == group[:6].tolist()  # type: ignore[union-attr]


def test_channels_come_first_and_signals_are_float32(bring: Bring) -> None:
    x = RNG.integers(0, 256, (30, 8, 9, 3), dtype=np.uint8)
    found = bring({"data": x, "labels": Y})
    assert found.data.shape == (3, 8, 9)
    assert found.notes == ("channels, which were last, come first",)
    found = bring({"x": RNG.normal(size=(30, 6, 20)), "y": np.array(["c", "b", "a"])[Y]})
    assert (found.data.shape, found.data.train.x.dtype, found.data.classes) == ((6, 20), np.float32, ("a", "b", "c"))
    assert found.data.inputs(found.data.train.x).std().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.float32])
def test_numbers_with_equal_sides_are_grey_images(dtype: type, bring: Bring) -> None:
    x = RNG.integers(0, 17, (30, 8, 8)).astype(dtype)
    found = bring({"images": x, "target": Y, "x_test": x[:6], "y_test": Y[:6]})
    assert (found.data.shape, found.data.train.x.dtype) == ((1, 8, 8), np.float32)
    assert np.array_equal(found.data.train.x[:, 0], x)
    assert found.notes == ("samples of 8x8 are taken for grey images, since both sides are equal (--signals)",)


@pytest.mark.parametrize("shape", [(8, 8), (6, 12)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_person_decides_between_signals_and_images(shape: tuple[int, int], dtype: type, bring: Bring) -> None:
    x = RNG.integers(0, 17, (30, *shape)).astype(dtype)
    for signals, expected in ((True, shape), (False, (1, *shape))):
        found = bring({"x": x, "y": Y}, signals=signals)
        assert (found.data.shape, found.notes) == (expected, ())


def test_numbers_with_other_sides_are_signals(bring: Bring) -> None:
    found = bring({"x": RNG.normal(size=(30, 6, 128)), "y": Y})
    assert found.data.shape == (6, 128)
    assert found.notes == ("samples of 6x128 are taken for signals of 6 channels and 128 time steps (--images)",)
    found = bring({"x": RNG.normal(size=(30, 1, 6, 12)), "y": Y})
    assert (found.data.shape, found.notes) == ((1, 6, 12), ())


def test_opaque_images_lose_their_fourth_channel(bring: Bring) -> None:
    x = RNG.integers(0, 256, (30, 8, 8, 4), dtype=np.uint8)
    x[..., 3] = 255
    found = bring({"x": x, "y": Y, "x_test": x[:6], "y_test": Y[:6]})
    assert np.array_equal(found.data.train.x, x[..., :3].transpose(0, 3, 1, 2))
    assert found.notes == ("channels, which were last, come first, without the opacity",)
    x[3, 2, 1, 3] = 7
    with pytest.raises(
        DataError, match=r"x: expected 1 or 3 channels, or opaque images, got 4 in shape .*; give \(n, h"
    ):
        bring({"x": x, "y": Y})
    found = bring({"x": x.transpose(0, 3, 1, 2), "y": Y})
    assert found.data.shape == (4, 8, 8)
    assert found.notes == ("samples of 4x8x8 are taken for images of 4 channels and 8x8 pixels",)


def test_rows_of_numbers_are_a_table(bring: Bring) -> None:
    x = RNG.normal(7, 3, (30, 4))
    x[3, 1] = np.nan
    x[:, 2] = 5
    found = bring({"x": x, "y": Y})
    assert found.data.shape == (3,)
    assert found.data.train.x.std(axis=0) == pytest.approx(np.ones(3), abs=1e-6)
    assert found.notes == (
        "missing numbers are filled by the training median: 1 (1)",
        "left out, the same in every training row: 2",
    )


def test_a_test_file_of_its_own(bring: Bring, tmp_path: Path) -> None:
    x = RNG.normal(size=(30, 4))
    np.savez(tmp_path / "held.npz", x=x[:5], y=Y[:5])
    found = bring({"x": x, "y": Y}, test_path=tmp_path / "held.npz")
    assert np.array_equal(found.data.test.x, found.data.train.x[:5])
    # Its test half is what is tested on, and that of the first file is left out.
    np.savez(tmp_path / "held.npz", x=x, y=Y, x_test=x[:5], y_test=Y[:5])
    found = bring({"x_test": x[20:], "y_test": Y[20:], "x": x, "y": Y}, test_path=tmp_path / "held.npz")
    assert len(found.data.train) == 30
    assert np.array_equal(found.data.test.x, found.data.train.x[:5])
    assert found.notes == ("left out: the arrays of test, since --test names others",)
    np.savez(tmp_path / "held.npz", x=x[:5], y=Y[:5], group=Y[:5])
    with pytest.raises(DataError, match=r"got those of test only; add an array group to .*mine\.npz, or leave"):
        bring({"x": x, "y": Y}, test_path=tmp_path / "held.npz")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": Y}, "expected arrays named x and y, got a; rename them"),
        ({"x": Y[:, None]}, "expected both x and y, got x; add what is missing"),
        ({"x": Y, "y": Y}, "x: expected 2 dimensions or more, got 1"),
        ({"x": Y[:, None], "y": Y[:5]}, r"y: expected shape \(30,\), got \(5,\); one for each row"),
        ({"x": Y[:, None], "y": np.eye(3)[Y]}, r"y: expected shape \(30,\), got \(30, 3\)"),
        ({"x": Y[:, None], "y": Y / 2}, "y: expected whole numbers or names, got float64; convert"),
        ({"x": np.full((30, 2, 9), np.nan), "y": Y}, "x: expected finite numbers of 32 bits, got NaN or inf"),
        ({"x": np.full((30, 2, 9), 1e300), "y": Y}, "x: expected finite numbers of 32 bits, got NaN or infinity in sa"),
        ({"x": np.array([None] * 30), "y": Y}, "expected arrays in an .npz file, got Python objects in one; convert"),
        ({"x": np.array(3), "y": Y}, "x: expected 2 dimensions or more, got 0"),
        ({**XY, "x_train": X, "y_train": Y}, "expected either x or x_train, got both; leave one of them out"),
        ({**XY, "data": X}, "expected one array for x, got x and data; leave one of them out"),
        (
            {"x_test": X, "y_test": Y},
            "expected arrays to train on, x and y or x_train and y_train, got only those of test; name them x and y",
        ),
        (
            {"x_train": X, "y_train": Y, "group_train": Y, "x_test": X, "y_test": Y},
            "expected groups in train and in test, got those of train only; add an array group_test, or leave the",
        ),
        (
            {**XY, "x_test": X, "y_test": Y, "group_test": Y},
            "expected groups in train and in test, got those of test only; add an array group_train, or leave the",
        ),
        (
            {"x_train": Y[:, None], "y_train": Y, "x_test": np.eye(30), "y_test": Y},
            "expected one shape in train and test",
        ),
    ],
)
def test_mistakes_are_one_line(arrays: dict[str, Any], message: str, bring: Bring) -> None:
    with pytest.raises(DataError, match=message) as caught:
        bring(arrays)
    assert "\n" not in str(caught.value)


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "good.npz", **XY)
    np.save(tmp_path / "array.npy", X)
    good = (tmp_path / "good.npz").read_bytes()
    other = "expected arrays in an .npz file, got a file of another kind; write it with numpy.savez"
    for content, message in (
        (b"junk", other),
        (b"", other),
        ((tmp_path / "array.npy").read_bytes(), other),
        (good.replace(X.tobytes(), X.tobytes()[::-1]), r"got a damaged one \(.*\); write it with numpy.savez again"),
    ):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            import_path(tmp_path / "bad.npz", tmp_path / "data")
        assert "pickle" not in str(caught.value)
        assert "\n" not in str(caught.value)
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as file:
        file.writestr("x", "1 2 3")
    with pytest.raises(DataError, match="x: expected an array, got something else"):
        import_path(tmp_path / "bad.npz", tmp_path / "data")
