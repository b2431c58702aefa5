"""The table of a comparison for a terminal, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedrpc.report.comparison_words import (
    RAW,
    describe_best,
    describe_guarantee,
    describe_sameness,
    describe_setup,
    describe_sharing,
    format_accuracy,
    format_deviation,
    format_kernel_bytes,
    format_overhead,
    format_spread,
    has_several_runs,
    has_ten_evaluations,
    join_failures,
    list_guarantees,
    list_notes,
    make_title,
    sum_directions,
)
from fedrpc.report.formula import DIFFERS, list_differing
from fedrpc.report.table import format_size

Document = Mapping[str, Any]


def format_comparison(document: Document) -> RenderableType:
    """The comparison for a terminal."""
    agree = document["same"]["cohorts"]["agree"]
    pieces: list[RenderableType] = [
        Text(f"\n{make_title(document)}, {document['setting']['partition'] or 'several partitions'}", style="bold"),
        Text(describe_setup(document), style="bold"),
        Text(describe_sameness(document), style="dim" if agree else "bold yellow"),
        *(Text(f"warning: {line}", style="bold yellow") for line in document["differs"]),
        Text("\n".join(list_notes(document)) + "\n", style="dim"),
    ]
    tables = [
        _tabulate_seeds(document) if has_several_runs(document) else _tabulate_outcome(document),
        _tabulate_differences(document),
        *(_tabulate_target(document, place) for place in range(len(document["targets"]))),
        _tabulate_budget(document),
        _tabulate_cost(document),
        _tabulate_kinds(document),
        _tabulate_sharing(document),
    ]
    for table in filter(None, tables):
        pieces += [table, Text()]
    if list_guarantees(document):
        pieces += [_format_guarantees(document), Text()]
    if document["failed"]:
        pieces += [tabulate_failures(document["failed"]), Text()]
    return Group(*pieces)


def _make_table(*columns: str, words: int = 1) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        number = place >= words
        table.add_column(name, justify="right" if number else "left", no_wrap=number, vertical="top", overflow="fold")
    table.columns[0].min_width = 8  # a narrow terminal folds the name, never a number
    return table


def _style_name(entry: Mapping[str, Any], *, marked: bool = False) -> Text:
    """A row's name in lines: the method, what tells it from its other rows, and the mark of raw data."""
    method, *others = entry["labels"]
    style = "bold red" if entry["raw_data"] else "bold cyan"
    lines = [Text.assemble((method, style), " *" if marked and entry["pareto"] else ""), *map(Text, others)]
    if entry["raw_data"]:
        lines.append(Text(RAW, style="bold white on red"))
    return Text("\n").join(lines)


# Outcome


def _tabulate_outcome(document: Document) -> Table:
    ten = has_ten_evaluations(document)
    best = describe_best(document).replace("validation", "valid.").replace("-", "-\n")
    accuracies = ("\naccuracy\n%, last", *(["\nmean of\nlast ten"] if ten else []), f"best,\n{best}")
    predicted = _name_predicted(document, 3)
    kernel = [] if predicted else ["\n\nkernel"]  # 80 columns have room for one of them
    table = _make_table("\n\nmethod", *accuracies, "\n\nmessages", *kernel, "\nover-\nhead", "\n\nseconds", *predicted)
    found = [entry["accuracy"]["last"] for entry in document["methods"] if entry["accuracy"]]
    for entry in document["methods"]:
        top = len(found) > 1 and entry["accuracy"] and entry["accuracy"]["last"] == max(found)
        table.add_row(
            _style_name(entry, marked=True),
            Text(format_accuracy(entry, "last"), style="bold green" if top else ""),
            *([format_accuracy(entry, "last10")] if ten else []),
            format_accuracy(entry, "best"),
            format_size(entry["bytes"]["message"]),
            *([format_kernel_bytes(entry)] if kernel else []),
            format_overhead(entry),
            _format_seconds(entry["seconds"]),
            *([_format_seconds(entry["time"]["predicted"])] if predicted else []),
        )
    return table


def _tabulate_seeds(document: Document) -> Table:
    table = _make_table(
        "\nmethod",
        "\nseeds",
        "accuracy\n%, last",
        "\nmessages",
        "over-\nhead",
        "\nseconds",
        *_name_predicted(document, 2),
    )
    means = [entry["accuracy"]["last"] for entry in document["methods"] if entry["accuracy"]]
    for entry in document["methods"]:
        found, top = entry["statistics"], entry["accuracy"] and entry["accuracy"]["last"] == max(means)
        table.add_row(
            _style_name(entry, marked=True),
            str(len(entry["runs"])),
            Text(format_spread(found["last"], "{:.2f}"), style="bold green" if top else ""),
            format_size(entry["bytes"]["message"]),
            format_overhead(entry),
            _format_seconds(entry["seconds"]),
            *([_format_seconds(entry["time"]["predicted"])] if _list_links(document) else []),
        )
    return table


def _format_cpu(seconds: float) -> str:
    return f"{seconds:,.1f} s"


def _list_links(document: Document) -> list[str]:
    """The links over which times are predicted."""
    return list(dict.fromkeys(entry["time"]["link"] for entry in document["methods"] if entry["time"]["link"]))


def _name_predicted(document: Document, lines: int) -> list[str]:
    """The head of the column of predicted times, of so many lines; none when there is no link."""
    links = _list_links(document)
    over = links[0] if len(links) == 1 and len(links[0]) <= 10 else "links"
    return [f"{chr(10) * (lines - 2)}predicted\nover {over}"] if links else []


def _format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:,.1f}" if seconds < 1000 else f"{seconds:,.0f}"


# Against FedAvg


def _tabulate_differences(document: Document) -> Table | None:
    """Paired differences, where there are several seeds."""
    entries = [entry for entry in document["methods"] if entry["baseline"] and entry["baseline"] != entry["name"]]
    if not any((entry["difference"]["last"] or {"n": 0})["n"] > 1 for entry in entries):
        return None
    heads = (
        "\nmethod",
        "\nagainst",
        "\nn",
        "difference\nin points",
        "interval\nof 95 %",
        "better,\nworse",
        "sign\ntest p",
    )
    table = _make_table(*heads, words=2)
    for entry in entries:
        found = entry["difference"]["last"]
        if found is None:
            table.add_row(_style_name(entry), entry["baseline"], "0", "-", "-", "-", "-")
            continue
        interval = "-" if found["low"] is None else f"{found['low']:+.2f} to {found['high']:+.2f}"
        table.add_row(
            _style_name(entry),
            entry["baseline"],
            str(found["n"]),
            f"{found['mean']:+.2f}",
            interval,
            f"{found['better']}, {found['worse']}",
            "-" if found["sign_p"] is None else f"{found['sign_p']:.2g}",
        )
    return table


def _tabulate_cost(document: Document) -> Table | None:
    """Communication, computation and memory beside FedAvg's, where computation or memory is known."""
    parts = ("communication", "computation", "memory")
    if not any(entry["cost"][part]["value"] is not None for entry in document["methods"] for part in parts[1:]):
        return None
    formats = dict(zip(parts, (format_size, _format_cpu, format_size), strict=True))
    heads = ("tensors", "x", "client CPU", "x", "a client's\nmemory", "x")
    table = _make_table("\nmethod", *(f"\n{head}" if "\n" not in head else head for head in heads))
    for entry in document["methods"]:
        cells = []
        for part in parts:
            found = entry["cost"][part]
            cells += ["-" if found["value"] is None else formats[part](found["value"])]
            cells += ["-" if found["ratio"] is None else f"{found['ratio']:.3f}"]
        table.add_row(_style_name(entry), *cells)
    return table


# Targets and budgets


def _tabulate_target(document: Document, place: int) -> Table:
    target, links = document["targets"][place], _list_links(document)
    table = _make_table(
        f"to {target:g} %", "reached by", "rounds", "messages", "seconds", *(["predicted"] if links else [])
    )
    for entry in document["methods"]:
        found = entry["targets"][place]
        if found["reached"]:
            sizes = found["bytes"]
            spread = "" if sizes["sd"] is None else f" ± {format_size(sizes['sd'])}"
            cells = [
                f"{found['reached']} of {found['of']}",
                format_spread(found["rounds"], "{:.1f}" if found["reached"] > 1 else "{:.0f}"),
                f"{format_size(sizes['mean'])}{spread}",
                format_spread(found["seconds"], "{:.1f}"),
                *([format_spread(found["predicted"], "{:.1f}")] if links else []),
            ]
        else:
            best = f"never, best {format_accuracy(entry, 'best')} %" if entry["accuracy"] else "never"
            cells = [best, *"---", *("-" if links else "")]
        table.add_row(_style_name(entry), *cells)
    return table


def _tabulate_budget(document: Document) -> Table | None:
    if document["byte_budget"] is None:
        return None
    table = _make_table(f"within {format_size(document['byte_budget'])}", "accuracy, %", "rounds", "messages in all")
    for entry in document["methods"]:
        within = [run["at_budget"] for run in entry["runs"] if run["at_budget"]]
        rounds = "-" if not within else f"{sum(each['rounds'] for each in within) / len(within):.3g}"
        accuracy = format_spread(entry["at_budget"], "{:.2f}") if within else "not one evaluation"
        table.add_row(_style_name(entry), accuracy, rounds, format_size(entry["bytes"]["message"]))
    return table


# Bytes, privacy and failures


def _tabulate_kinds(document: Document) -> Table:
    table = _make_table("method", "kind", "tensor bytes", "predicted", "formula", words=2)
    for entry in document["methods"]:
        names = _style_name(entry).split()
        for place, (kind, sides) in enumerate(entry["bytes"]["by_kind"].items()):
            measured, predicted = (sum_directions(sides, source) for source in ("measured", "predicted"))
            off = format_deviation(measured, predicted)
            style = "green" if off == "exact" else "yellow"
            if kind in list_differing(entry):
                off, style = f"{off}, {DIFFERS}", "bold red"
            table.add_row(
                names[place] if place < len(names) else "",
                kind,
                f"{measured:,}",
                f"{predicted:,}",
                Text(off, style=style),
            )
        for name in names[len(entry["bytes"]["by_kind"]) :]:
            table.add_row(name, "", "", "", "")
    return table


def _tabulate_sharing(document: Document) -> Table:
    table = _make_table("\nmethod", "leaves a client besides\nweights and scalars", "\nprivacy", words=3)
    for entry in document["methods"]:
        leaves = Text(describe_sharing(entry))
        leaves.highlight_words([RAW], "bold white on red")
        table.add_row(_style_name(entry), leaves, Text(describe_guarantee(entry)))
    return table


def _format_guarantees(document: Document) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, line in list_guarantees(document):
        table.add_row(Text(name, style="bold cyan"), Text(line))
    return table


def tabulate_failures(failed: Iterable[Mapping[str, Any]]) -> Table:
    """What has no finished run, and why; runs that differ only in their seed share a line."""
    table = _make_table("failed", "why", words=2)
    for name, refused, seeds, reason in join_failures(failed):
        table.add_row(Text(f"{name}{seeds}", style="bold red"), Text(f"refused: {reason}" if refused else reason))
    return table
