from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedrpc.data.draw import draw, table
from fedrpc.data.partition import partition
from fedrpc.data.partition_card import card
from fedrpc.errors import ConfigError


def made(num_clients: int, num_classes: int = 10, spec: str = "dirichlet:1,min_size=1") -> dict[str, Any]:
    y = np.arange(6000) % num_classes
    return card(partition(spec, y, num_clients, 0), y, num_classes)


@pytest.mark.parametrize(("num_clients", "num_classes"), [(1, 2), (10, 10), (500, 10), (40, 100)])
def test_a_picture_is_drawn(tmp_path: Path, num_clients: int, num_classes: int) -> None:
    image = pytest.importorskip("matplotlib.image")
    draw(made(num_clients, num_classes), tmp_path / "a.png", "title")
    pixels = image.imread(tmp_path / "a.png")[..., :3]
    assert pixels.shape[0] > 400
    assert 900 < pixels.shape[1] < 2600
    colours = (pixels[::3, ::3] * 15).astype(int) @ [256, 16, 1]
    assert len(np.unique(colours)) > 10
    assert (pixels.min(axis=2) < 0.99).mean() > 0.1


def test_the_same_card_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a", "b"):
        draw(made(12), tmp_path / f"{name}.png", "title")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_without_matplotlib_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"drawing needs matplotlib.*pip install"):
        draw(made(3), tmp_path / "a.png", "title")


def shown(content: dict[str, Any], classes: list[str] | None = None) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(table(content, classes))
    return console.export_text()


def test_a_table_has_counts_names_and_totals() -> None:
    content = made(3, 2, "iid:stratified")
    text = shown(content, ["cat", "dog"])
    assert "cat" in text
    assert "dog" in text
    rows = [line.strip("│ ").split() for line in text.splitlines() if line.startswith("│")]
    assert rows[0] == ["0", "│", "1000", "│", "1000", "│", "2000", "│", "2"]
    assert rows[-1] == ["all", "│", "3000", "│", "3000", "│", "6000", "│", "2"]
    assert content["sha256"][:12] in text
    assert "more" not in text


def test_long_and_wide_tables_are_cut_and_say_so() -> None:
    text = shown(made(100, 50, "iid:stratified"))
    assert "... 80 more" in text
    assert "40 more" in text
    assert len(text.splitlines()) < 35
