"""The values that pages are made of, and the templates that turn them into HTML with all text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from fedrpc.report.style import DARK, LIGHT, NUM_KIND_HUES, NUM_METHOD_HUES


@dataclass(frozen=True)
class Plot:
    """A drawing with its heading, legend and caption.

    Attributes:
        svg: The drawing, as SVG that needs no escaping.
        legend: (style, words) of each thing shown; a style is what the drawing used.
        wide: Whether it fills the page's width.
    """

    title: str
    svg: str
    caption: str = ""
    legend: Sequence[tuple[str, str]] = field(default=())
    wide: bool = False


@dataclass(frozen=True)
class Bar:
    """A line of bars: whose it is, the drawing (SVG that needs no escaping), and what it comes to."""

    name: Any
    svg: str
    text: str


@dataclass(frozen=True)
class Bars:
    """Lines of bars with their heading, legend and caption; they fit any width."""

    title: str
    rows: Sequence[Bar]
    caption: str = ""
    legend: Sequence[tuple[str, str]] = field(default=())
    wide: bool = False


@dataclass(frozen=True)
class Tile:
    """One headline fact: its name, its value, and a note; `wide` fills the page's width, for a long note."""

    name: str
    value: str
    note: str = ""
    mood: str = ""  # "good", "bad" or ""
    wide: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of a table that stands for a number.

    Attributes:
        text: What is shown.
        value: The number itself, by which the page sorts and which it copies; None where there is none.
        spread: Its standard deviation, which is copied, too.
        best: Whether it is marked as the best of its column.
    """

    text: str
    value: float | None = None
    spread: float | None = None
    best: bool = False


def mark_best(cells: Sequence[Cell], *, highest: bool) -> list[Cell]:
    """Marks the best cells of a column; none where fewer than two have a value, or all have the same."""
    values = [cell.value for cell in cells if cell.value is not None]
    if len(set(values)) < 2:
        return list(cells)
    top = max(values) if highest else min(values)
    return [replace(cell, best=cell.value == top) for cell in cells]


@dataclass(frozen=True)
class Table:
    """A table of texts and `Cell`s, whose first `words` columns are text and the rest numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    words: int = 1


@cache
def open_templates(*packages: str) -> Environment:
    """Opens the templates of this room, and those of other packages before them."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (*packages, "fedrpc.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"light": LIGHT, "dark": DARK}
    environment.globals |= {"num_method_hues": NUM_METHOD_HUES, "num_kind_hues": NUM_KIND_HUES}
    environment.globals |= {"nonce": ""}  # of a page whose scripts and styles must be known to its server
    return environment


def render(template: str, **values: Any) -> str:
    """Fills a template of this room."""
    return open_templates().get_template(template).render(values)
