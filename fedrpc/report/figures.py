"""Figures of a comparison for papers, as PDF and SVG: accuracy over rounds, over bytes and over seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedrpc.files import explain_unwritable
from fedrpc.report.comparison_words import label_method
from fedrpc.study.cells import BASELINE

# By name: the place of the quantity in a curve's points, its factor, and the axis; a budget of bytes spans decades.
FIGURES = {
    "accuracy-rounds": (0, 1.0, "round", "linear"),
    "accuracy-bytes": (1, 1e-6, "messages, both ways (MB)", "log"),
    "accuracy-seconds": (3, 1.0, "seconds", "linear"),
}
_STYLE: Any = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # letters stay letters, as publishers ask
    "svg.fonttype": "none",
    "svg.hashsalt": "fedrpc",  # the same comparison gives the same file
}
_SIZE_INCHES = (3.4, 2.4)  # one column


def draw_figures(document: Mapping[str, Any], folder: Path) -> list[str]:
    """Draws all figures into a folder, and returns their names; rows that were never evaluated are left out."""
    entries = [entry for entry in document["methods"] if entry["curve"]]
    with explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, (place, factor, label, scale) in FIGURES.items():
        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
            axes = figure.add_subplot()
            for number, entry in enumerate(entries):
                _draw_row(axes, entry, place, factor, _choose_colour(entry, number))
            axes.set(xlabel=label, ylabel="accuracy (%)", xscale=scale)
            axes.grid(alpha=0.3, linewidth=0.5)
            if entries:
                axes.legend(fontsize=6)
            for suffix, metadata in (("pdf", {"CreationDate": None}), ("svg", {"Date": None})):
                path = folder / f"{name}.{suffix}"
                with explain_unwritable(path):
                    figure.savefig(path, metadata=metadata)
    return list(FIGURES)


def _choose_colour(entry: Mapping[str, Any], number: int) -> str:
    return "0.45" if entry["method"] == BASELINE else f"C{number % 10}"


def _draw_row(axes: Axes, entry: Mapping[str, Any], place: int, factor: float, colour: str) -> None:
    """The mean over the seeds as a line, and a band of one standard deviation around it."""
    rounds = [point[0] for point in entry["curve"]]
    x = [factor * (point[place] + (1 if place == 0 else 0)) for point in entry["curve"]]
    columns = [_list_values(entry["runs"], index) for index in rounds]
    means = [fmean(values) for values in columns]
    style = "--" if entry["model"] else "-"
    axes.plot(x, means, style, color=colour, linewidth=1, label=label_method(entry))
    if len(entry["runs"]) > 1:
        spread = [stdev(values) for values in columns]
        low, high = ([mean + sign * sd for mean, sd in zip(means, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def _list_values(runs: Sequence[Mapping[str, Any]], index: float) -> list[float]:
    """The accuracies of all runs after a round."""
    return [point[2] for run in runs for point in run["curve"] if point[0] == index]
