"""Writes our own SVG plots as a PNG, so that a picture and a page come from one drawing."""

from __future__ import annotations

import base64
import colorsys
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from fedrpc.errors import ConfigError
from fedrpc.report.markup import Plot
from fedrpc.report.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 150
_PIXELS_AN_INCH = 96  # of the SVG
_FONT = 11 * 72 / _PIXELS_AN_INCH  # the pages' 11 pixels, in points
_HEAD, _LEFT, _LINE = 52, 14, 20  # in pixels: above the first plot, left of text, and of one line of text
_LEGEND_COLUMNS = 10
_ALIGN = {"start": "left", "middle": "center", "end": "right"}
_TEXT = {"tick": LIGHT["soft"], "axis": LIGHT["soft"], "cell": LIGHT["ink"], "cell full": "#ffffff"}


def write_png(plots: Sequence[Plot], path: Path, title: str, subtitle: str) -> None:
    """Writes plots one below the other.

    It knows the marks that plots of partitions use: rectangles, polygons, lines, text and embedded images.
    """
    try:  # slow to import, and only needed here
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a picture needs matplotlib, which is not installed: pip install matplotlib") from None
    drawings = [ElementTree.fromstring(plot.svg) for plot in plots]
    sizes = [tuple(float(number) for number in drawing.attrib["viewBox"].split()[2:]) for drawing in drawings]
    above = [_LINE * (2 + -(-len(plot.legend) // _LEGEND_COLUMNS)) for plot in plots]  # a gap, the title, the legend
    width = max(size[0] for size in sizes)
    height = _HEAD + sum(above) + sum(size[1] for size in sizes) + _LINE * len(plots)
    figure = Figure((width / _PIXELS_AN_INCH, height / _PIXELS_AN_INCH), dpi=DPI, facecolor=LIGHT["card"])
    FigureCanvasAgg(figure)

    def write(y: float, text: str, **style: Any) -> None:
        plain: dict[str, Any] = {"fontsize": _FONT, "color": LIGHT["soft"]}
        figure.text(_LEFT / width, 1 - y / height, text, **plain | style)

    write(24, title, fontsize=12, weight="bold", color=LIGHT["ink"])
    write(46, subtitle)
    top = float(_HEAD)
    for plot, drawing, (_, rows), head in zip(plots, drawings, sizes, above, strict=True):
        write(top + 1.5 * _LINE, plot.title, weight="bold", color=LIGHT["ink"])
        top += head
        axes = figure.add_axes((0, 1 - (top + rows) / height, 1, rows / height))
        axes.set(xlim=(0, width), ylim=(rows, 0))
        axes.set_axis_off()
        for mark in drawing:
            _draw(axes, mark)
        _draw_legend(axes, plot, _LEFT / width)
        top += rows + _LINE
        write(top - 4, plot.caption)
    figure.savefig(path, metadata={"Software": None})


def _draw(axes: Axes, mark: ElementTree.Element) -> None:
    from matplotlib.image import imread
    from matplotlib.patches import Polygon, Rectangle

    at = {name: float(value) for name, value in mark.attrib.items() if re.fullmatch(r"-?[\d.]+", value)}
    if mark.tag == "rect":
        axes.add_patch(Rectangle((at["x"], at["y"]), at["width"], at["height"], color=_find_colour(mark), lw=0))
    elif mark.tag == "polygon":
        corners = [tuple(map(float, corner.split(","))) for corner in mark.attrib["points"].split()]
        axes.add_patch(Polygon(corners, color=_find_colour(mark), lw=0))
    elif mark.tag == "line":
        axes.plot((at["x1"], at["x2"]), (at["y1"], at["y2"]), color=LIGHT["line"], lw=0.75, zorder=0)
    elif mark.tag == "image":
        pixels = imread(io.BytesIO(base64.b64decode(mark.attrib["href"].partition(",")[2])))
        extent = (at["x"], at["x"] + at["width"], at["y"] + at["height"], at["y"])
        axes.imshow(pixels, extent=extent, aspect="auto", interpolation="nearest")
    elif mark.tag == "text":
        colour = _TEXT.get(mark.attrib["class"], LIGHT["ink"])
        anchor = _ALIGN[mark.attrib["text-anchor"]]
        axes.text(at["x"], at["y"], mark.text or "", fontsize=_FONT, color=colour, ha=anchor, va="baseline")
    else:
        raise AssertionError(f"no way to draw a {mark.tag}")


def _draw_legend(axes: Axes, plot: Plot, left: float) -> None:
    from matplotlib.patches import Patch

    if plot.legend:
        handles = [Patch(color=_resolve(style), label=words) for style, words in plot.legend]
        axes.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(left, 1),
            borderpad=0,
            borderaxespad=0,
            ncols=_LEGEND_COLUMNS,
            frameon=False,
            labelcolor=LIGHT["soft"],
            fontsize=_FONT,
            handlelength=1,
        )


def _find_colour(mark: ElementTree.Element) -> str | tuple[float, float, float]:
    return _resolve(mark.attrib.get("class") or mark.attrib["fill"])


def _resolve(style: str) -> str | tuple[float, float, float]:
    """The colour of a fill: a series of the style sheet (f0, f1, ...) or hsl(hue saturation% lightness%)."""
    if style.startswith("hsl"):
        hue, saturation, lightness = (float(number) for number in re.findall(r"[\d.]+", style))
        return colorsys.hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    return LIGHT[f"s{style.removeprefix('f')}"]
