"""The plot of all claims of the papers: how far each came out as claimed, on the one scale that all share."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

from fedrpc.report.paper_words import VERDICTS, Results, describe_difference, describe_verdict
from fedrpc.report.picture import NEUTRAL, Panel, draw_picture
from fedrpc.report.svg import Axis, Canvas
from fedrpc.study.experiment import LEAST_SEEDS, NOT, PARTLY, REPRODUCED

WIDTH = 960
END = 4.0  # of the scale; a claim beyond it stands there
_ROW, _LEFT = 19, 560  # pixels: between two rows, and for their names
_MOST = 96  # letters of a name
_COLOURS = {REPRODUCED: "2", PARTLY: "1", NOT: "3"}
_SCALE = "95 % interval of the difference less its margin, drawn to one width"


def plot_claims(experiments: Mapping[str, Results]) -> str | None:
    """A panel for each paper with a row for each claim with enough seeds for a verdict; None without any.

    A row's bar is the interval: where it is right of 0 the claim is reproduced, where it is left of 0 chance alone does
    not explain that it is not.

    Args:
        experiments: Results by the name that stands before a claim.
    """
    papers: dict[str, list[tuple[str, Results]]] = {}
    for name, results in experiments.items():
        rows = [(f"{name}: {claim['says']}", claim) for claim in results["claims"] if _has_place(claim)]
        papers.setdefault(results["paper"], []).extend(rows)
    panels = [[Panel(paper, _plot_paper(rows))] for paper, rows in papers.items() if rows]
    if not panels:
        return None
    legend = [(f"c{_COLOURS[verdict]}", VERDICTS[verdict]) for verdict in _COLOURS]
    return draw_picture("Claims of the papers", panels, [*legend, (f"seed m{NEUTRAL}", f"bar: {_SCALE}")])


def _has_place(claim: Results) -> bool:
    return not claim["control"] and claim["difference"] is not None and claim["difference"]["n"] >= LEAST_SEEDS


def _plot_paper(rows: Sequence[tuple[str, Results]]) -> Canvas:
    places = {float(len(rows) - index): name for index, (name, _) in enumerate(rows)}
    y = Axis(
        0.4, len(rows) + 0.6, list(places), text=lambda tick: textwrap.shorten(places[tick], _MOST, placeholder=" ...")
    )
    canvas = Canvas(
        Axis(-END - 1, END + 1, [-END, -2, 0, 2, END]),
        y,
        "claims",
        width=WIDTH,
        height=46 + _ROW * len(rows),
        left=_LEFT,
        bottom=30,
    )
    canvas.line([(0.0, y.low), (0.0, y.high)], f"c{NEUTRAL}", dots=False)
    for place, (name, claim) in zip(places, rows, strict=True):
        at, colour = _find_place(claim), _COLOURS[claim["verdict"]]
        canvas.block(at - 1, at + 1, place - 0.12, place + 0.12, f"spread m{colour}")
        words = f"{name}: {describe_verdict(claim)} ({describe_difference(claim)})"
        canvas.dot((at, place), f"c{colour}", words, 4.5)
    return canvas


def _find_place(claim: Results) -> float:
    """The mean in half-widths of its interval, within the scale; at its end where all seeds agree to the last digit."""
    found = claim["difference"]
    half = found["mean"] - found["low"]
    if not half:
        return math.copysign(END, found["mean"]) if found["mean"] else 0.0
    return float(max(-END, min(END, found["mean"] / half)))
