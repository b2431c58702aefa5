from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrpc.data.datasets import DATASETS, EMBEDDED, list_available, load, open_folder, verify
from fedrpc.data.layout import Raw
from fedrpc.data.origins import Origin
from fedrpc.errors import DataError, UnknownName

Place = Callable[..., Path]
Edit = Callable[..., None]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDRPC_DATA", raising=False)


def test_a_folder_of_ones_own_works(images: Raw, place: Place) -> None:
    folder = place(images)
    data = load("own", folder.parent)
    assert (data.name, data.classes, data.num_classes, data.shape) == ("own", ("a", "b", "c"), 3, (2, 4, 5))
    assert (data.licence, data.source) == ("CC0", "made here")
    for half, split in ((data.train, "train"), (data.test, "test")):
        assert np.array_equal(half.x, images.arrays[f"x_{split}"])
        assert half.y.dtype == np.int64
        assert np.array_equal(half.y, images.arrays[f"y_{split}"])
        assert half.group is not None
        assert np.array_equal(half.group, images.arrays[f"group_{split}"])
        assert not half.x.flags.writeable


def test_groups_are_optional(signals: Raw, place: Place) -> None:
    assert load("own", place(signals).parent).train.group is None


def test_small_label_types_become_int64(images: Raw, place: Place) -> None:
    folder = place(images)
    np.save(folder / "y_train.npy", images.arrays["y_train"].astype(np.uint8))
    assert load("own", folder.parent).train.y.dtype == np.int64


def test_environment_names_the_folder_and_the_argument_wins(
    images: Raw, signals: Raw, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDRPC_DATA", str(place(images).parent))
    assert load("own").num_classes == 3
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(UnknownName):
        load("own", tmp_path / "elsewhere")


def test_digest_changes_with_data_and_name(images: Raw, place: Place) -> None:
    first, second = place(images, "one"), place(images, "two")
    changed = {**images.arrays, "x_test": images.arrays["x_test"] ^ 1}
    third = place(Raw(changed, images.classes, images.scale), "three")
    sums = [json.loads((folder / "meta.json").read_text())["sha256"] for folder in (first, second, third)]
    assert sums[0] == sums[1] != sums[2]
    assert len({open_folder(folder).digest for folder in (first, second, third)}) == 3
    assert open_folder(first).digest == open_folder(first).digest


# inputs


def test_inputs_of_images(images: Raw, place: Place) -> None:
    data = load("own", place(images).parent)
    unit = torch.from_numpy(images.arrays["x_train"] / 255.0)
    assert torch.allclose(data.inputs(data.train.x, "unit").double(), unit, atol=1e-7)
    assert torch.allclose(data.inputs(data.train.x, "symmetric").double(), 2 * unit - 1, atol=1e-6)
    standard = data.inputs(data.train.x)
    assert standard.dtype == torch.float32
    assert standard.shape == (12, 2, 4, 5)
    assert torch.allclose(standard.mean((0, 2, 3)), torch.zeros(2), atol=1e-4)
    assert torch.allclose(standard.std((0, 2, 3), correction=0), torch.ones(2), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "normalise"),
    [
        ("images", "standard"),
        ("images", "unit"),
        ("images", "symmetric"),
        ("signals", "standard"),
        ("signals", "unit"),
    ],
)
def test_restored_values_undo_the_normalisation(
    request: pytest.FixtureRequest, place: Place, kind: str, normalise: str
) -> None:
    data = load("own", place(request.getfixturevalue(kind)).parent)
    expected = torch.from_numpy(np.array(data.train.x, dtype=np.float32)) / data.scale
    assert torch.allclose(data.restore_values(data.inputs(data.train.x, normalise), normalise), expected, atol=1e-5)


def test_inputs_are_a_copy(images: Raw, place: Place) -> None:
    data = load("own", place(images).parent)
    data.inputs(data.train.x, "unit").zero_()
    assert data.train.x.any()


def test_inputs_of_signals(signals: Raw, place: Place) -> None:
    data = load("own", place(signals).parent)
    assert torch.equal(data.inputs(data.train.x, "unit"), torch.from_numpy(signals.arrays["x_train"]))
    assert torch.allclose(data.inputs(data.train.x).mean((0, 2)), torch.zeros(6), atol=1e-4)
    with pytest.raises(DataError, match=r"symmetric.*float signals; use 'standard' or 'unit'"):
        data.inputs(data.train.x, "symmetric")


@pytest.mark.parametrize("normalise", ["standard", "unit", "symmetric"])
def test_bounds_are_black_and_white(normalise: str, images: Raw, place: Place) -> None:
    data = load("own", place(images).parent)
    bounds = data.bounds(normalise)
    assert bounds is not None
    for end, value in zip(bounds, (0, 255), strict=True):
        assert end.shape == (2, 1, 1)
        assert torch.equal(end.expand(data.shape), data.inputs(np.full((1, 2, 4, 5), value, np.uint8), normalise)[0])
    x = data.inputs(data.train.x, normalise)
    assert ((bounds[0] <= x) & (x <= bounds[1])).all()


def test_signals_have_no_bounds(signals: Raw, place: Place) -> None:
    assert load("own", place(signals).parent).bounds() is None


def test_inputs_refuse_wrong_shapes_and_settings(signals: Raw, place: Place) -> None:
    data = load("own", place(signals).parent)
    with pytest.raises(DataError, match=r"unknown normalise 'zscore'; expected one of standard, unit, symmetric"):
        data.inputs(data.train.x, "zscore")
    with pytest.raises(DataError, match=r"expected shape \(n, 6, 16\), got \(6, 16\)"):
        data.inputs(data.train.x[0])
    broken = data.train.x.copy()
    broken[1, 2, 3] = np.nan
    with pytest.raises(DataError, match="expected finite values, got NaN"):
        data.inputs(broken)


# what load refuses


def test_an_unknown_name_suggests_the_nearest(images: Raw, place: Place) -> None:
    folder = place(images, "birds")
    with pytest.raises(UnknownName, match="Did you mean 'fmnist'"):
        load("fmnst", folder.parent)
    with pytest.raises(UnknownName, match="Did you mean 'birds'"):
        load("bird", folder.parent)


def test_a_known_but_absent_set_says_how_to_get_it_and_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fedrpc data prepare cifar10 --data-dir DIR") as caught:
        load("cifar10", tmp_path)
    assert str(tmp_path / "cifar10" / "meta.json") in str(caught.value)
    assert "downloads 170 MB" in str(caught.value)


def test_a_name_cannot_leave_the_data_folder(images: Raw, place: Place, tmp_path: Path) -> None:
    place(images)
    (tmp_path / "inside").mkdir()
    with pytest.raises(UnknownName):
        load("../own", tmp_path / "inside")


BAD_META = [
    ({"classes": None}, "keys missing: .*got no classes"),
    ({"name": "other"}, "name: expected 'own', the folder's name, got 'other'"),
    ({"classes": []}, r"classes: expected a list of class names, got \[\]"),
    ({"shape": [2, 0, 5]}, "shape: expected a list of whole numbers above 0"),
    ({"dtype": "int32"}, "dtype: expected uint8 or float32, got 'int32'"),
    ({"scale": 0}, "scale: expected a number above 0, got 0"),
    ({"std": [0.0, 1.0]}, "std: expected a list with a number above 0"),
    ({"mean": [0.5]}, "length of mean: expected 2, the number of channels, got 1"),
    ({"sha256": {}}, "sha256: expected checksums of"),
    ({"dtype": "float32"}, "dtype: expected float32, got uint8"),
    ({"shape": [2, 5, 4]}, r"shape: expected \(n, 2, 5, 4\), got \(12, 2, 4, 5\)"),
    ({"classes": ["a", "b"]}, "labels: expected 0 to 1, got 0 to 2"),
]


@pytest.mark.parametrize(
    ("keys", "message"), BAD_META, ids=[next(iter(k)) + str(i) for i, (k, _) in enumerate(BAD_META)]
)
def test_bad_meta_is_refused(keys: dict[str, object], message: str, images: Raw, place: Place, edit: Edit) -> None:
    folder = place(images)
    edit(folder, **keys)
    with pytest.raises(DataError, match=message):
        load("own", folder.parent)


BAD_ARRAYS = [
    ("y_train", np.arange(11) % 3, r"shape: expected \(12,\), got \(11,\)"),
    ("y_train", np.zeros(12), "dtype: expected a whole-number type, got float64"),
    ("y_train", np.full(12, -1), "labels: expected 0 to 2, got -1 to -1"),
    ("group_test", np.arange(3), r"shape: expected \(6,\), got \(3,\)"),
    ("x_test", np.zeros((0, 2, 4, 5), np.uint8), "samples: expected 1 or more, got 0"),
    ("x_test", np.array([None]), "not readable"),
]


@pytest.mark.parametrize(("key", "values", "message"), BAD_ARRAYS)
def test_bad_arrays_are_refused(key: str, values: np.ndarray, message: str, images: Raw, place: Place) -> None:
    folder = place(images)
    np.save(folder / f"{key}.npy", values, allow_pickle=True)
    with pytest.raises(DataError, match=message) as caught:
        load("own", folder.parent)
    assert str(folder / f"{key}.npy") in str(caught.value)
    assert "make the folder again" in str(caught.value)


def test_unreadable_files_are_refused(images: Raw, place: Place) -> None:
    folder = place(images)
    whole_file = (folder / "x_train.npy").read_bytes()
    (folder / "x_train.npy").write_bytes(whole_file[:-9])
    with pytest.raises(DataError, match=r"x_train.npy: not readable"):
        load("own", folder.parent)
    (folder / "x_train.npy").unlink()
    with pytest.raises(DataError, match=r"x_train.npy: not readable"):
        load("own", folder.parent)
    (folder / "meta.json").write_text("{")
    with pytest.raises(DataError, match=r"meta.json: not readable"):
        load("own", folder.parent)


# verify


def test_verify_accepts_what_was_written(images: Raw, signals: Raw, place: Place) -> None:
    assert verify(place(images, "pictures")).name == "pictures"
    assert verify(place(signals, "motion")).name == "motion"


@pytest.mark.parametrize("key", ["x_train", "y_test", "group_train"])
def test_verify_finds_one_changed_value(key: str, images: Raw, place: Place) -> None:
    folder = place(images)
    values = images.arrays[key].copy()
    values.flat[3] = (values.flat[3] + 1) % 3
    np.save(folder / f"{key}.npy", values)
    load("own", folder.parent)
    with pytest.raises(DataError, match=f"{key}.npy: checksum: expected [0-9a-f]{{64}}, got [0-9a-f]{{64}}"):
        verify(folder)


def test_verify_finds_nan_and_says_where(signals: Raw, place: Place) -> None:
    x = signals.arrays["x_train"].copy()
    x[7, 0, 0] = np.inf
    folder = place(signals)
    np.save(folder / "x_train.npy", x)
    load("own", folder.parent)
    with pytest.raises(
        DataError, match=r"x_train.npy: values: expected finite numbers, got NaN or infinity in sample 7"
    ):
        verify(folder)


# cost


def _resident_kib(path: Path) -> int:
    """How much of the mapped file is in this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith(str(path))]
    assert starts, "the file is not mapped"
    return sum(int(line.split()[1]) for at in starts for line in lines[at : at + 4] if line.startswith("Rss:"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_opening_reads_no_sample_and_indexing_only_its_rows(place: Place) -> None:
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.integers(0, 256, (4000, 1, 64, 64), dtype=np.uint8), "y_train": np.zeros(4000)}
    arrays |= {"x_test": arrays["x_train"][:2], "y_test": np.zeros(2)}
    folder = place(Raw(arrays, ("all",), 255.0))
    data = load("own", folder.parent)
    assert _resident_kib(folder / "x_train.npy") == 0
    rows = data.train.x[[5, 2000, 3999]]
    assert np.array_equal(rows, arrays["x_train"][[5, 2000, 3999]])
    assert _resident_kib(folder / "x_train.npy") <= 3 * 256  # of 16,000: a page fault maps a few neighbours
    assert rows.nbytes == 3 * 64 * 64
    assert rows.base is None or rows.base.nbytes == rows.nbytes


# available


def test_available_lists_present_absent_and_broken(images: Raw, place: Place, edit: Edit) -> None:
    folder = place(images, "birds")
    broken = place(images, "broken")
    edit(broken, scale=0)
    (folder.parent / ".birds.1.new").mkdir()
    (folder.parent / ".birds.1.new" / "meta.json").write_text("{}")
    lines = {line.name: line for line in list_available(folder.parent)}
    assert {"birds", "broken", "fmnist-mini", "mnist", "urbansound8k"} <= set(lines)
    assert not any(name.startswith(".") for name in lines)
    birds = lines["birds"]
    assert (birds.present, birds.where, birds.licence, birds.note) == (True, folder, "CC0", "")
    assert birds.size_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert "scale: expected" in lines["broken"].note
    assert lines["fmnist-mini"].where == EMBEDDED / "fmnist-mini"
    absent = lines["urbansound8k"]
    assert (absent.present, absent.where, absent.licence) == (False, None, "CC BY-NC 3.0")
    assert "fedrpc data prepare urbansound8k" in absent.note
    assert absent.size_bytes > 0


def test_a_registered_set_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(source: Path | None, cache: Path, progress: object) -> Raw:
        raise NotImplementedError

    monkeypatch.setitem(DATASETS._items, "birdsong", Origin("CC0", "birds", "a microphone", 5, make))
    with pytest.raises(DataError, match="a microphone"):
        load("birdsong", tmp_path)
    assert "birdsong" in {line.name for line in list_available(tmp_path)}


# the set that comes with the package


def test_fmnist_mini_needs_no_folder() -> None:
    data = load("fmnist-mini")
    assert (len(data.train), len(data.test), data.shape, data.licence) == (6000, 1000, (1, 28, 28), "MIT")
    assert np.bincount(data.train.y).tolist() == [600] * 10
    assert np.bincount(data.test.y).tolist() == [100] * 10
    assert data.classes[0] == "T-shirt/top"
    assert data.mean[0] == pytest.approx(0.286, abs=0.005)
    assert data.std[0] == pytest.approx(0.353, abs=0.005)
    verify(EMBEDDED / "fmnist-mini")


def test_fmnist_mini_keeps_its_notice() -> None:
    notice = (EMBEDDED / "fmnist-mini" / "LICENSE").read_text()
    assert "Copyright (c) 2017 Zalando SE" in notice
    assert "Permission is hereby granted" in notice


def test_fmnist_mini_is_found_with_a_data_dir_too(tmp_path: Path) -> None:
    assert load("fmnist-mini", tmp_path).digest == load("fmnist-mini").digest


def test_fmnist_mini_can_be_learnt() -> None:
    """Nearest class mean: labels and images belong together."""
    data = load("fmnist-mini")
    x, t = (half.x.reshape(len(half), -1) / 255.0 for half in (data.train, data.test))
    means = np.stack([x[data.train.y == c].mean(0) for c in range(10)])
    guess = ((t[:, None] - means) ** 2).sum(2).argmin(1)
    assert (guess == data.test.y).mean() > 0.6


def test_the_first_channels_are_a_view_with_a_digest_of_its_own(images: Raw, place: Place) -> None:
    whole = load("own", place(images).parent)
    part = whole.select_channels(1)
    assert part.shape == (1, 4, 5)
    assert np.shares_memory(part.train.x, whole.train.x)
    for normalise in ("standard", "unit", "symmetric"):
        rows = slice(0, 3)
        expected = whole.inputs(whole.train.x[rows], normalise)[:, :1]
        assert torch.equal(part.inputs(part.train.x[rows], normalise), expected)
    assert part.digest != whole.digest
    with pytest.raises(DataError, match="'own' has 2, got 3; ask for fewer"):
        whole.select_channels(3)
