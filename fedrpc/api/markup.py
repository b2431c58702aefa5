"""HTML for notebooks: small, without scripts, and readable on light and on dark ground."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 220, 56
_FRAME = (
    "border:1px solid rgba(128,128,128,.35);border-radius:8px;padding:10px 14px;"
    "display:inline-block;max-width:100%;overflow-x:auto"
)
_SOFT = "opacity:.65;padding:1px 14px 1px 0;text-align:left;vertical-align:top;white-space:nowrap;font-weight:normal"
_PLAIN = "padding:1px 0;text-align:left;vertical-align:top"
_TABLE = "border-collapse:collapse;border:none;color:inherit"


def draw_card(title: str, facts: Mapping[str, str], curve: Sequence[tuple[int, float]] = ()) -> str:
    """A run in a box: its facts, and its accuracy over rounds."""
    rows = "".join(
        f'<tr style="background:none"><th style="{_SOFT}">{escape(name)}</th>'
        f'<td style="{_PLAIN}">{escape(text)}</td></tr>'
        for name, text in facts.items()
    )
    table = f'<table style="{_TABLE};margin:6px 0 0">{rows}</table>'
    return f'<div style="{_FRAME}"><b>{escape(title)}</b>{_draw_curve(curve)}{table}</div>'


def _draw_curve(curve: Sequence[tuple[int, float]]) -> str:
    """A line without axes, between its least and its greatest value, which are written beside it."""
    if len(curve) < 2:
        return ""
    values = [value for _, value in curve]
    low, high = min(values), max(values)
    first, last = curve[0][0], curve[-1][0]
    points = " ".join(
        f"{4 + (_WIDTH - 8) * (index - first) / (last - first):.1f},"
        f"{_HEIGHT - 6 - (_HEIGHT - 12) * (value - low) / ((high - low) or 1):.1f}"
        for index, value in curve
    )
    words = f"accuracy from {low:.2f} to {high:.2f} %"
    return (
        f'<div style="margin:6px 0 0"><svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{words}">'
        f'<polyline points="{points}" fill="none" stroke="#2a78d6" stroke-width="2"/></svg> '
        f'<span style="opacity:.65;font-size:90%">{words}</span></div>'
    )


def draw_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """A table in a box; the first column is of words, the others of numbers."""

    def draw_row(tag: str, cells: Sequence[str], style: str = "") -> str:
        sides = ["left", *["right"] * (len(cells) - 1)]
        return "".join(
            f'<{tag} style="padding:2px 18px 2px 0;text-align:{side};{style}">{escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )

    body = "".join(f'<tr style="background:none">{draw_row("td", row, "white-space:nowrap")}</tr>' for row in rows)
    names = draw_row("th", head, "opacity:.65;font-weight:normal;vertical-align:bottom")
    top = f'<tr style="background:none">{names}</tr>'
    below = "".join(f'<div style="opacity:.65;font-size:90%;margin-top:4px">{escape(note)}</div>' for note in notes)
    table = f'<table style="{_TABLE};margin:6px 0 0">{top}{body}</table>'
    return f'<div style="{_FRAME}"><b>{escape(title)}</b>{table}{below}</div>'


def draw_progress(lines: Sequence[tuple[str, int, int, str]]) -> str:
    """Bars, one below the other: a name, how many rounds are done, of how many, and words."""
    rows = "".join(
        f'<tr style="background:none"><td style="{_PLAIN};padding-right:{10 if name else 0}px">{escape(name)}</td>'
        f'<td style="{_PLAIN}"><progress value="{done}" max="{max(of, 1)}" style="width:14em"></progress></td>'
        f'<td style="{_PLAIN};padding-left:10px">{escape(words)}</td></tr>'
        for name, done, of, words in lines
    )
    return f'<table style="{_TABLE}">{rows}</table>'
