from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedrpc.errors import ConfigError, UnknownName
from fedrpc.report.split import show_split


def shown(
    width: int = 200, clients: int = 5, train_size: int | None = None, png: Path | None = None, **names: str
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width)
    show_split(
        names.get("dataset", "fmnist-mini"), names.get("partition", "iid"), clients, 0, train_size, None, png, console
    )
    return out.getvalue()


def test_the_table_and_the_words_are_of_the_same_split() -> None:
    text = shown(partition="shards:2,strict", clients=20)
    assert "Ankle boot" in text
    assert "6,000 samples of 10 classes over 20 clients: 300 each." in text
    assert "holds 2.0 classes on average" in text


def test_names_that_do_not_fit_are_numbers_with_a_key() -> None:
    text = shown(width=80)
    assert "Classes: 0 T-shirt/top, 1 Trouser" in text
    assert max(map(len, text.splitlines())) <= 80
    assert " client " in text
    assert " classes " in text


def test_a_part_of_the_training_set_is_split() -> None:
    assert "1,000 samples of 10 classes over 5 clients: 200 each." in shown(train_size=1000)


def test_a_picture_is_drawn_and_its_place_told(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "split.png"
    assert f"picture: {path}" in shown(png=path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.png"):
        shown(png=tmp_path / "split.jpg")
    with pytest.raises(UnknownName, match="'dirichlet'"):
        shown(partition="dirichle:0.1")
    with pytest.raises(UnknownName, match="'fmnist-mini'"):
        shown(dataset="fmnist-min")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        shown(png=tmp_path / "file" / "split.png")
