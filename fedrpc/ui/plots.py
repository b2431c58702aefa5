"""The plots of the live page, drawn as those of reports are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from fedrpc.report.markup import Bar, Bars, Plot
from fedrpc.report.style import KIND_FILLS, NUM_METHOD_HUES
from fedrpc.report.svg import (
    Axis,
    Canvas,
    Point,
    choose_whole_ticks,
    draw_bars,
    format_coordinate,
    format_percent,
    thin,
)
from fedrpc.report.table import format_size, format_size_tick
from fedrpc.report.words import name_test
from fedrpc.ui.run import LiveRun

MAX_POINTS = 300  # of a curve
MAX_COLUMNS = 120  # rounds that are drawn one by one; of more, neighbours are added up
ARROWS = {"down": "↓ down", "up": "↑ up"}


def plot_curve(run: LiveRun, name: str) -> Plot | None:
    """Accuracy or loss over rounds, with room for those to come."""
    points: list[Point] = list(thin(run.curve(name), MAX_POINTS))
    if not points:
        return None
    unit, series = (" %", 0) if name == "accuracy" else ("", 1)
    values = [value for _, value in points]
    y = Axis.over(values, "", format_percent) if name == "accuracy" else Axis.of_losses(values, "")
    canvas = Canvas(Axis.of_rounds(1, max(1, run.num_rounds, run.num_done)), y, f"{name} over rounds")
    canvas.line(points, f"l{series}", tooltip=lambda point: f"round {point[0]:g}: {name} {point[1]:.4g}{unit}")
    return Plot(f"{name.capitalize()} on the {name_test(run.config)}", canvas.svg())


def draw_sparkline(run: LiveRun) -> str:
    """The accuracy so far in a small line without axes, whose right edge is the last round."""
    points = thin(run.curve("accuracy"), 60)
    if len(points) < 2:
        return ""
    values = [value for _, value in points]
    low, high, last = min(values), max(values), max(run.num_rounds, run.num_done, 2)
    path = " ".join(
        f"{format_coordinate(2 + 92 * (index - 1) / (last - 1))},"
        f"{format_coordinate(20 - 16 * (value - low) / ((high - low) or 1))}"
        for index, value in points
    )
    words = f"accuracy {values[0]:.1f} to {values[-1]:.1f} %"
    line = f'<polyline class="l0" points="{path}"/>'
    return f'<svg class="spark" viewBox="0 0 96 24" role="img" aria-label="{words}">{line}</svg>'


def make_kind_bars(found: Mapping[str, Mapping[str, int]]) -> Bars | None:
    """Bytes so far in each direction, by kind."""
    longest = max((sum(kinds.values()) for kinds in found.values()), default=0)
    if not longest:
        return None
    used = [kind for kind in KIND_FILLS if any(kinds.get(kind) for kinds in found.values())]
    rows = []
    for direction, kinds in found.items():
        pieces = [(KIND_FILLS[kind], kinds.get(kind, 0), f"{kind}: {format_size(kinds.get(kind, 0))}") for kind in used]
        rows.append(Bar(ARROWS[direction], draw_bars([pieces], longest), format_size(sum(kinds.values()))))
    legend = [(KIND_FILLS[kind], f"{kind} {format_size(sum(k.get(kind, 0) for k in found.values()))}") for kind in used]
    return Bars("By kind, so far", rows, "", legend)


def plot_rounds(run: LiveRun) -> Plot | None:
    """Message bytes of each round by kind, both ways together."""
    last = max(run.num_rounds, run.num_done)
    by_round = {index: _join_directions(kinds) for index, kinds in run.bytes_by_round.items() if 0 <= index < last}
    if not by_round:
        return None
    width = -(-last // MAX_COLUMNS)
    count = -(-last // width)
    used = [kind for kind in KIND_FILLS if any(kinds.get(kind) for kinds in by_round.values())]
    low, layers = [0.0] * count, []
    for kind in used:
        high = list(low)
        for index, kinds in by_round.items():
            high[index // width] += kinds.get(kind, 0)
        layers.append((kind, low, high))
        low = high
    ticks = [tick - 0.5 for tick in choose_whole_ticks(1, count)]
    x = Axis(0, count, ticks, "round", lambda tick: f"{(tick + 0.5) * width:g}")
    canvas = Canvas(x, Axis.over([max(low)], "", format_size_tick, zero=True), "bytes of each round by kind", left=62)
    for kind, bottom, top in layers:
        canvas.stairs(bottom, top, KIND_FILLS[kind])
    caption = f"Rounds in groups of {width}. " if width > 1 else ""
    beside = sum(sum(kinds.values()) for index, kinds in run.bytes_by_round.items() if index not in by_round)
    caption += f"Before the first round and after the last: {format_size(beside)}." if beside else ""
    return Plot("By round, messages both ways", canvas.svg(), caption)


def _join_directions(kinds: Mapping[tuple[str, str], int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (_, kind), size in kinds.items():
        found[kind] = found.get(kind, 0) + size
    return found


def name_style(place: int) -> str:
    """The colour of one of several runs: full ones first, then the same dashed, then dotted."""
    return f"{place % NUM_METHOD_HUES}{('', 'd', 't')[place // NUM_METHOD_HUES % 3]}"


def plot_side_by_side(runs: Sequence[tuple[str, LiveRun]], *, by_bytes: bool) -> Plot | None:
    """The accuracies of several runs, over rounds or over the bytes that they took."""
    curves = []
    for place, (label, run) in enumerate(runs):
        points: list[Point] = list(thin(run.curve("accuracy"), MAX_POINTS))
        if by_bytes:
            sums = run.bytes_until()
            points = [(sums[int(index)], value) for index, value in points if int(index) in sums]
        if points:
            curves.append((place, label, points))
    if not curves:
        return None
    every = [point for _, _, points in curves for point in points]
    if by_bytes:
        x = Axis.of_powers([size for size, _ in every], "messages of all kinds, both ways", format_size_tick)
    else:
        x = Axis.of_rounds(1, max(1, int(max(index for index, _ in every))))
    y = Axis.over([value for _, value in every], "", format_percent)
    title = f"Accuracy over {'bytes' if by_bytes else 'rounds'}"
    canvas = Canvas(x, y, title.lower())
    for place, label, points in curves:
        canvas.line(points, f"c{name_style(place)}", tooltip=partial(_describe_point, label, by_bytes))
    return Plot(title, canvas.svg(), "", [(f"m{name_style(place)}", label) for place, label, _ in curves])


def _describe_point(label: str, by_bytes: bool, point: Point) -> str:
    where = format_size(point[0]) if by_bytes else f"round {point[0]:g}"
    return f"{label}, {where}: {point[1]:.2f} %"
