"""Shows how a partition deals out a data set: a table, the card's numbers in words, a picture when asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.text import Text

from fedrpc.data import draw
from fedrpc.data.datasets import load
from fedrpc.data.partition import partition as split
from fedrpc.data.partition import subsample
from fedrpc.data.partition_card import card as card_of
from fedrpc.errors import ConfigError
from fedrpc.files import explain_unwritable
from fedrpc.report.words import card_in_words


def show_split(
    dataset: str,
    partition: str,
    clients: int,
    seed: int,
    train_size: int | None,
    data_dir: Path | None,
    png: Path | None,
    console: Console,
) -> None:
    """Prints the split that a run with these settings has, and draws it to `png` when that is given."""
    _check_picture(png)
    data = load(dataset, data_dir)
    pool = subsample(data.train.y, train_size, seed) if train_size else None
    parts = split(partition, data.train.y, clients, seed, group=data.train.group, pool=pool)
    card = card_of(parts, data.train.y, data.num_classes)
    for piece in _table(card, data.classes, console):
        console.print(piece)
    console.print(Text("\n".join(card_in_words(card))))
    if png is not None:
        _draw(card, png, f"{dataset}, {partition}, {clients} clients", data.classes)
        console.print(Text(f"picture: {png}"), soft_wrap=True)


def _table(card: dict[str, Any], classes: Sequence[str], console: Console) -> list[RenderableType]:
    """The table with the classes' names, or with their numbers and a key where the names would be broken up."""
    wide = console.options.update(max_width=10_000)
    named, numbered = draw.table(card, classes), draw.table(card)
    for made in (named, numbered):
        made.caption = None  # the words say it, and are not broken at the table's edge
        made.box, made.padding = SIMPLE_HEAD, (0, 1, 0, 0)  # so that a dozen columns of numbers fit in 80
    if Measurement.get(console, wide, named).maximum <= console.width:
        return [named]
    shown = [f"{number} {name}" for number, name in enumerate(classes)][: draw.MAX_COLUMNS]
    more = f", {len(classes) - len(shown)} more" if len(classes) > len(shown) else ""
    return [numbered, Text(f"Classes: {', '.join(shown)}{more}.")]


def _check_picture(png: Path | None) -> None:
    if png is not None and png.suffix.lower() != ".png":
        raise ConfigError(f"--png: expected a name that ends in .png, got '{png}'")


def _draw(card: dict[str, Any], png: Path, title: str, classes: tuple[str, ...]) -> None:
    with explain_unwritable(png):
        png.parent.mkdir(parents=True, exist_ok=True)
        draw.draw(card, png, title, classes)
