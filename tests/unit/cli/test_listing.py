from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, RenderableType

from fedrpc import config, models
from fedrpc.aggregation import AGGREGATORS
from fedrpc.cli import listing
from fedrpc.data.layout import Raw, write
from fedrpc.data.origins import DATASETS
from fedrpc.data.partition import PARTITIONERS
from fedrpc.methods import METHODS


@pytest.fixture(autouse=True)
def _no_data_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDRPC_DATA", raising=False)


def text_of(made: RenderableType, width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(made)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("methods", METHODS),
        ("aggregators", AGGREGATORS),
        ("datasets", [*DATASETS, "fmnist-mini"]),
        ("models", models.MODELS),
        ("partitions", PARTITIONERS),
        ("recipes", config.list_recipes()),
        ("settings", ["train.lr", "privacy.dp_sgd.noise_multiplier", "limits.quorum", "channels"]),
        ("params", [name for name in METHODS if METHODS[name].Params.model_fields]),
    ],
)
def test_every_name_starts_a_line(what: str, names: object, width: int) -> None:
    text = text_of(listing.LISTINGS[what](), width)
    starts = {line.split(" ")[0] for line in text.splitlines()}
    assert set(names) <= starts  # type: ignore[call-overload]
    assert max(map(len, text.splitlines())) <= width


def test_models_are_counted_for_their_own_data() -> None:
    row = next(line for line in text_of(listing.list_models()).splitlines() if line.startswith("zda-mnist"))
    assert "29,034" in row
    assert "1x28x28" in row
    assert "mnist, fmnist" in row


def test_a_partitions_syntax_follows_its_signature() -> None:
    written = {name: listing.write_syntax(name, PARTITIONERS[name]) for name in PARTITIONERS}
    assert written["shards"] == "shards:z [,strict] [,of=N]"
    assert written["iid"] == "iid [:stratified]"
    assert written["natural"] == "natural"
    assert written["dirichlet"].startswith("dirichlet:alpha [,balance=false] [,equal_size] [,min_size=N]")
    assert "[:stratified]" in text_of(listing.list_partitions())


def test_a_recipes_comment_is_joined() -> None:
    assert listing.read_leading_comment('# One\n# two.\n\n# not this\nmethod = "x"\n') == "One two."
    assert listing.read_leading_comment('method = "x"\n') == ""


def installed(folder: Path, *, verify: bool = False) -> str:
    return text_of(listing.list_installed_data(folder, verify=verify), 500)


def own_set(root: Path, name: str = "mine") -> Path:
    x, y = np.zeros((4, 1, 2, 2), np.uint8), np.array([0, 1, 0, 1])
    folder = root / name
    folder.mkdir(parents=True)
    raw = Raw({"x_train": x, "y_train": y, "x_test": x, "y_test": y}, ("no", "yes"), 255.0)
    write(folder, name, raw, licence="my own", source="made here")
    return folder


def test_installed_and_missing_data_sets_are_listed(tmp_path: Path) -> None:
    folder = own_set(tmp_path)
    rows = {line.split(" ")[0]: line for line in installed(tmp_path).splitlines()}
    assert str(folder) in rows["mine"]
    assert "my own" in rows["mine"]
    assert "comes with fedrpc" in rows["fmnist-mini"]
    assert "not here; downloads 170 MB" in rows["cifar10"]
    assert "OK" not in rows["mine"]


def test_verifying_reads_every_byte(tmp_path: Path) -> None:
    folder = own_set(tmp_path)
    assert "OK " in installed(tmp_path, verify=True)
    path = folder / "x_test.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    row = next(x for x in installed(tmp_path, verify=True).splitlines() if x.startswith("mine"))
    assert "WRONG: " in row
    assert "checksum" in row


def test_a_missing_folder_is_mentioned(tmp_path: Path) -> None:
    assert "which does not exist" in installed(tmp_path / "nope")


def test_an_own_data_set_is_listed_with_its_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_set(tmp_path)
    monkeypatch.setenv("FEDRPC_DATA", str(tmp_path))
    row = next(x for x in text_of(listing.list_datasets()).splitlines() if x.startswith("mine"))
    assert row.split() == ["mine", "yes", "2", "1x2x2", "4", "4", "made", "here"]
    (tmp_path / "mine" / "y_train.npy").unlink()
    assert "WRONG: " in text_of(listing.list_datasets())
