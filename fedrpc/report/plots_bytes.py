"""What a run sent, as plots: by kind and direction, over rounds, for an accuracy, and by client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from fedrpc.report.markup import Plot
from fedrpc.report.plots_learning import MAX_BARS
from fedrpc.report.style import KIND_FILLS
from fedrpc.report.svg import NARROW, WIDE, Axis, Canvas, Point, format_percent
from fedrpc.report.table import format_size, format_size_tick
from fedrpc.report.words import count_round
from fedrpc.study.reading import Flow, Run
from fedrpc.study.targets import list_points
from fedrpc.wire.kinds import DIRECTIONS

ARROWS = {"down": "↓ down", "up": "↑ up"}
REST, KERNEL = "session, evaluation, retries", "the kernel's count"
OUTSIDE = {REST: "f7", KERNEL: "kernel"}


def plot_by_kind(run: Run) -> Plot | None:
    """The layers of each direction: tensor bytes by kind, measured above predicted, messages, the kernel's count."""
    part = run.summary["bytes"]
    groups = {direction: _list_bars(part, direction) for direction in DIRECTIONS}
    longest = max(sum(values.values()) for bars in groups.values() for _, values in bars)
    if not longest:
        return None
    used = {name for bars in groups.values() for _, values in bars for name, value in values.items() if value}
    styles = {name: style for name, style in {**KIND_FILLS, **OUTSIDE}.items() if name in used}
    height = 5.4  # of a group, in bars: a heading, four bars and a gap
    axis = Axis.over([longest], "", format_size_tick, zero=True)
    canvas = Canvas(axis, Axis(2 * height, 0, ()), "bytes by kind and layer", height=330, left=84, bottom=26)
    for place, (direction, bars) in enumerate(groups.items()):
        top = place * height
        canvas.write(76, canvas.y(top + 0.5) + 5, ARROWS[direction], "end", "strong")
        for row, (name, values) in enumerate(bars):
            _draw_bar(canvas, top + 1 + row, f"{direction}, {name}", values, styles)
    caption = "Predicted is the method's own formula, to compare with tensors; the numbers are in the table."
    return Plot("Bytes by kind and layer", canvas.svg(grid=False), caption, [(s, name) for name, s in styles.items()])


def _list_bars(part: Mapping[str, Any], direction: str) -> list[tuple[str, dict[str, int]]]:
    method, total = part["method"][direction], part["total"][direction]
    messages = {kind: sums["message"] for kind, sums in method["by_kind"].items()}
    return [
        ("tensors", {kind: sums["tensor"] for kind, sums in method["by_kind"].items()}),
        ("predicted", dict(part["predicted"]["by_kind"][direction])),
        ("messages", messages | {REST: total["message"] - method["message"]}),
        ("kernel", {} if total["kernel"] is None else {KERNEL: total["kernel"]}),
    ]


def _draw_bar(canvas: Canvas, top: float, name: str, values: Mapping[str, int], styles: Mapping[str, str]) -> None:
    canvas.write(76, canvas.y(top + 0.5) + 4, name.split(", ")[1], "end", "tick")
    pale = " pale" if name.endswith("predicted") else ""
    start = 0
    for kind, style in styles.items():
        if size_bytes := values.get(kind, 0):
            words = f"{name}: {kind} {size_bytes:,} bytes"
            canvas.block(start, start + size_bytes, top + 0.88, top + 0.12, style + pale, words)
            start += size_bytes


def plot_cumulative(run: Run, *, wide: bool = False) -> Plot | None:
    """Message bytes so far, over rounds, as stacked areas."""
    flows = {index + 1: flow for index, flow in run.traffic.by_round.items()}  # rounds as people count them
    if not flows:
        return None
    top = sum(flow.total for flow in flows.values())
    x, y = Axis.of_rounds(min(flows), max(flows)), Axis.over([top], "", format_size_tick, zero=True)
    canvas = Canvas(x, y, "cumulative bytes", width=WIDE if wide else NARROW, left=62)
    below = [0] * len(flows)
    layers = _list_layers(list(flows.values()))
    for style, _, sizes in layers:
        above = [low + so_far for low, so_far in zip(below, accumulate(sizes), strict=True)]
        canvas.band(list(zip(flows, below, strict=True)), list(zip(flows, above, strict=True)), style)
        below = above
    caption = "At 0, with the initial model, clients join and methods set up"
    if max(flows) > (last := run.summary["num_rounds"]):
        caption += f"; at {last + 1} methods finalise and ledgers are compared"
    legend = [layer[:2] for layer in layers]
    return Plot("Bytes over rounds", canvas.svg(), f"{caption}.", legend, wide=wide)


def _list_layers(flows: Sequence[Flow]) -> list[tuple[str, str, list[int]]]:
    """(style, name, bytes of each) of what is stacked."""
    own = [(f"f{place}", f"{ARROWS[d]}, method", [flow.own[d] for flow in flows]) for place, d in enumerate(DIRECTIONS)]
    return [*own, (OUTSIDE[REST], REST, [sum(flow.rest.values()) for flow in flows])]


def list_spending(run: Run) -> list[tuple[int, int, float]]:
    """(round as people count it, the method's own message bytes up to its end, accuracy) of each evaluated round."""
    last = run.summary["num_rounds"]
    return [(count_round(point.round, last), point.num_bytes, point.accuracy) for point in list_points(run)]


def plot_accuracy_by_bytes(run: Run) -> Plot | None:
    """Accuracy against the method's own bytes."""
    points = list_spending(run)
    if not points or not points[-1][1]:
        return None
    sizes, values = [spent for _, spent, _ in points], [value for _, _, value in points]
    x = Axis.of_powers(sizes, "the method's messages, both ways", format_size_tick)
    canvas = Canvas(x, Axis.over(values, "", format_percent), "accuracy over bytes")
    rounds = {(float(spent), value): index for index, spent, value in points}

    def describe(point: Point) -> str:
        return f"round {rounds[point]}: {point[1]:.2f} % after {format_size(point[0])}"

    canvas.line([(float(spent), value) for _, spent, value in points], "l0", tooltip=describe)
    return Plot("Accuracy over bytes", canvas.svg(), describe_targets(points))


def describe_targets(points: Sequence[tuple[int, int, float]]) -> str:
    """The bytes that the last three tens of percent had cost when the run first reached them."""
    targets: list[str] = []
    best = 0
    for index, spent, value in points:
        if math.isfinite(value) and (ten := int(value // 10) * 10) > best:
            best = ten
            targets.append(f"{ten} % after {format_size(spent)} (round {index})")
    return f"Reached {', '.join(targets[-3:])}." if targets else ""


def plot_by_client(run: Run) -> Plot | None:
    """Message bytes of each client, everything counted."""
    flows = run.traffic.by_client
    top = max((flow.total for flow in flows.values()), default=0)
    if not top:
        return None
    count = len(flows)
    step = 1 if count <= 50 else -(-count // 20)
    ticks = [place + 0.5 for place in range(0, count, step)]
    x = Axis(0, count, ticks, "client", lambda tick: str(list(flows)[int(tick)]))
    canvas = Canvas(
        x, Axis.over([top], "", format_size_tick, zero=True), "bytes of each client", width=WIDE, height=260, left=62
    )
    layers = _list_layers(list(flows.values()))
    _stack(canvas, layers, list(flows))
    return Plot(
        "Bytes of each client",
        canvas.svg(),
        _describe_spread(flows.values()),
        [layer[:2] for layer in layers],
        wide=True,
    )


def _stack(canvas: Canvas, layers: Sequence[tuple[str, str, Sequence[int]]], names: Sequence[int]) -> None:
    below = [0] * len(names)
    for style, what, sizes in layers:
        above = [low + high for low, high in zip(below, sizes, strict=True)]
        if len(names) > MAX_BARS:
            canvas.stairs(below, above, style)
        else:
            for place, name in enumerate(names):
                words = f"client {name}, {what}: {sizes[place]:,} bytes"
                canvas.block(place + 0.1, place + 0.9, below[place], above[place], style, words)
        below = above


def _describe_spread(flows: Iterable[Flow]) -> str:
    totals = sorted(flow.total for flow in flows)
    if format_size(totals[0]) == format_size(totals[-1]):
        return f"{format_size(totals[0])} each, everything counted."
    middle = format_size(totals[len(totals) // 2])
    return f"From {format_size(totals[0])} to {format_size(totals[-1])} a client, median {middle}, everything counted."
