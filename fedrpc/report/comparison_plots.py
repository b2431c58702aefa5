"""The plots of compare.html: curves with bands over the seeds, accuracy against bytes, and bars of bytes and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fedrpc.report.comparison_words import label_method, sum_directions
from fedrpc.report.markup import Bar, Bars, Plot
from fedrpc.report.plots_time import FILLS as PART_FILLS
from fedrpc.report.plots_time import describe_parts, make_seconds_axis
from fedrpc.report.style import KIND_FILLS
from fedrpc.report.svg import Axis, Canvas, Point, draw_bars, format_percent, thin
from fedrpc.report.table import format_size, format_size_tick
from fedrpc.report.words import count_round, format_duration
from fedrpc.study.cells import BASELINE
from fedrpc.study.pareto import dominates
from fedrpc.wire.kinds import Kind

Document = Mapping[str, Any]
Entry = Mapping[str, Any]
Colours = Mapping[str, str]

HEIGHT = 330
SINGLE = 20  # evaluations; longer curves are smoothed: single rounds swing too much to compare
MAX_POINTS = 4000  # of all lines of a plot together, and
MAX_TIPS = 1000  # of those that tell their values: keeps the page small
METHOD_STYLES = ("", "d", "t")


class Step(NamedTuple):
    """An evaluation of a row: the means over its seeds, and the standard deviation of the accuracy.

    Attributes:
        predicted: Seconds over a link; None when none is known.
    """

    round: int
    num_bytes: float
    accuracy: float
    seconds: float
    spread: float
    predicted: float | None = None


def assign_colours(entries: Sequence[Entry], num_hues: int) -> dict[str, str]:
    """One colour for each row, as the end of a class name: `m<end>` fills, `c<end>` draws a line.

    FedAvg is neutral; rows beyond the last hue take the same hues again, hollow and dashed, then dotted.
    """
    neutral = [entry["name"] for entry in entries if entry["method"] == BASELINE][: len(METHOD_STYLES)]
    others = [entry["name"] for entry in entries if entry["name"] not in neutral]
    ends = {name: f"b{style}" for name, style in zip(neutral, METHOD_STYLES, strict=False)}
    for place, name in enumerate(others):
        ends[name] = f"{place % num_hues}{METHOD_STYLES[place // num_hues % len(METHOD_STYLES)]}"
    return ends


# Curves


def plot_learning(document: Document, colours: Colours) -> list[Plot]:
    """Accuracy over rounds, bytes and seconds (as measured, and on a link), and the last accuracy against bytes."""
    entries = [entry for entry in document["methods"] if entry["curve"]]
    if not entries:
        return []
    steps = {entry["name"]: list_steps(entry) for entry in entries}
    every = [step for found in steps.values() for step in found]
    rounds = [step.round for step in every]
    axes: list[tuple[str, Axis, Callable[[Step], float]]] = [
        ("Accuracy over rounds", Axis.of_rounds(min(rounds), max(rounds)), lambda step: step.round),
        (
            "Accuracy over bytes",
            Axis.of_powers((step.num_bytes for step in every), "the method's messages, both ways", format_size_tick),
            lambda step: step.num_bytes,
        ),
        (
            "Accuracy over seconds",
            make_seconds_axis(step.seconds for step in every),
            lambda step: step.seconds,
        ),
    ]
    plots = [_plot_curves(entries, steps, colours, title, axis, place) for title, axis, place in axes]
    return [*plots, *_plot_predicted(entries, steps, colours), *_plot_pareto(document, colours)]


def _plot_predicted(entries: Sequence[Entry], steps: Mapping[str, Sequence[Step]], colours: Colours) -> list[Plot]:
    """Accuracy over the seconds that rounds would take on a link; none when no row has them."""
    entries = [entry for entry in entries if all(step.predicted is not None for step in steps[entry["name"]])]
    if not entries:
        return []
    links = dict.fromkeys(entry["time"]["link"] for entry in entries)
    over = next(iter(links)) if len(links) == 1 else "the runs' own links"
    kept = {entry["name"]: steps[entry["name"]] for entry in entries}
    axis = make_seconds_axis((_get_predicted(step) for found in kept.values() for step in found), "predicted time")
    title = f"Accuracy over seconds, predicted over {over}"
    plot = _plot_curves(entries, kept, colours, title, axis, _get_predicted)
    caption = "From the bytes and the measured computing, for clients with machines of their own."
    return [replace(plot, caption=f"{caption} {plot.caption}".strip())]


def _get_predicted(step: Step) -> float:
    assert step.predicted is not None, "only rows with predictions are plotted"
    return step.predicted


def list_steps(entry: Entry) -> list[Step]:
    """The evaluations of a row, with rounds as people count them; long curves are means of the last ten."""
    found = []
    smoothed = {run["seed"]: _smooth(run["curve"]) for run in entry["runs"]}
    predicted = [_find_predicted(run) for run in entry["runs"]]
    for index, num_bytes, _, seconds in entry["curve"]:
        values = [values[index] for values in smoothed.values() if index in values]
        number = count_round(index, entry["runs"][0]["num_rounds"])
        spread, moments = (
            stdev(values) if len(values) > 1 else 0.0,
            [each[index] for each in predicted if index in each],
        )
        found.append(Step(number, num_bytes, fmean(values), seconds, spread, fmean(moments) if moments else None))
    return found


def _find_predicted(run: Mapping[str, Any]) -> dict[int, float]:
    """Predicted seconds by round."""
    if not run["predicted"]:
        return {}
    return dict(zip((int(point[0]) for point in run["curve"]), run["predicted"]["until"], strict=True))


def _smooth(curve: Sequence[Sequence[float]]) -> dict[int, float]:
    """Accuracy by round: as evaluated, or means of the last ten of a long curve."""
    values = [point[2] for point in curve]
    if len(curve) > SINGLE:
        values = [fmean(values[max(0, place - 9) : place + 1]) for place in range(len(values))]
    return dict(zip((int(point[0]) for point in curve), values, strict=True))


def _plot_curves(
    entries: Sequence[Entry],
    steps: Mapping[str, Sequence[Step]],
    colours: Colours,
    title: str,
    x: Axis,
    place: Callable[[Step], float],
) -> Plot:
    kept = {name: thin(found, max(20, MAX_POINTS // len(steps))) for name, found in steps.items()}
    ends = [step.accuracy + sign * step.spread for found in kept.values() for step in found for sign in (-1, 1)]
    canvas = Canvas(x, Axis.over(ends, "", format_percent), title.lower(), height=HEIGHT)
    seeds = max(len(entry["runs"]) for entry in entries)
    for entry in entries:
        found = [step for step in kept[entry["name"]] if not x.log or place(step) > 0]
        if len(entry["runs"]) > 1 and len(found) > 1:
            edges = [[(place(step), step.accuracy + sign * step.spread) for step in found] for sign in (-1, 1)]
            canvas.band(edges[0], edges[1], f"band m{colours[entry['name']]}")
    for entry in entries:
        found = kept[entry["name"]]
        style = f"c{colours[entry['name']]}"
        told = set(thin(found, max(10, MAX_TIPS // len(steps))))
        words = {(place(step), step.accuracy): _describe_step(entry, step) for step in found if step in told}
        canvas.line([(place(step), step.accuracy) for step in found], style, tooltip=_look_up(words))
    notes = []
    if seeds > 1:
        notes.append("Lines are means over the seeds, bands one standard deviation around them.")
    if any(len(entry["curve"]) > SINGLE for entry in entries):
        notes.append("Means of the last ten evaluations: single rounds swing too much to compare.")
    legend = [(f"m{colours[entry['name']]}", label_method(entry)) for entry in entries]
    return Plot(title, canvas.svg(), " ".join(notes), legend)


def _look_up(words: Mapping[Point, str]) -> Callable[[Point], str]:
    return lambda point: words.get(point, "")


def _describe_step(entry: Entry, step: Step) -> str:
    spread = f" ± {step.spread:.2f}" if len(entry["runs"]) > 1 else ""
    after = f"{format_size(step.num_bytes)} and {format_duration(step.seconds)}"
    after += "" if step.predicted is None else f", predicted {format_duration(step.predicted)}"
    return f"{label_method(entry)}, round {step.round}: {step.accuracy:.2f}{spread} % after {after}"


# Which is worth its bytes


def _plot_pareto(document: Document, colours: Colours) -> list[Plot]:
    """The last accuracy against all bytes, one mark a row; none for a single row."""
    entries = [entry for entry in document["methods"] if entry["accuracy"]]
    if len(entries) < 2:
        return []
    points = {entry["name"]: (float(entry["bytes"]["message"]), entry["accuracy"]["last"]) for entry in entries}
    x = Axis.of_powers((point[0] for point in points.values()), "the method's messages, both ways", format_size_tick)
    y = Axis.over((point[1] for point in points.values()), "", format_percent)
    canvas = Canvas(x, y, "final accuracy against bytes", height=HEIGHT)
    losses = {name: (spent, -accuracy) for name, (spent, accuracy) in points.items()}
    front = [name for name, own in losses.items() if not any(dominates(other, own) for other in losses.values())]
    canvas.line(_make_stairs(sorted(points[name] for name in front)), "ink thin", dots=False)
    for entry in entries:
        point = points[entry["name"]]
        if entry["pareto"]:
            canvas.ring(point)
        words = f"{label_method(entry)}: {point[1]:.2f} % for {format_size(point[0])}"
        words += ", undominated" if entry["pareto"] else ""
        canvas.dot(point, f"c{colours[entry['name']]}", words)
    *objectives, last = document["pareto"]["objectives"]
    caption = (
        f"A ring: no other row is as good in {', '.join(objectives)} and {last}, and better in one of them. "
        "The line joins those that nothing dominates in accuracy and bytes alone."
    )
    legend = [(f"m{colours[entry['name']]}", label_method(entry)) for entry in entries]
    return [Plot("Final accuracy against bytes", canvas.svg(), caption, legend)]


def _make_stairs(points: Sequence[Point]) -> list[Point]:
    """A line from the cheapest point to the most accurate: an accuracy is had from its bytes on."""
    stairs = list(points[:1])
    for one, other in pairwise(points):
        stairs += [(other[0], one[1]), other]
    return stairs


# Bars


def make_kind_bars(document: Document) -> list[Bars]:
    """For each row its tensor bytes stacked by kind, measured above a paler bar of what was predicted."""
    usual = {Kind.WEIGHTS.label, Kind.SCALARS.label}
    kinds = [kind for kind in KIND_FILLS if any(kind in entry["bytes"]["by_kind"] for entry in document["methods"])]
    more = [kind for kind in kinds if kind not in usual]
    found = [_stack_kinds(document, kinds, "Tensor bytes by kind", wide=not more)]
    return [*found, *([_stack_kinds(document, more, "Without weights and scalars", wide=False)] if more else [])]


def _stack_kinds(document: Document, kinds: Sequence[str], title: str, *, wide: bool) -> Bars:
    def list_pieces(entry: Entry, source: str) -> list[tuple[str, float, str]]:
        sides = {kind: side for kind, side in entry["bytes"]["by_kind"].items() if kind in kinds}
        pale, what = " pale" if source == "predicted" else "", f"{label_method(entry)}, {source}"
        sizes = {kind: sum_directions(side, source) for kind, side in sides.items()}
        return [(KIND_FILLS[kind] + pale, size, f"{what}: {kind} {size:,} bytes") for kind, size in sizes.items()]

    lines = [[list_pieces(entry, source) for source in ("measured", "predicted")] for entry in document["methods"]]
    longest = max(sum(piece[1] for piece in pieces) for each in lines for pieces in each)
    rows = []
    for entry, each in zip(document["methods"], lines, strict=True):
        total = sum(piece[1] for piece in each[0])
        rows.append(Bar(entry, draw_bars(each, longest), format_size(total) if total else "none"))
    caption = "The thin, paler bar is what the method's formula predicts."
    return Bars(title, rows, caption, [(KIND_FILLS[kind], kind) for kind in kinds], wide=wide)


def make_time_bars(document: Document) -> Bars | None:
    """Where the time of each row went; None where it was not measured."""
    entries = [entry for entry in document["methods"] if entry["parts"]]
    if not entries:
        return None
    longest = max(sum(entry["parts"].values()) for entry in entries)
    rows = [
        Bar(
            entry,
            draw_bars([describe_parts(entry["parts"], f"{label_method(entry)}, ")], longest),
            format_duration(sum(entry["parts"].values())),
        )
        for entry in entries
    ]
    used = [part for part in PART_FILLS if any(entry["parts"].get(part) for entry in entries)]
    caption = (
        "Seconds on the server's path: what it waited for (a client's queue, download, compute and upload, of the one "
        "that answered last) and what it did itself."
    )
    return Bars("Where the time went", rows, caption, [(PART_FILLS[part], part) for part in used], wide=True)
