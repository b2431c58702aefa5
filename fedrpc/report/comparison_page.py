"""Renders compare.html: a comparison as one page that needs no other file and no network.

`study/comparison.py` documents the values. The first screen has a line for each method; tables and plots follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedrpc.report.comparison_cells import list_sheets, tabulate_kinds
from fedrpc.report.comparison_plots import assign_colours, make_kind_bars, make_time_bars, plot_learning
from fedrpc.report.comparison_words import (
    RAW,
    describe_clock,
    describe_gain,
    describe_guarantee,
    describe_sameness,
    describe_seeds,
    describe_sharing,
    describe_validation,
    format_spread,
    has_predicted_times,
    has_ten_evaluations,
    join_failures,
    label_method,
    list_guarantees,
    list_links,
    list_notes,
)
from fedrpc.report.markup import Cell, mark_best, render
from fedrpc.report.style import NUM_METHOD_HUES
from fedrpc.report.svg import draw_bars
from fedrpc.report.words import format_duration, make_sentence, pluralize

Document = Mapping[str, Any]
Entry = Mapping[str, Any]

PREDICTED = "predicted times: with the computing that was measured, when every client has a machine of its own"


@dataclass(frozen=True)
class Line:
    """A method on the first screen: what it gave, what it cost, how long it took, and what it promises."""

    entry: Entry
    accuracy: Cell
    last_ten: str
    bar: str
    gain: Cell
    time: Cell
    measured: str
    privacy: Cell


def render_page(document: Document) -> str:
    """The whole of compare.html."""
    setting = document["setting"]
    colours = assign_colours(document["methods"], NUM_METHOD_HUES)
    return render(
        "comparison.html.j2",
        subject=pluralize(len({entry["method"] for entry in document["methods"]}), "method"),
        dataset=setting["dataset"] or "several data sets",
        chips=_list_chips(document),
        raw=RAW,
        colours=colours,
        head=("method", "final accuracy", "bytes", describe_clock(document), "privacy"),
        lines=_list_lines(document, colours),
        failed=join_failures(document["failed"]),
        sameness=make_sentence(describe_sameness(document)),
        agree=document["same"]["cohorts"]["agree"],
        warnings=_list_warnings(document),
        notes=[*list_notes(document), *([PREDICTED] if has_predicted_times(document) else [])],
        sheets=list_sheets(document),
        sharing=_list_sharing(document),
        guarantees=list_guarantees(document),
        learning=plot_learning(document, colours),
        kinds=make_kind_bars(document),
        kinds_sheet=tabulate_kinds(document),
        time=make_time_bars(document),
        footer=f"fedrpc {document['version']}",
    )


def _list_chips(document: Document) -> list[tuple[str, Any]]:
    setting = document["setting"]
    chips = [
        ("partition", setting["partition"]),
        ("model", setting["model"]),
        ("clients", setting["num_clients"]),
        ("clients a round", setting["clients_a_round"]),
        ("rounds", setting["num_rounds"]),
    ]
    chips = [(name, f"{value:,}" if isinstance(value, int) else value or "several") for name, value in chips]
    if tested := describe_validation(document):
        chips.append(("accuracies of", tested))
    word, _, seeds = describe_seeds(document["seeds"]).partition(" ")
    return [*chips, (word, seeds), ("link", " and ".join(list_links(document)))]


def _list_warnings(document: Document) -> list[str]:
    """What a reader must know before believing the numbers."""
    warnings = list(document["differs"])
    shaky = [
        entry["name"]
        for entry in document["methods"]
        if any(run["reproducible"] is False for run in entry["runs"])  # older runs do not tell
    ]
    if shaky:
        warnings.append(f"not reproducible, since it matters which clients answer first: {', '.join(shaky)}")
    return warnings


# The first screen


def _list_lines(document: Document, colours: Mapping[str, str]) -> list[Line]:
    entries = document["methods"]
    ten = has_ten_evaluations(document)
    longest = max((entry["overhead"] or 0.0 for entry in entries), default=0.0)
    accuracies = mark_best([_make_accuracy(entry) for entry in entries], highest=True)
    clock = "predicted" if has_predicted_times(document) else "measured"
    times = mark_best([_make_time(entry, clock) for entry in entries], highest=False)
    return [
        Line(
            entry,
            accuracies[place],
            f"last ten {format_spread(entry['statistics']['last10'], '{:.2f}')} %" if ten else "",
            _draw_overhead(entry, longest, colours[entry["name"]]),
            Cell(describe_gain(entry), entry["overhead"]),
            times[place],
            "" if clock == "measured" else f"measured {format_duration(entry['time']['measured'])}",
            Cell(describe_guarantee(entry), entry["privacy"]["epsilon"]),
        )
        for place, entry in enumerate(entries)
    ]


def _make_accuracy(entry: Entry) -> Cell:
    found = entry["statistics"]["last"]
    return Cell(f"{format_spread(found, '{:.2f}')} %", found["mean"], found["sd"]) if found else Cell("not measured")


def _make_time(entry: Entry, clock: str) -> Cell:
    """The time that is compared, measured or predicted; none where it was not predicted."""
    seconds = entry["time"][clock]
    return Cell("-" if seconds is None else format_duration(seconds), seconds)


def _draw_overhead(entry: Entry, longest: float, colour: str) -> str:
    if not entry["overhead"]:
        return ""
    words = f"{label_method(entry)}: {entry['overhead']:.3f} x FedAvg's tensor bytes"
    return draw_bars([[(f"m{colour}", entry["overhead"], words)]], longest)


def _list_sharing(document: Document) -> list[tuple[Entry, str, Sequence[str]]]:
    """(entry, what leaves a client, (privacy, network, parameters)) of each method."""
    return [
        (
            entry,
            describe_sharing(entry),
            (
                describe_guarantee(entry),
                entry["model"] or document["setting"]["model"] or "several",
                ", ".join(f"{name} {value}" for name, value in entry["params"].items()) or "none",
            ),
        )
        for entry in document["methods"]
    ]
