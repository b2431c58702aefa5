"""The tables of compare.html: numbers that can be sorted and copied, with the best of each column marked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedrpc.report.comparison_words import (
    describe_best,
    describe_overhead,
    format_accuracy,
    format_deviation,
    format_kernel_bytes,
    format_spread,
    has_predicted_times,
    has_ten_evaluations,
    name_test_set,
    sum_directions,
)
from fedrpc.report.formula import DIFFERS, list_differing
from fedrpc.report.markup import Cell, mark_best
from fedrpc.report.table import format_size
from fedrpc.report.words import count_round, format_duration
from fedrpc.wire.kinds import DIRECTIONS

Document = Mapping[str, Any]
Entry = Mapping[str, Any]
# A heading, what makes a cell, and whether the highest is the best: None where nothing is.
Column = tuple[str, Callable[[Entry], Cell], bool | None]


@dataclass(frozen=True)
class Sheet:
    """A table with a row for each (entry, cells); the heading of the entry's column is the first."""

    title: str
    head: Sequence[str]
    rows: Sequence[tuple[Entry, Sequence[Cell | str]]]
    caption: str = ""
    words: int = 1


def list_sheets(document: Document) -> list[Sheet]:
    """All tables that this comparison has something for, without bytes by kind."""
    found = [
        tabulate_outcome(document),
        tabulate_differences(document),
        *(_tabulate_target(document, place) for place in range(len(document["targets"]))),
        _tabulate_budget(document),
        tabulate_cost(document),
    ]
    return [sheet for sheet in found if sheet]


def tabulate_outcome(document: Document) -> Sheet:
    """Accuracies, bytes of each layer, overhead and time."""
    ten = has_ten_evaluations(document)
    columns: list[Column] = [
        ("final accuracy, %", lambda entry: _make_cell(entry["statistics"]["last"], "{:.2f}"), True),
        *([("mean of last ten, %", _make_last_ten, True)] if ten else []),
        (f"best, %, {describe_best(document)}", _make_best, True),
        ("tensors", lambda entry: _make_size(entry["bytes"]["tensor"]["measured"]), False),
        ("messages", lambda entry: _make_size(entry["bytes"]["message"]), False),
        ("kernel", lambda entry: Cell(format_kernel_bytes(entry), entry["bytes"]["kernel"]), False),
        ("overhead", _make_overhead, False),
        ("time", lambda entry: Cell(format_duration(entry["seconds"]), entry["seconds"]), False),
    ]
    if has_predicted_times(document):
        columns.append(("time, predicted", _make_predicted, False))
    caption = f"Accuracy on {name_test_set(document)}; {describe_overhead(document)}; kernel: all that TCP carried."
    return _fill("All in numbers", document["methods"], columns, caption)


def tabulate_differences(document: Document) -> Sheet | None:
    """Differences in accuracy to FedAvg, paired by seed; None for single seeds and without FedAvg."""
    entries = [entry for entry in document["methods"] if _get_difference(entry) and entry["name"] != entry["baseline"]]
    if not any(_get_difference(entry)["n"] > 1 for entry in entries):
        return None
    rows = []
    for entry in entries:
        found = _get_difference(entry)
        interval = "-" if found["low"] is None else f"{found['low']:+.2f} to {found['high']:+.2f}"
        rows.append(
            (
                entry,
                [
                    entry["baseline"],
                    str(found["n"]),
                    Cell(f"{found['mean']:+.2f}", found["mean"], found["sd"]),
                    Cell(interval, found["low"]),
                    f"{found['better']}, {found['worse']}",
                    Cell("-" if found["sign_p"] is None else f"{found['sign_p']:.3g}", found["sign_p"]),
                ],
            )
        )
    head = ("method", "against", "seeds", "difference in points", "interval of 95 %", "better, worse", "sign test p")
    caption = "Final accuracy, in pairs of runs with the same seed; the interval is Student's."
    return Sheet("Differences to FedAvg", head, rows, caption, words=2)


def _get_difference(entry: Entry) -> Any:
    return entry["difference"]["last"]


def _tabulate_target(document: Document, place: int) -> Sheet:
    columns: list[Column] = [
        ("reached by", lambda entry: _make_reached(entry["targets"][place]), None),
        ("rounds", lambda entry: _make_cell(entry["targets"][place]["rounds"], "{:.1f}"), False),
        ("messages", lambda entry: _make_spread_size(entry["targets"][place]["bytes"]), False),
        ("seconds", lambda entry: _make_cell(entry["targets"][place]["seconds"], "{:.1f}"), False),
    ]
    if has_predicted_times(document):
        columns.append(
            ("seconds, predicted", lambda entry: _make_cell(entry["targets"][place]["predicted"], "{:.1f}"), False)
        )
    caption = "Until an evaluation first gave it; means over the seeds that reached it."
    return _fill(f"What {document['targets'][place]:g} % cost", document["methods"], columns, caption)


def _make_reached(found: Mapping[str, Any]) -> Cell:
    if not found["reached"]:
        return Cell("never reached", 0)
    return Cell("reached" if found["of"] == 1 else f"{found['reached']} of {found['of']} seeds", found["reached"])


def _tabulate_budget(document: Document) -> Sheet | None:
    if document["byte_budget"] is None:
        return None

    def make_accuracy(entry: Entry) -> Cell:
        return _make_cell(entry["at_budget"], "{:.2f}") if entry["at_budget"] else Cell("not one evaluation")

    columns: list[Column] = [
        ("accuracy, %", make_accuracy, True),
        ("messages in all", lambda entry: _make_size(entry["bytes"]["message"]), None),
    ]
    return _fill(f"Within {format_size(document['byte_budget'])}", document["methods"], columns, "")


def tabulate_cost(document: Document) -> Sheet | None:
    """Communication, computation and memory against FedAvg's; None where no row has a ratio."""
    names = ("communication", "computation", "memory")
    if not any(entry["cost"][name]["ratio"] for entry in document["methods"] for name in names):
        return None
    columns = [
        column
        for name, text in zip(names, (format_size, _format_cpu, format_size), strict=True)
        for column in _list_cost_columns(name, text)
    ]
    caption = "Tensor bytes of all clients; CPU seconds of all clients; the most memory that a client's process held."
    return _fill("Cost beside FedAvg", document["methods"], columns, caption)


def _list_cost_columns(name: str, text: Callable[[float], str]) -> list[Column]:
    return [
        (name, lambda entry: _make_value(entry["cost"][name]["value"], text), False),
        (f"{name} x FedAvg's", lambda entry: _make_value(entry["cost"][name]["ratio"], "{:.2f}".format), None),
    ]


def _format_cpu(seconds: float) -> str:
    return f"{seconds:.1f} CPU s"


def tabulate_kinds(document: Document) -> Sheet:
    """Tensor bytes of each row and kind, measured beside predicted."""
    rows = []
    for entry in document["methods"]:
        for kind, sides in entry["bytes"]["by_kind"].items():
            sizes = [sides[direction][source] for direction in DIRECTIONS for source in ("measured", "predicted")]
            off = format_deviation(sum_directions(sides, "measured"), sum_directions(sides, "predicted"))
            if kind in list_differing(entry):
                off = f"{off}, {DIFFERS}"
            rows.append((entry, [kind, *(Cell(f"{size:,}", size) for size in sizes), off]))
    head = ("method", "kind", "↓ measured", "↓ predicted", "↑ measured", "↑ predicted", "measured to predicted")
    return Sheet("Tensor bytes, measured beside predicted", head, rows, words=2)


# Cells


def _fill(
    title: str,
    entries: Sequence[Entry],
    columns: Sequence[Column],
    caption: str,
) -> Sheet:
    """A table with the best of each column marked."""
    filled = []
    for _, make, highest in columns:
        cells = [make(entry) for entry in entries]
        filled.append(cells if highest is None else mark_best(cells, highest=highest))
    rows = [(entry, [column[place] for column in filled]) for place, entry in enumerate(entries)]
    return Sheet(title, ("method", *(name for name, _, _ in columns)), rows, caption)


def _make_cell(found: Mapping[str, Any] | None, form: str) -> Cell:
    """A mean and its standard deviation."""
    return Cell(format_spread(found, form), found["mean"], found["sd"]) if found else Cell("-")


def _make_value(value: float | None, text: Callable[[float], str]) -> Cell:
    return Cell("-" if value is None else text(value), value)


def _make_size(size: float) -> Cell:
    return Cell(format_size(size), size)


def _make_spread_size(found: Mapping[str, Any] | None) -> Cell:
    if found is None:
        return Cell("-")
    spread = "" if found["sd"] is None else f" ± {format_size(found['sd'])}"
    return Cell(format_size(found["mean"]) + spread, found["mean"], found["sd"])


def _make_overhead(entry: Entry) -> Cell:
    return _make_value(entry["overhead"], "{:.3f}".format)


def _make_predicted(entry: Entry) -> Cell:
    return _make_value(entry["time"]["predicted"], format_duration)


def _make_last_ten(entry: Entry) -> Cell:
    return _make_cell(entry["statistics"]["last10"], "{:.2f}")


def _make_best(entry: Entry) -> Cell:
    accuracy, rounds = entry["accuracy"], entry["runs"][0]["num_rounds"]
    if not accuracy:
        return Cell("-")
    where = "" if accuracy["best_round"] is None else f" (round {count_round(accuracy['best_round'], rounds)})"
    return Cell(format_accuracy(entry, "best") + where, accuracy["best"])
