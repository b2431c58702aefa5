"""Writes compare.html: the figures of a comparison as one page that needs no other file and no network.

What the figures are is told in comparison.py; this module draws them, and has the words for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from statistics import mean
from typing import Any

from fedrpc.report.markup import Figure, Tile, card, section, table
from fedrpc.report.plots_bytes import FILLS, size_tick
from fedrpc.report.plots_learning import percent
from fedrpc.report.style import CSS
from fedrpc.report.svg import NARROW, WIDE, Axis, Plot, Point
from fedrpc.report.table import size
from fedrpc.report.words import counted, duration
from fedrpc.wire.kinds import DIRECTIONS, Kind

BASELINE = "fedavg"
RAW = "RAW DATA"
SINGLE = 20  # rounds; longer curves swing too much to tell many of them apart
_RAW_BADGE = f'<span class="raw">{RAW}</span>'


# Words that the table has too


def title_of(figures: Mapping[str, Any]) -> str:
    """What was compared, in a few words."""
    return f"{counted(len(figures['methods']), 'method')} on {figures['setting']['dataset']}"


def accuracy_of(entry: Mapping[str, Any], name: str) -> str:
    """One of a method's accuracies, without its unit."""
    return f"{entry['accuracy'][name]:.2f}" if entry["accuracy"] else "-"


def overhead_of(entry: Mapping[str, Any]) -> str:
    """A method's overhead."""
    return "-" if entry["overhead"] is None else f"{entry['overhead']:.3f}"


def kernel_of(entry: Mapping[str, Any]) -> str:
    """What TCP carried; only a lower bound when the run was resumed."""
    return ("≥" if entry["bytes"]["kernel_note"] else "") + size(entry["bytes"]["kernel"])


def off_by(measured: int, predicted: int) -> str:
    """How far a measurement is from its formula, in a word."""
    if measured == predicted:
        return "exact"
    return f"{100 * (measured - predicted) / predicted:+.3g} %" if predicted else "not predicted"


def leaves_of(entry: Mapping[str, Any]) -> str:
    """What leaves a client beside weights and scalars; raw data stands out."""
    shares = str(entry["shares"])
    if entry["raw_data"]:
        shares = f"{RAW}: {shares}" if shares else RAW
    return shares or "nothing more"


def label_of(entry: Mapping[str, Any]) -> str:
    """A method's name, which never stands without the mark of raw data."""
    return f"{entry['method']} ({RAW})" if entry["raw_data"] else str(entry["method"])


def overhead_is(figures: Mapping[str, Any]) -> str:
    """What overheads are measured against."""
    return f"overhead: tensor bytes over FedAvg's {'run' if figures['baseline']['by'] == 'run' else 'formula'}"


def alike(figures: Mapping[str, Any]) -> str:
    """What is the same for all, and whether the ledgers bear it out."""
    same = figures["same"]
    apart = {method: len(rounds) for method, rounds in same["cohorts"]["rounds_apart"].items()}
    told = ", ".join(f"{method} in {counted(count, 'round')}" for method, count in apart.items())
    cohorts = f"but OTHER CLIENTS WERE ASKED by {told}" if told else "same cohorts in every round"
    return f"same split ({same['partition_sha256'][:16]}), same initial model, {cohorts}"


def both_ways(sides: Mapping[str, Mapping[str, int]], source: str) -> int:
    """Measured or predicted bytes of both directions."""
    return sum(side[source] for side in sides.values())


# The page


# Eleven hues; FedAvg is grey, and methods beyond the eleventh take the same hues again, hollow and dashed.
_HUES = (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11)
_METHOD_CSS = (
    ".m7{fill:var(--s7)}.c7{stroke:var(--s7)}circle.c7{fill:var(--s7);stroke:var(--card)}"
    + "".join(
        f".m{hue}{{fill:var(--s{hue})}}.c{hue}{{stroke:var(--s{hue})}}"
        f"circle.c{hue}{{fill:var(--s{hue});stroke:var(--card)}}"
        f".m{hue}d{{fill:var(--card);stroke:var(--s{hue});stroke-width:3px}}"
        f".c{hue}d{{stroke:var(--s{hue});stroke-dasharray:7 4}}"
        f"circle.c{hue}d{{fill:var(--card);stroke:var(--s{hue});stroke-dasharray:none}}"
        for hue in _HUES
    )
    + ".method{white-space:nowrap;font-weight:600}.method svg.key{display:inline-block;margin-right:8px}"
    ".method a{color:inherit;text-decoration-color:var(--line)}.off{color:var(--bad)}"
    ".raw{background:#b42318;color:#fff;border-radius:4px;padding:1px 6px;font-weight:650;font-size:12px;"
    "white-space:nowrap}"
)


def colours(methods: Sequence[str]) -> dict[str, str]:
    """One colour for each method, as the end of a class name: `m<end>` fills, `c<end>` draws a line."""
    others = [method for method in methods if method != BASELINE]
    found = {
        method: f"{_HUES[place % len(_HUES)]}{'d' if place >= len(_HUES) else ''}"
        for place, method in enumerate(others)
    }
    return {method: found.get(method, "7") for method in methods}


def page(figures: Mapping[str, Any]) -> str:
    """The whole of compare.html."""
    setting = figures["setting"]
    chips = [
        ("partition", setting["partition"]),
        ("model", setting["model"]),
        ("clients", f"{setting['num_clients']:,}"),
        ("clients a round", f"{setting['clients_a_round']:,}"),
        ("rounds", f"{setting['num_rounds']:,}"),
        ("seed", setting["seed"]),
    ]
    worn = "".join(f"<span>{escape(name)} <b>{escape(str(value))}</b></span>" for name, value in chips)
    told = "".join(tile.html() for tile in _tiles(figures))
    title = title_of(figures)
    ends = colours([entry["method"] for entry in figures["methods"]])
    body = "".join([_side_by_side(figures, ends), _learned(figures, ends), _cost(figures, ends)])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}{_METHOD_CSS}</style></head><body>"
        f"<header><h1>{escape(title.split(' on ')[0])} <small>on {escape(setting['dataset'])}</small></h1>"
        f'<div class="chips">{worn}</div><div class="tiles">{told}</div></header>'
        f"<main>{body}</main><footer>fedrpc {escape(figures['version'])}</footer></body></html>\n"
    )


def _tiles(figures: Mapping[str, Any]) -> Iterable[Tile]:
    entries = figures["methods"]
    ranked = sorted((entry for entry in entries if entry["accuracy"]), key=lambda entry: -entry["accuracy"]["last10"])
    if ranked:
        best, private = ranked[0], [entry for entry in ranked if not entry["raw_data"]]
        note = label_of(best)
        if best["raw_data"] and private:
            note += f"; without that {private[0]['method']}, {accuracy_of(private[0], 'last10')} %"
        yield Tile("highest mean of the last ten", f"{accuracy_of(best, 'last10')} %", note)
    least, *_, most = sorted([*entries, entries[-1]], key=lambda entry: int(entry["bytes"]["kernel"]))
    note = f"{label_of(most)}; least {size(least['bytes']['kernel'])}, {label_of(least)}"
    yield Tile("most on the wire", size(most["bytes"]["kernel"]), note)
    agree = figures["same"]["cohorts"]["agree"]
    words = f"{alike(figures).capitalize()}."
    yield Tile("compared", "like with like" if agree else "cohorts differ", words, "good" if agree else "bad")
    if figures["failed"]:
        names = ", ".join(failure["method"] for failure in figures["failed"])
        yield Tile("failed", counted(len(figures["failed"]), "method"), names, "bad")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int) -> str:
    """An HTML table of cells that are HTML already."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{'' if place < words else ' class=num'}>{cell}</{tag}>" for place, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{body}</tbody></table></div>'


def _named(entry: Mapping[str, Any], ends: Mapping[str, str]) -> str:
    """A method's name in its colour, with a way to its own page."""
    name, where = escape(entry["method"]), escape(f"{entry['run']}/report.html")
    raw = f" {_RAW_BADGE}" if entry["raw_data"] else ""
    square = _swatch(f"m{ends[entry['method']]}")
    return f'<span class="method">{square}<a href="{where}">{name}</a>{raw}</span>'


def _swatch(style: str) -> str:
    return (
        f'<svg class="key" viewBox="0 0 10 10" aria-hidden="true"><rect class="{style}" width="10" height="10"/></svg>'
    )


def _side_by_side(figures: Mapping[str, Any], ends: Mapping[str, str]) -> str:
    head = ("method", "last, %", "mean of last ten, %", "best, %, test-selected", "tensors", "messages", "kernel")
    rows = [
        (
            _named(entry, ends),
            *(accuracy_of(entry, name) for name in ("last", "last10")),
            f"{accuracy_of(entry, 'best')} (round {entry['accuracy']['best_round']})" if entry["accuracy"] else "-",
            size(entry["bytes"]["tensor"]["measured"]),
            size(entry["bytes"]["message"]),
            kernel_of(entry),
            overhead_of(entry),
            duration(entry["seconds"]),
        )
        for entry in figures["methods"]
    ]
    about = (
        "Accuracy on the external test, the mean of all evaluations where there are fewer than ten; "
        f"{overhead_is(figures)}; kernel: all that TCP carried."
    )
    pieces = [card("", _table((*head, "overhead", "time"), rows, words=1), about)]
    if figures["failed"]:
        failed = [(failure["method"], failure["reason"]) for failure in figures["failed"]]
        pieces.append(card("Failed", table(("method", "why"), failed, words=2)))
    return section("Side by side", "", [*pieces, card("What leaves a client", _sharing_table(figures, ends))])


def _sharing_table(figures: Mapping[str, Any], ends: Mapping[str, str]) -> str:
    rows = [
        (
            _named(entry, ends),
            escape(leaves_of(entry)).replace(RAW, _RAW_BADGE),
            escape(entry["privacy"]["text"]),
            escape(", ".join(f"{name} {value}" for name, value in entry["params"].items()) or "none"),
        )
        for entry in figures["methods"]
    ]
    return _table(("method", "beside weights and scalars", "privacy", "its own parameters"), rows, words=4)


# Its plots


def _learned(figures: Mapping[str, Any], ends: Mapping[str, str]) -> str:
    curves = {label_of(entry): entry["curve"] for entry in figures["methods"] if entry["curve"]}
    styles = {label_of(entry): ends[entry["method"]] for entry in figures["methods"]}
    if not curves:
        return ""
    values = [value for curve in curves.values() for _, _, value in curve]
    rounds, spent = ([point[place] for curve in curves.values() for point in curve] for place in (0, 1))
    axes = (
        Axis.of_rounds(min(rounds), max(rounds)),
        Axis.over(spent, "the method's messages, both ways", size_tick, zero=True),
    )
    smooth = max(map(len, curves.values())) > SINGLE
    legend = [(f"m{styles[method]}", method) for method in curves]
    caption = "Means of the last ten evaluations; the faint lines are single rounds." if smooth else ""
    drawn = []
    for place, (axis, title) in enumerate(zip(axes, ("Accuracy over rounds", "Accuracy against bytes"), strict=True)):
        plot = Plot(axis, Axis.over(values, "", percent), title.lower(), height=330)
        for method, curve in curves.items():
            if smooth:
                plot.line([(point[place], point[2]) for point in curve], f"c{styles[method]} faint")
        for method, curve in curves.items():
            points = smoothed(curve) if smooth else curve
            told = _told(method, points, place)
            plot.line([(point[place], point[2]) for point in points], f"c{styles[method]}", told=told)
        drawn.append(Figure(title, plot.svg(), caption, legend).html())
    return section("What they learned", "", drawn)


def smoothed(curve: Sequence[Sequence[float]]) -> list[tuple[float, float, float]]:
    """(round, bytes, mean accuracy of the ten evaluations up to there), or of all that there are by then."""
    values = [value for _, _, value in curve]
    means = [mean(values[max(0, place - 9) : place + 1]) for place in range(len(values))]
    return [(index, spent, value) for (index, spent, _), value in zip(curve, means, strict=True)]


def _told(method: str, curve: Sequence[Sequence[float]], x: int) -> Callable[[Point], str]:
    """What a point of a curve says to who points at it."""
    known = {(point[x], point[2]): point for point in curve}

    def words(point: Point) -> str:
        index, spent, value = known[point]
        return f"{method}, round {index:g}: {value:.2f} % after {size(spent)}"

    return words


def _cost(figures: Mapping[str, Any], ends: Mapping[str, str]) -> str:
    usual = {Kind.WEIGHTS.label, Kind.SCALARS.label}
    kinds = [kind for kind in FILLS if any(kind in entry["bytes"]["by_kind"] for entry in figures["methods"])]
    more = [kind for kind in kinds if kind not in usual]
    drawn = [_bars(figures, kinds, "Tensor bytes by kind", wide=not more)]
    if more:
        drawn.append(_bars(figures, more, "Without weights and scalars", wide=False))
    rows = [
        ("" if place else _named(entry, ends), escape(kind), *_kind_cells(sides))
        for entry in figures["methods"]
        for place, (kind, sides) in enumerate(entry["bytes"]["by_kind"].items())
    ]
    head = ("method", "kind", "↓ measured", "↓ predicted", "↑ measured", "↑ predicted", "measured to predicted")
    about = "Tensor bytes of the methods' own messages, both ways; predicted is each method's own formula."
    exact = card("Tensor bytes, measured beside predicted", _table(head, rows, words=2))
    return section("What they cost on the wire", about, [*(figure.html() for figure in drawn), exact])


def _kind_cells(sides: Mapping[str, Mapping[str, int]]) -> Iterable[str]:
    yield from (f"{sides[d][source]:,}" for d in DIRECTIONS for source in ("measured", "predicted"))
    off = off_by(both_ways(sides, "measured"), both_ways(sides, "predicted"))
    yield escape(off) if off == "exact" else f'<span class="off">{escape(off)}</span>'


def _bars(figures: Mapping[str, Any], kinds: Sequence[str], title: str, *, wide: bool) -> Figure:
    """For each method its tensor bytes stacked by kind, measured above a paler bar of what was predicted."""
    stacks = {
        label_of(entry): {
            source: {
                kind: both_ways(sides, source) for kind, sides in entry["bytes"]["by_kind"].items() if kind in kinds
            }
            for source in ("measured", "predicted")
        }
        for entry in figures["methods"]
    }
    longest = max(sum(sizes.values()) for stack in stacks.values() for sizes in stack.values())
    left = 24 + min(120, 7 * max(map(len, stacks)))
    plot = Plot(
        Axis.over([longest * 1.12], "", size_tick, zero=True),
        Axis(len(stacks), 0, ()),
        title.lower(),
        width=WIDE if wide else NARROW,
        height=46 + max(90, 34 * len(stacks)),
        left=left,
        bottom=26,
    )
    for place, (method, stack) in enumerate(stacks.items()):
        plot.write(left - 7, plot.y(place + 0.42) + 4, method, "end", "tick")
        _stacked(plot, stack["measured"], (place + 0.62, place + 0.14), f"{method}, measured", "")
        _stacked(plot, stack["predicted"], (place + 0.78, place + 0.64), f"{method}, predicted", " pale")
        total = sum(stack["measured"].values())
        plot.write(plot.x(total) + 6, plot.y(place + 0.42) + 4, size(total) if total else "none", "start", "note")
    caption = "The thin, paler bar is what the formula predicts."
    return Figure(title, plot.svg(grid=False), caption, [(FILLS[kind], kind) for kind in kinds], wide=wide)


def _stacked(plot: Plot, sizes: Mapping[str, int], ends: tuple[float, float], what: str, shade: str) -> None:
    start = 0
    for kind, size_bytes in sizes.items():
        words = f"{what}: {kind} {size_bytes:,} bytes"
        plot.block(start, start + size_bytes, *ends, FILLS[kind] + shade, words)
        start += size_bytes
