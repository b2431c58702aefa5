"""The values that pages are made of, and the templates that turn them into HTML with all text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedrpc.report.style import DARK, LIGHT, METHOD_HUES


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
class Tile:
    """One headline fact: its name, its value, and a note; `wide` fills the page's width, for a long note."""

    name: str
    value: str
    note: str = ""
    mood: str = ""  # "good", "bad" or ""
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """A table whose first `words` columns are text and the rest numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    words: int = 1


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fedrpc.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"light": LIGHT, "dark": DARK, "hues": METHOD_HUES}
    return environment


def render(template: str, **values: Any) -> str:
    """Fills a template of this room."""
    return _environment().get_template(template).render(values)
