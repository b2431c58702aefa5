"""Puts plots of `Canvas` side by side in an SVG file of its own, with its colours for light and dark inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from fedrpc.report.style import DARK, LIGHT, NUM_METHOD_HUES
from fedrpc.report.svg import Canvas, format_coordinate

NEUTRAL = "b"  # the end of the classes of a baseline, as on pages
_BASE = ("card", "ink", "soft", "line", "grid")
_LETTER = 6.0  # pixels, about, of a letter of the legend
_LINE, _HEAD, _KEY = 20, 24, 16  # pixels: a line of the legend, a panel's title, and a sign of the legend with its gap
_RULES = """svg{font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;font-variant-numeric:tabular-nums}
line.grid{stroke:var(--grid)}line.base{stroke:var(--line)}
.tick,.axis,.legend{fill:var(--soft)}text.head{fill:var(--ink);font-weight:600;font-size:12px}
.ground{fill:var(--card)}polyline{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
circle{stroke:var(--card);stroke-width:1.2}circle.paper{fill:none;stroke:var(--ink);stroke-width:1.8}
circle.seed{fill-opacity:.45;stroke:none}polygon.band{opacity:.16}rect.spread{opacity:.4}
"""


@dataclass(frozen=True)
class Panel:
    """A plot of a picture and its title."""

    title: str
    canvas: Canvas


def choose_colours(names: Sequence[str], baselines: Iterable[str] = ()) -> dict[str, str]:
    """One colour for each name, as the end of a class name: `m<end>` fills, `c<end>` draws a line."""
    neutral = set(baselines)
    others = [name for name in names if name not in neutral]
    return dict.fromkeys(neutral, NEUTRAL) | {name: str(i % NUM_METHOD_HUES) for i, name in enumerate(others)}


def draw_picture(label: str, lines: Sequence[Sequence[Panel]], legend: Sequence[tuple[str, str]]) -> str:
    """The file: a legend above lines of panels.

    Args:
        legend: (the class of a circle, words) of each sign.
    """
    width = max(sum(panel.canvas.width for panel in line) for line in lines)
    keys, top = _draw_legend(legend, width)
    parts = list(keys)
    for line in lines:
        left = 0
        for panel in line:
            parts.append(f'<text class="head" x="{left + 8}" y="{top + 14}">{escape(panel.title)}</text>')
            where = f'x="{left}" y="{top + _HEAD}" width="{panel.canvas.width}" height="{panel.canvas.height}"'
            parts.append(panel.canvas.svg().replace("<svg ", f"<svg {where} ", 1))
            left += panel.canvas.width
        top += _HEAD + max(panel.canvas.height for panel in line)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}" '
        f'role="img" aria-label="{escape(label)}">\n<style>{_write_style(body)}</style>\n'
        f'<rect class="ground" width="{width}" height="{top}"/>\n{body}\n</svg>\n'
    )


def _draw_legend(legend: Sequence[tuple[str, str]], width: int) -> tuple[list[str], int]:
    """The signs, over as many lines as they need, and the height of all."""
    parts, left, top = [], 8.0, 4
    for style, words in legend:
        needed = _KEY + _LETTER * len(words) + 14
        if left + needed > width and left > 8:
            left, top = 8.0, top + _LINE
        x = format_coordinate(left + 5)
        parts.append(
            f'<circle class="{style}" cx="{x}" cy="{top + 9}" r="{2.4 if style.startswith("seed") else 4.5}"/>'
        )
        parts.append(f'<text class="legend" x="{format_coordinate(left + _KEY)}" y="{top + 13}">{escape(words)}</text>')
        left += needed
    return parts, top + _LINE + 6


def _write_style(body: str) -> str:
    """The rules, with those colours that the picture has."""
    hues = {NEUTRAL: "s7"} | {str(number): f"m{number}" for number in range(NUM_METHOD_HUES)}
    used = {end: name for end, name in hues.items() if f'm{end}"' in body or f'c{end}"' in body}
    names = [*_BASE, *used.values()]
    light, dark = ("".join(f"--{name}:{colours[name]};" for name in names) for colours in (LIGHT, DARK))
    rules = "".join(
        f".m{end}{{fill:var(--{name})}}polyline.c{end}{{stroke:var(--{name})}}circle.c{end}{{fill:var(--{name})}}\n"
        for end, name in used.items()
    )
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}\n{_RULES}{rules}"
