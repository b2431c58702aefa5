"""Renders compare.html: a comparison as one page that needs no other file and no network.

`study/comparison.py` documents the values, of which this module plots those of one seed, or the means over several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from fedrpc.report.comparison_words import (
    RAW,
    describe_guarantee,
    describe_overhead,
    describe_sameness,
    describe_seeds,
    describe_sharing,
    format_accuracy,
    format_deviation,
    format_kernel_bytes,
    format_overhead,
    label_method,
    list_guarantees,
    sum_directions,
)
from fedrpc.report.markup import Plot, Table, Tile, render
from fedrpc.report.plots_bytes import FILLS, format_size_tick
from fedrpc.report.plots_learning import format_percent
from fedrpc.report.style import METHOD_HUES
from fedrpc.report.svg import NARROW, WIDE, Axis, Canvas, Point
from fedrpc.report.table import format_size
from fedrpc.report.words import format_duration, pluralize
from fedrpc.study.cells import BASELINE
from fedrpc.wire.kinds import DIRECTIONS, Kind

Curve = Sequence[Sequence[float]]  # (round, bytes, accuracy), and more
SINGLE = 20  # rounds; longer curves are smoothed: single rounds swing too much to compare


# The page


def assign_colours(methods: Sequence[str]) -> dict[str, str]:
    """One colour for each method, as the end of a class name: `m<end>` fills, `c<end>` draws a line.

    FedAvg is neutral; methods beyond the last hue take the same hues again, hollow and dashed.
    """
    others = [method for method in methods if method != BASELINE]
    ends = {
        method: f"{METHOD_HUES[place % len(METHOD_HUES)]}{'d' if place >= len(METHOD_HUES) else ''}"
        for place, method in enumerate(others)
    }
    return {method: ends.get(method, "7") for method in methods}


def render_page(document: Mapping[str, Any]) -> str:
    """The whole of compare.html."""
    setting = document["setting"]
    chips = [
        ("partition", setting["partition"]),
        ("model", setting["model"]),
        ("clients", setting["num_clients"]),
        ("clients a round", setting["clients_a_round"]),
        ("rounds", setting["num_rounds"]),
    ]
    chips = [(name, f"{value:,}" if isinstance(value, int) else value or "several") for name, value in chips]
    word, _, seeds = describe_seeds(document["seeds"]).partition(" ")
    colours = assign_colours([entry["name"] for entry in document["methods"]])
    failed = [(failure["name"], failure["reason"]) for failure in document["failed"]]
    return render(
        "comparison.html.j2",
        subject=pluralize(len({entry["method"] for entry in document["methods"]}), "method"),
        dataset=setting["dataset"] or "several data sets",
        chips=[*chips, (word, seeds)],
        tiles=list(_make_tiles(document)),
        raw=RAW,
        colours=colours,
        outcome=_collect_outcome(document),
        failed=Table(("method", "why"), failed, words=2),
        sharing=_list_sharing(document),
        guarantees=list_guarantees(document),
        learning=_plot_learning(document, colours),
        cost=_collect_cost(document),
        footer=f"fedrpc {document['version']}",
    )


def _make_tiles(document: Mapping[str, Any]) -> Iterable[Tile]:
    entries = document["methods"]
    ranked = sorted((entry for entry in entries if entry["accuracy"]), key=lambda entry: -entry["accuracy"]["last10"])
    if ranked:
        best, private = ranked[0], [entry for entry in ranked if not entry["raw_data"]]
        note = label_method(best)
        if best["raw_data"] and private:
            note += f"; without that {private[0]['name']}, {format_accuracy(private[0], 'last10')} %"
        yield Tile("highest mean of the last ten", f"{format_accuracy(best, 'last10')} %", note)
    least, *_, most = sorted([*entries, entries[-1]], key=lambda entry: int(entry["bytes"]["kernel"]))
    note = f"{label_method(most)}; least {format_size(least['bytes']['kernel'])}, {label_method(least)}"
    yield Tile("most on the wire", format_size(most["bytes"]["kernel"]), note)
    agree = document["same"]["cohorts"]["agree"]
    words = f"{describe_sameness(document).capitalize()}."
    yield Tile("compared", "like with like" if agree else "cohorts differ", words, "good" if agree else "bad")
    if document["failed"]:
        names = list(dict.fromkeys(failure["name"] for failure in document["failed"]))
        yield Tile("failed", pluralize(len(names), "method"), ", ".join(names), "bad")


def _collect_outcome(document: Mapping[str, Any]) -> dict[str, Any]:
    head = ("method", "last, %", "mean of last ten, %", "best, %, test-selected", "tensors", "messages", "kernel")
    rows = [
        (
            entry,
            (
                *(format_accuracy(entry, name) for name in ("last", "last10")),
                _format_best(entry),
                format_size(entry["bytes"]["tensor"]["measured"]),
                format_size(entry["bytes"]["message"]),
                format_kernel_bytes(entry),
                format_overhead(entry),
                format_duration(entry["seconds"]),
            ),
        )
        for entry in document["methods"]
    ]
    caption = (
        "Accuracy on the external test, the mean of all evaluations where there are fewer than ten; "
        f"{describe_overhead(document)}; kernel: all that TCP carried."
    )
    return {"head": (*head, "overhead", "time"), "rows": rows, "caption": caption}


def _format_best(entry: Mapping[str, Any]) -> str:
    best = format_accuracy(entry, "best")
    found = entry["accuracy"] and entry["accuracy"]["best_round"]
    return best if found is None else f"{best} (round {found})"


def _list_sharing(document: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str, str, str]]:
    """(entry, what leaves a client, privacy, parameters) of each method."""
    return [
        (
            entry,
            describe_sharing(entry),
            describe_guarantee(entry),
            ", ".join(f"{name} {value}" for name, value in entry["params"].items()) or "none",
        )
        for entry in document["methods"]
    ]


# Its plots


def _plot_learning(document: Mapping[str, Any], colours: Mapping[str, str]) -> list[Plot]:
    curves = {label_method(entry): entry["curve"] for entry in document["methods"] if entry["curve"]}
    styles = {label_method(entry): colours[entry["name"]] for entry in document["methods"]}
    if not curves:
        return []
    rounds, spent = ([point[place] for curve in curves.values() for point in curve] for place in (0, 1))
    by_round = Axis.of_rounds(min(rounds), max(rounds))
    by_bytes = Axis.over(spent, "the method's messages, both ways", format_size_tick, zero=True)
    return [
        _plot_curves(curves, styles, by_round, 0, "Accuracy over rounds"),
        _plot_curves(curves, styles, by_bytes, 1, "Accuracy against bytes"),
    ]


def _plot_curves(curves: Mapping[str, Curve], styles: Mapping[str, str], x: Axis, place: int, title: str) -> Plot:
    """Accuracy of each method against the number in `place` of a curve's points: its round or its bytes."""
    smoothing = max(map(len, curves.values())) > SINGLE
    values = [point[2] for curve in curves.values() for point in curve]
    canvas = Canvas(x, Axis.over(values, "", format_percent), title.lower(), height=330)
    if smoothing:
        for method, curve in curves.items():
            canvas.line([(point[place], point[2]) for point in curve], f"c{styles[method]} faint")
    for method, curve in curves.items():
        points = smooth(curve) if smoothing else curve
        tooltip = _make_tooltip(method, points, place)
        canvas.line([(point[place], point[2]) for point in points], f"c{styles[method]}", tooltip=tooltip)
    caption = "Means of the last ten evaluations; the faint lines are single rounds." if smoothing else ""
    return Plot(title, canvas.svg(), caption, [(f"m{styles[method]}", method) for method in curves])


def smooth(curve: Curve) -> list[tuple[float, float, float]]:
    """(round, bytes, mean accuracy of the last ten evaluations, or of all while there are fewer)."""
    values = [point[2] for point in curve]
    means = [mean(values[max(0, place - 9) : place + 1]) for place in range(len(values))]
    return [(point[0], point[1], value) for point, value in zip(curve, means, strict=True)]


def _make_tooltip(method: str, curve: Curve, x: int) -> Callable[[Point], str]:
    known = {(point[x], point[2]): point for point in curve}

    def describe(point: Point) -> str:
        index, spent, value = known[point][:3]
        return f"{method}, round {index:g}: {value:.2f} % after {format_size(spent)}"

    return describe


def _collect_cost(document: Mapping[str, Any]) -> dict[str, Any]:
    usual = {Kind.WEIGHTS.label, Kind.SCALARS.label}
    kinds = [kind for kind in FILLS if any(kind in entry["bytes"]["by_kind"] for entry in document["methods"])]
    more = [kind for kind in kinds if kind not in usual]
    plots = [_plot_kinds(document, kinds, "Tensor bytes by kind", wide=not more)]
    if more:
        plots.append(_plot_kinds(document, more, "Without weights and scalars", wide=False))
    rows = [
        (
            entry,
            place == 0,
            kind,
            [f"{sides[d][source]:,}" for d in DIRECTIONS for source in ("measured", "predicted")],
            format_deviation(sum_directions(sides, "measured"), sum_directions(sides, "predicted")),
        )
        for entry in document["methods"]
        for place, (kind, sides) in enumerate(entry["bytes"]["by_kind"].items())
    ]
    head = ("method", "kind", "↓ measured", "↓ predicted", "↑ measured", "↑ predicted", "measured to predicted")
    return {"plots": plots, "head": head, "rows": rows}


def _plot_kinds(document: Mapping[str, Any], kinds: Sequence[str], title: str, *, wide: bool) -> Plot:
    """For each method its tensor bytes stacked by kind, measured above a paler bar of what was predicted."""
    stacks = {
        label_method(entry): {
            source: {
                kind: sum_directions(sides, source)
                for kind, sides in entry["bytes"]["by_kind"].items()
                if kind in kinds
            }
            for source in ("measured", "predicted")
        }
        for entry in document["methods"]
    }
    longest = max(sum(sizes.values()) for stack in stacks.values() for sizes in stack.values())
    left = 24 + min(120, 7 * max(map(len, stacks)))
    canvas = Canvas(
        Axis.over([longest * 1.12], "", format_size_tick, zero=True),
        Axis(len(stacks), 0, ()),
        title.lower(),
        width=WIDE if wide else NARROW,
        height=46 + max(90, 34 * len(stacks)),
        left=left,
        bottom=26,
    )
    for place, (method, stack) in enumerate(stacks.items()):
        canvas.write(left - 7, canvas.y(place + 0.42) + 4, method, "end", "tick")
        _stack(canvas, stack["measured"], (place + 0.62, place + 0.14), f"{method}, measured", "")
        _stack(canvas, stack["predicted"], (place + 0.78, place + 0.64), f"{method}, predicted", " pale")
        total = sum(stack["measured"].values())
        canvas.write(
            canvas.x(total) + 6, canvas.y(place + 0.42) + 4, format_size(total) if total else "none", "start", "note"
        )
    caption = "The thin, paler bar is what the formula predicts."
    return Plot(title, canvas.svg(grid=False), caption, [(FILLS[kind], kind) for kind in kinds], wide=wide)


def _stack(canvas: Canvas, sizes: Mapping[str, int], ends: tuple[float, float], what: str, shade: str) -> None:
    start = 0
    for kind, size_bytes in sizes.items():
        words = f"{what}: {kind} {size_bytes:,} bytes"
        canvas.block(start, start + size_bytes, *ends, FILLS[kind] + shade, words)
        start += size_bytes
