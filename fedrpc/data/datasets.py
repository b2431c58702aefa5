"""Opens data set folders by memory map, so that any number of processes share one copy.

Opening reads meta.json, the array headers and the labels, never the samples; `verify` reads everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrpc.data import measured
from fedrpc.data.layout import SPLITS, find_not_finite, hash_array
from fedrpc.data.origins import DATASETS
from fedrpc.errors import ConfigError, DataError, UnknownName

if TYPE_CHECKING:
    import torch  # the functions that need it import it: listings do without its two seconds

EMBEDDED = Path(__file__).resolve().parent / "embedded"
NORMALISE = ("standard", "unit", "symmetric")
DTYPES = ("uint8", "float32")


@dataclass(frozen=True, eq=False)
class Split:
    """The training or test half of a data set: read-only samples, int64 labels and optional groups."""

    x: np.ndarray
    y: np.ndarray
    group: np.ndarray | None

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class DataSet:
    """An open data set; its arrays are memory maps.

    Attributes:
        classes: The name of each label.
        shape: One sample's shape, channels first.
        scale: The divisor of stored samples.
        mean: Mean of each channel after division by `scale`.
        std: Standard deviation of each channel after division by `scale`.
        digest: SHA-256 over the name and the arrays' checksums; equal digests mean equal data.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: Split
    test: Split
    digest: str
    licence: str
    source: str

    @property
    def num_classes(self) -> int:
        """How many classes there are, including those without samples."""
        return len(self.classes)

    def select_channels(self, count: int) -> DataSet:
        """The same samples with only their first channels; still memory maps, with a digest of its own."""
        if count > self.shape[0]:
            raise DataError(f"channels: '{self.name}' has {self.shape[0]}, got {count}; ask for fewer, or leave it out")
        return replace(
            self,
            shape=(count, *self.shape[1:]),
            mean=self.mean[:count],
            std=self.std[:count],
            train=replace(self.train, x=self.train.x[:, :count]),
            test=replace(self.test, x=self.test.x[:, :count]),
            digest=hashlib.sha256(f"{self.digest}\nfirst {count} channels".encode()).hexdigest(),
        )

    @cached_property
    def _channel_shape(self) -> tuple[int, ...]:
        return (1, self.shape[0], *(1,) * (len(self.shape) - 1))

    def inputs(self, x: np.ndarray, normalise: str = "standard") -> torch.Tensor:
        """Stored samples as a float32 tensor for a model.

        Args:
            x: Rows of `train.x` or `test.x`; they are copied.
            normalise: "standard" for zero mean and unit deviation in each channel, "unit" for stored values divided by
                `scale` (images lie in [0, 1]), "symmetric" for images in [-1, 1].
        """
        import torch

        self._check_inputs(x, normalise)
        out = torch.from_numpy(np.array(x, dtype=np.float32))
        if self.scale != 1.0:
            out.div_(self.scale)
        if normalise == "standard":
            out.sub_(torch.tensor(self.mean).view(self._channel_shape))
            out.div_(torch.tensor(self.std).view(self._channel_shape))
        elif normalise == "symmetric":
            out.mul_(2.0).sub_(1.0)
        return out

    def bounds(self, normalise: str = "standard") -> tuple[torch.Tensor, torch.Tensor] | None:
        """The smallest and the largest value of `inputs` by channel; None for signals, which have no fixed range."""
        if self.train.x.dtype != np.uint8:
            return None
        ends = np.stack([np.full(self.shape, value, np.uint8) for value in (0, 255)])
        values = self.inputs(ends, normalise).reshape(2, self.shape[0], -1)[:, :, 0]
        low, high = values.reshape(2, *self._channel_shape[1:])
        return low, high

    def restore_values(self, inputs: torch.Tensor, normalise: str = "standard") -> torch.Tensor:
        """Inverts `inputs` except for `scale`: images lie in [0, 1] again, signals have their own unit."""
        import torch

        if normalise == "standard":
            mean, std = (torch.tensor(values).view(self._channel_shape) for values in (self.mean, self.std))
            return inputs * std + mean
        return (inputs + 1.0) / 2.0 if normalise == "symmetric" else inputs

    def _check_inputs(self, x: np.ndarray, normalise: str) -> None:
        if normalise not in NORMALISE:
            raise DataError(f"unknown normalise '{normalise}'; expected one of {', '.join(NORMALISE)}")
        if x.shape[1:] != self.shape:
            raise DataError(f"samples of '{self.name}': expected shape (n, {_join_numbers(self.shape)}), got {x.shape}")
        if x.dtype.kind != "f":
            return
        if normalise == "symmetric":
            raise DataError(
                f"normalise 'symmetric' needs values with a known range, but '{self.name}' holds float signals; "
                "use 'standard' or 'unit'"
            )
        if not np.isfinite(x).all():
            raise DataError(
                f"samples of '{self.name}': expected finite values, got NaN or infinity; {_remedy(self.name)}"
            )


@dataclass(frozen=True)
class Listing:
    """One line of `fedrpc data list`.

    Attributes:
        where: The folder, when present.
        size_bytes: On disk when present, else an estimate.
        note: What is wrong with it, how to get it, or "".
    """

    name: str
    present: bool
    where: Path | None
    size_bytes: int
    licence: str
    note: str


def load(name: str, data_dir: Path | None = None) -> DataSet:
    """Opens data set `name`.

    Looks in `data_dir`, or else in the folder that the environment variable FEDRPC_DATA names; then among the sets
    that come with the package.

    Raises:
        UnknownName: Nothing of that name is known or present.
        DataError: The set is known but not there (the message says how to get it), or its folder is malformed.
    """
    looked = [root / name for root in _find_roots(data_dir)]
    if re.fullmatch(r"\w[\w.-]*", name):  # a name from a server's configuration must not leave the data folder
        for folder in looked:
            if (folder / "meta.json").is_file():
                return open_folder(folder)
    if name not in DATASETS:
        here = [path.name for root in _find_roots(data_dir) for path in _find_folders(root)]
        raise UnknownName(
            "data set",
            name,
            {*DATASETS, *here},
            "Your own is in the folder that --data-dir names (`fedrpc data import`).",
        )
    raise DataError(
        f"data set '{name}' is not there: looked for {' and '.join(str(folder / 'meta.json') for folder in looked)}; "
        f"get it with `fedrpc data prepare {name} --data-dir DIR` ({DATASETS[name].needs}), "
        "then give --data-dir DIR or set FEDRPC_DATA=DIR"
    )


def open_folder(folder: Path, name: str | None = None) -> DataSet:
    """Opens the data set in `folder`, by default named after it, and makes all checks that do not read samples."""
    name = name or folder.name
    meta = _read_meta(folder, name)
    splits = {split: _open_split(folder, split, meta) for split in SPLITS}
    sums = "".join(f"{key}={value}\n" for key, value in sorted(meta["sha256"].items()))
    return DataSet(
        name=name,
        classes=tuple(meta["classes"]),
        shape=tuple(meta["shape"]),
        scale=float(meta["scale"]),
        mean=tuple(map(float, meta["mean"])),
        std=tuple(map(float, meta["std"])),
        train=splits["train"],
        test=splits["test"],
        digest=hashlib.sha256(f"{name}\n{sums}".encode()).hexdigest(),
        licence=str(meta.get("licence", "not stated")),
        source=str(meta.get("source", "not stated")),
    )


def verify(dataset_dir: Path, name: str | None = None) -> DataSet:
    """Opens the set in `dataset_dir` and reads all of it: checksums of every array, and NaN in signals."""
    data = open_folder(dataset_dir, name)
    expected = _read_meta(dataset_dir, data.name)["sha256"]
    for split, half in (("train", data.train), ("test", data.test)):
        if (bad := find_not_finite(half.x)) is not None:
            path, got = dataset_dir / f"x_{split}.npy", f"NaN or infinity in sample {bad}"
            raise _fault(path, "values", "finite numbers", got, data.name)
    for key in expected:
        path = dataset_dir / f"{key}.npy"
        got = hash_array(_map_array(path, data.name))
        if got != expected[key]:
            raise _fault(path, "checksum", expected[key], got, data.name)
    return data


def list_available(data_dir: Path | None = None) -> list[Listing]:
    """Every known data set and every other folder found; absent ones say what they need."""
    found = {path.name: path for root in reversed(_find_roots(data_dir)) for path in _find_folders(root)}
    lines = [_list_folder(path) for path in found.values()]
    for name in DATASETS:
        if name not in found:
            origin = DATASETS[name]
            note = f"{origin.needs}: fedrpc data prepare {name} --data-dir DIR"
            lines.append(Listing(name, False, None, origin.size_bytes, origin.licence, note))
    return sorted(lines, key=lambda line: (not line.present, line.name))


def list_names(data_dir: Path | None = None) -> list[str]:
    """The names of all known data sets and of every other folder found; nothing is opened."""
    found = {path.name for root in _find_roots(data_dir) for path in _find_folders(root)}
    return sorted(found | DATASETS.names)


def find_data_dir(data_dir: str | Path | None) -> Path:
    """The folder that data sets are written to: the given one, or else the one that FEDRPC_DATA names.

    Raises:
        ConfigError: There is neither.
    """
    chosen = data_dir or os.environ.get("FEDRPC_DATA")
    if not chosen:
        raise ConfigError("no folder for the data: give --data-dir DIR, or set FEDRPC_DATA")
    return Path(chosen).expanduser()


def _list_folder(folder: Path) -> Listing:
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    try:
        data = open_folder(folder)
    except DataError as error:
        return Listing(folder.name, True, folder, size_bytes, "not known", str(error))
    return Listing(folder.name, True, folder, size_bytes, data.licence, "")


def _find_roots(data_dir: Path | None) -> list[Path]:
    chosen = data_dir or os.environ.get("FEDRPC_DATA")
    return [Path(chosen).expanduser(), EMBEDDED] if chosen else [EMBEDDED]


def _find_folders(root: Path) -> list[Path]:
    """Data set folders in `root`; hidden ones are half-written or downloads."""
    return sorted(path.parent for path in root.glob("*/meta.json") if not path.parent.name.startswith("."))


def _join_numbers(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _remedy(name: str) -> str:
    if name in DATASETS:
        return f"make it again with `fedrpc data prepare {name}`"
    return "make the folder again (fedrpc/data/layout.py says what it holds)"


def _fault(path: Path, what: str, expected: object, got: object, name: str) -> DataError:
    return DataError(f"{path}: {what}: expected {expected}, got {got}; {_remedy(name)}")


def _read_meta(folder: Path, name: str) -> Mapping[str, Any]:
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _fault(path, "not readable", "a JSON object", error, name) from error
    if not isinstance(meta, dict) or "classes" not in meta:
        raise _fault(path, "keys missing", "classes, the name of each label", "no classes", name)
    whole = measured.complete(folder, meta, lambda key: _map_array(folder / f"{key}.npy", name))
    _check_meta(path, whole, name)
    return whole


def _check_meta(path: Path, meta: Mapping[str, Any], name: str) -> None:
    def is_list(key: str, kind: type | tuple[type, ...]) -> bool:
        values = meta.get(key)
        return isinstance(values, list) and bool(values) and all(isinstance(item, kind) for item in values)

    arrays = [f"{letter}_{split}" for split in SPLITS for letter in "xy"]
    real = (int, float)
    rules = [
        ("name", meta.get("name", name) == name, f"'{name}', the folder's name"),
        ("classes", is_list("classes", str), "a list of class names"),
        ("shape", is_list("shape", int) and min(meta["shape"]) > 0, "a list of whole numbers above 0"),
        ("dtype", meta["dtype"] in DTYPES, " or ".join(DTYPES)),
        ("scale", isinstance(meta["scale"], real) and meta["scale"] > 0, "a number above 0"),
        ("mean", is_list("mean", real), "a list with a number for each channel"),
        ("std", is_list("std", real) and min(meta["std"]) > 0, "a list with a number above 0 for each channel"),
        ("sha256", isinstance(meta["sha256"], dict) and set(arrays) <= set(meta["sha256"]), f"checksums of {arrays}"),
    ]
    for key, holds, expected in rules:
        if not holds:
            raise _fault(path, key, expected, repr(meta.get(key)), name)
    for key in ("mean", "std"):
        if len(meta[key]) != meta["shape"][0]:
            raise _fault(path, f"length of {key}", f"{meta['shape'][0]}, the number of channels", len(meta[key]), name)


def _map_array(path: Path, name: str) -> np.ndarray:
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise _fault(path, "not readable", "a whole, non-empty .npy array", error, name) from error
    return mapped.view(np.ndarray)  # type: ignore[no-any-return]


def _open_split(folder: Path, split: str, meta: Mapping[str, Any]) -> Split:
    name = str(meta.get("name", folder.name))
    x_path, y_path, group_path = (folder / f"{key}_{split}.npy" for key in ("x", "y", "group"))
    x = _map_array(x_path, name)
    if str(x.dtype) != meta["dtype"]:
        raise _fault(x_path, "dtype", meta["dtype"], x.dtype, name)
    if list(x.shape[1:]) != meta["shape"]:
        raise _fault(x_path, "shape", f"(n, {_join_numbers(tuple(meta['shape']))})", x.shape, name)
    if not len(x):
        raise _fault(x_path, "samples", "1 or more", 0, name)
    y = _read_column(y_path, len(x), name)
    if y.min() < 0 or y.max() >= len(meta["classes"]):
        raise _fault(y_path, "labels", f"0 to {len(meta['classes']) - 1}", f"{y.min()} to {y.max()}", name)
    return Split(x, y, _read_column(group_path, len(x), name) if group_path.is_file() else None)


def _read_column(path: Path, rows: int, name: str) -> np.ndarray:
    """A mapped array of one whole number a sample, as int64."""
    values = _map_array(path, name)
    if values.dtype.kind not in "iu":
        raise _fault(path, "dtype", "a whole-number type", values.dtype, name)
    if values.shape != (rows,):
        raise _fault(path, "shape", (rows,), values.shape, name)
    return values.astype(np.int64, copy=False)
