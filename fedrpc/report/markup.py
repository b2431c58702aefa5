"""The pieces that the page is put together from: figures, tables and tiles, with all text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from fedrpc.report.svg import paint


@dataclass(frozen=True)
class Figure:
    """A plot with its heading, legend and caption.

    Attributes:
        legend: (style, words) of each thing shown; a style is what the plot was given.
        wide: Whether it takes the page's whole width.
    """

    title: str
    drawing: str
    caption: str = ""
    legend: Sequence[tuple[str, str]] = field(default=())
    wide: bool = False

    def html(self) -> str:
        """The figure as HTML."""
        keys = "".join(f"<span>{_swatch(style)}{escape(words)}</span>" for style, words in self.legend)
        legend = f'<div class="legend">{keys}</div>' if keys else ""
        caption = f"<figcaption>{escape(self.caption)}</figcaption>" if self.caption else ""
        heading = f"<h3>{escape(self.title)}</h3>"
        if self.wide:
            drawing = f'<div class="scroll">{self.drawing}</div>'
            return f'<figure class="card wide">{heading}{legend}{drawing}{caption}</figure>'
        return f'<figure class="card">{heading}{legend}{self.drawing}{caption}</figure>'


def _swatch(style: str) -> str:
    square = f'<rect {paint(style)} width="10" height="10" rx="2"/>'
    return f'<svg class="key" viewBox="0 0 10 10" aria-hidden="true">{square}</svg>'


@dataclass(frozen=True)
class Tile:
    """One headline fact: a word for it, the fact, and what one should know beside it."""

    name: str
    value: str
    note: str = ""
    mood: str = ""  # "good", "bad" or ""

    def html(self) -> str:
        """The tile as HTML."""
        mood = f" {self.mood}" if self.mood else ""
        note = f'<div class="note">{escape(self.note)}</div>' if self.note else ""
        return (
            f'<div class="tile{mood}"><div class="name">{escape(self.name)}</div>'
            f'<div class="value">{escape(self.value)}</div>{note}</div>'
        )


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, words: int = 1) -> str:
    """An HTML table whose first `words` columns are text and the rest numbers."""

    def cells(tag: str, row: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{'' if index < words else ' class=num'}>{escape(str(cell))}</{tag}>"
            for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(rows: Iterable[tuple[str, object]]) -> str:
    """Names and values, side by side."""
    inner = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in rows)
    return f"<dl>{inner}</dl>"


def card(title: str, inner: str, caption: str = "", *, wide: bool = True) -> str:
    """A framed piece of the page that is no figure."""
    end = f'<p class="caption">{escape(caption)}</p>' if caption else ""
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<div class="card{" wide" if wide else ""}">{heading}{inner}{end}</div>'


def folded(title: str, inner: str) -> str:
    """A piece that opens when asked."""
    return f'<details class="card wide"><summary>{escape(title)}</summary>{inner}</details>'


def section(title: str, about: str, pieces: Iterable[str]) -> str:
    """A section with its heading; nothing when it has no piece."""
    inner = "".join(pieces)
    lead = f'<p class="lead">{escape(about)}</p>' if about else ""
    return f'<section><h2>{escape(title)}</h2>{lead}<div class="grid">{inner}</div></section>' if inner else ""
