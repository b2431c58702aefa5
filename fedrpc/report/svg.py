"""Draws inline SVG that takes its colours from the page, so that one drawing serves light and dark."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

import numpy as np

Format = Callable[[float], str]
Point = tuple[float, float]
Item = TypeVar("Item")

MAX_DOTS = 40  # points of a line that are marked
MAX_TOOLTIPS = 400  # points of a line that have a tooltip
NARROW, WIDE = 560, 1140  # widths of a drawing that fills half the page, or all of it, at its natural size
LEFT, RIGHT, TOP, BOTTOM = 48, 22, 10, 36  # margins around the plot for its axes, in pixels


def format_number(value: float) -> str:
    """A number for an axis: 1,000, 0.25, 3e-05."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def format_percent(value: float) -> str:
    """An axis label."""
    return f"{value:g} %"


def choose_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover low to high; the first is at most low, the last at least high."""
    span = high - low or abs(high) or 1.0
    rough = span / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def choose_log_ticks(low: float, high: float, count: int = 8) -> list[float]:
    """At most about `count` numbers of the form 1, 2, 5, 10, ..., or powers of ten, that cover low to high."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    fine = [float(f"{factor}e{power}") for power in range(first, last + 1) for factor in (1, 2, 5)]
    start = max(index for index, tick in enumerate(fine) if tick <= low)
    end = min(index for index, tick in enumerate(fine) if tick >= high)
    if end - start < count:
        return fine[start : end + 1]
    step = -(-(last - first) // (count - 1))
    return [float(f"1e{power}") for power in range(first, last + step, step)]


def choose_whole_ticks(low: int, high: int, count: int = 8) -> list[float]:
    """Round integers from low to high."""
    step = max(1, int(max(choose_ticks(0, max(1, high - low), count)[1], 1)))
    return [float(value) for value in range(-(-low // step) * step, high + 1, step)]


@dataclass(frozen=True)
class Axis:
    """One direction of a plot.

    Attributes:
        low: The value at its start.
        high: The value at its end.
        ticks: Where it is marked.
        title: What it measures, with the unit.
        text: How a tick is written.
        log: Whether the scale is logarithmic.
    """

    low: float
    high: float
    ticks: Sequence[float]
    title: str = ""
    text: Format = format_number
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], title: str, text: Format = format_number, *, zero: bool = False) -> Axis:
        """An axis that covers all finite values, from 0 when `zero`."""
        low, high = _ends(values)
        if low == high and not zero:  # a lone value belongs in the middle
            low, high = low - (abs(low) / 10 or 1.0), high + (abs(high) / 10 or 1.0)
        ticks = choose_ticks(min(0.0, low) if zero else low, high)
        return cls(ticks[0], ticks[-1], ticks, title, text)

    @classmethod
    def of_losses(cls, values: Iterable[float], title: str) -> Axis:
        """An axis of losses: logarithmic where the largest is more than 20 times the smallest."""
        known = list(values)
        low, high = _ends(known)
        if low <= 0 or high / low <= 20:
            return cls.over(known, title)
        ticks = choose_log_ticks(low, high)
        return cls(ticks[0], ticks[-1], ticks, title, log=True)

    @classmethod
    def of_powers(cls, values: Iterable[float], title: str, text: Format = format_number) -> Axis:
        """A logarithmic axis that covers all positive values."""
        low, high = _ends(value for value in values if value > 0)
        ticks = choose_log_ticks(low or 1.0, high)
        if len(ticks) == 1:  # a lone value belongs in the middle
            ticks = [ticks[0] / 2, ticks[0], ticks[0] * 2]
        return cls(ticks[0], ticks[-1], ticks, title, text, log=True)

    @classmethod
    def of_rounds(cls, first: int, last: int) -> Axis:
        """An axis of rounds, also when there is only one."""
        low, high = (first - 0.5, last + 0.5) if first == last else (first, last)
        return cls(low, high, choose_whole_ticks(first, last), "round")

    def place(self, value: float) -> float:
        """Where a value lies, 0 at the start and 1 at the end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _ends(values: Iterable[float]) -> tuple[float, float]:
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    return min(known), max(known)


def thin(points: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of the points, evenly spaced, with the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]


def draw_bars(lines: Sequence[Sequence[tuple[str, float, str]]], longest: float) -> str:
    """Stacked bars that stretch to any width: the first line, and thinner ones below it.

    Args:
        lines: For each line its pieces: (style, size, words).
        longest: The size that fills the width.
    """
    parts, top = [], 0
    for place, pieces in enumerate(lines):
        height, start = 12 if place == 0 else 5, 0.0
        for style, size, words in pieces:
            x, width = (format_coordinate(1000 * value / (longest or 1)) for value in (start, size))
            where = f'x="{x}" y="{top}" width="{width}" height="{height}"'
            parts.append(f"<rect {fill_attribute(style)} {where}><title>{escape(words)}</title></rect>")
            start += size
        top += height + 1
    return f'<svg class="bar" viewBox="0 0 1000 {top - 1}" preserveAspectRatio="none">{"".join(parts)}</svg>'


def format_coordinate(value: float) -> str:
    """A coordinate, to a tenth of a pixel and without needless digits."""
    return f"{value:.1f}".removesuffix(".0")


class Canvas:
    """The drawing of one plot: axes first, then marks in the order in which they are added.

    Args:
        x: The horizontal axis.
        y: The vertical axis.
        label: What the plot shows, for screen readers.
        width: Of the whole drawing, in pixels before it is scaled.
        height: The same.
        left: Margin for the labels of the vertical axis.
        bottom: Margin for the labels of the horizontal axis.
    """

    def __init__(
        self,
        x: Axis,
        y: Axis,
        label: str,
        *,
        width: int = NARROW,
        height: int = 270,
        left: int = LEFT,
        bottom: int = BOTTOM,
    ) -> None:
        self._x, self._y, self._label = x, y, label
        self.width, self.height, self._left, self._bottom = width, height, left, bottom
        self._parts: list[str] = []

    def x(self, value: float) -> float:
        """The horizontal pixel of a value."""
        return self._left + self._x.place(value) * (self.width - self._left - RIGHT)

    def y(self, value: float) -> float:
        """The vertical pixel of a value."""
        return self.height - self._bottom - self._y.place(value) * (self.height - self._bottom - TOP)

    def _fits(self, x: float, y: float) -> bool:
        positive = (not self._x.log or x > 0) and (not self._y.log or y > 0)
        return math.isfinite(x) and math.isfinite(y) and positive

    def line(
        self,
        points: Sequence[Point],
        style: str,
        *,
        tooltip: Callable[[Point], str] | None = None,
        dots: bool = True,
    ) -> None:
        """A line; values that are not numbers leave a gap.

        Few points are marked; very many have no tooltip, nor has one for which there are no words.
        """
        crowd = len(points) > MAX_DOTS
        tooltip = tooltip if len(points) <= MAX_TOOLTIPS else None
        known: list[list[Point]] = [[]]
        for point in points:
            if self._fits(*point):
                known[-1].append(point)
            elif known[-1]:
                known.append([])
        for stretch in known:
            path = " ".join(f"{format_coordinate(self.x(x))},{format_coordinate(self.y(y))}" for x, y in stretch)
            if len(stretch) > 1:
                self._parts.append(f'<polyline class="{style}" points="{path}"/>')
            if dots and (tooltip or len(stretch) == 1):
                shown = style if not crowd or len(stretch) == 1 else "hit"
                for point in stretch:
                    words = tooltip(point) if tooltip else ""
                    if words or shown != "hit":
                        self.dot(point, shown, words, 5 if shown == "hit" else 3.2)

    def dot(self, point: Point, style: str, words: str = "", radius: float = 5) -> None:
        """A mark."""
        inner = f"<title>{escape(words)}</title>" if words else ""
        x, y = (format_coordinate(value) for value in (self.x(point[0]), self.y(point[1])))
        self._parts.append(f'<circle class="{style}" cx="{x}" cy="{y}" r="{radius:g}">{inner}</circle>')

    def ring(self, point: Point) -> None:
        """A ring around a mark."""
        self.dot(point, "ring", "", 9)

    def band(self, low: Sequence[Point], high: Sequence[Point], style: str) -> None:
        """The area between two lines."""
        edge = [*low, *reversed(high)]
        path = " ".join(f"{format_coordinate(self.x(x))},{format_coordinate(self.y(y))}" for x, y in edge)
        self._parts.append(f'<polygon class="{style}" points="{path}"/>')

    def level(self, value: float, words: str) -> None:
        """A dashed line across the plot, with words at its start."""
        y = format_coordinate(self.y(value))
        self._parts.append(f'<line class="level" x1="{self._left}" x2="{self.width - RIGHT}" y1="{y}" y2="{y}"/>')
        self.write(self._left + 4, self.y(value) - 6, words, "start", "halo")

    def block(self, left: float, right: float, low: float, high: float, style: str, words: str = "") -> None:
        """A filled rectangle, given by values."""
        x, y = self.x(left), self.y(high)
        place = zip(("x", "y", "width", "height"), (x, y, self.x(right) - x, self.y(low) - y), strict=True)
        where = " ".join(f'{name}="{format_coordinate(value)}"' for name, value in place)
        inner = f"<title>{escape(words)}</title>" if words else ""
        self._parts.append(f"<rect {fill_attribute(style)} {where}>{inner}</rect>")

    def stairs(self, low: Sequence[float], high: Sequence[float], style: str, *, start: int = 0) -> None:
        """Bars one unit wide without gaps, from `low` to `high`, as one shape: what many bars need."""

        def steps(values: Sequence[float]) -> list[Point]:
            return [(start + index + side, value) for index, value in enumerate(values) for side in (0, 1)]

        edge = [*steps(high), *reversed(steps(low))]
        path = " ".join(f"{format_coordinate(self.x(x))},{format_coordinate(self.y(y))}" for x, y in edge)
        self._parts.append(f'<polygon {fill_attribute(style)} points="{path}"/>')

    def heat_map(self, shades: np.ndarray) -> None:
        """Fills the plot with a grid of the accent colour, from clear at 0 to full at 1; row 0 is at the top."""
        x, y = self._left, TOP
        width, height = self.width - self._left - RIGHT, self.height - self._bottom - TOP
        self._parts.append(
            f'<image x="{x}" y="{y}" width="{width}" height="{height}" preserveAspectRatio="none" '
            f'style="image-rendering:pixelated" href="{encode_shades(shades)}"/>'
        )

    def write(self, x: float, y: float, words: str, anchor: str = "middle", style: str = "") -> None:
        """Text at a pixel."""
        kind = f' class="{style}"' if style else ""
        where = f'x="{format_coordinate(x)}" y="{format_coordinate(y)}"'
        self._parts.append(f'<text{kind} {where} text-anchor="{anchor}">{escape(words)}</text>')

    def svg(self, *, grid: bool = True) -> str:
        """The whole drawing."""
        axes = "".join([*self._vertical(grid), *self._horizontal()])
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self._label)}">'
            f"{axes}{''.join(self._parts)}</svg>"
        )

    def _vertical(self, grid: bool) -> Iterable[str]:
        for tick in self._y.ticks:
            y = self.y(tick)
            if grid:
                ends = f'x1="{self._left}" x2="{self.width - RIGHT}"'
                yield f'<line class="grid" {ends} y1="{format_coordinate(y)}" y2="{format_coordinate(y)}"/>'
            yield (
                f'<text class="tick" x="{self._left - 7}" y="{format_coordinate(y + 3.5)}" text-anchor="end">'
                f"{escape(self._y.text(tick))}</text>"
            )
        if self._y.title:
            middle = format_coordinate((TOP + self.height - self._bottom) / 2)
            yield (
                f'<text class="axis" transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">'
                f"{escape(self._y.title)}</text>"
            )

    def _horizontal(self) -> Iterable[str]:
        floor = self.height - self._bottom
        yield f'<line class="base" x1="{self._left}" x2="{self.width - RIGHT}" y1="{floor}" y2="{floor}"/>'
        for tick in self._x.ticks:
            yield (
                f'<text class="tick" x="{format_coordinate(self.x(tick))}" y="{floor + 15}" text-anchor="middle">'
                f"{escape(self._x.text(tick))}</text>"
            )
        if self._x.title:
            middle = format_coordinate((self._left + self.width - RIGHT) / 2)
            title = escape(self._x.title)
            yield f'<text class="axis" x="{middle}" y="{self.height - 4}" text-anchor="middle">{title}</text>'


def fill_attribute(style: str) -> str:
    """The attribute that fills a shape: a class of the page's style sheet, or a colour of its own."""
    return f'fill="{style}"' if style.startswith("hsl") else f'class="{style}"'


def pick_fill(index: int, count: int) -> str:
    """The fill of one of `count` things: the page's ten series, or else evenly spaced hues."""
    return (
        f"f{index}" if count <= 10 else f"hsl({360 * index / count:.0f} {(52, 68)[index % 2]}% {(46, 62)[index % 2]}%)"
    )


def encode_shades(shades: np.ndarray) -> str:
    """A matrix of 0 to 1 as a data URL: the accent colour, more or less opaque."""
    rows, columns = shades.shape
    pixels = np.empty((rows, columns, 4), dtype=np.uint8)
    pixels[..., :3] = (47, 111, 208)
    pixels[..., 3] = np.clip(np.nan_to_num(shades) * 255, 0, 255).round()
    return encode_png(pixels)


def encode_png(pixels: np.ndarray) -> str:
    """Red, green, blue and opacity, (rows, columns, 4) bytes, as a data URL."""
    rows, columns = pixels.shape[:2]
    raw = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()
