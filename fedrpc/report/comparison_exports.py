"""A comparison for other programs: compare.csv with a line for each run, and compare.tex with a table for a paper."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

from fedrpc.report.comparison_words import (
    describe_seeds,
    describe_validation,
    has_several_runs,
    label_method,
    list_guarantees,
)
from fedrpc.report.table import format_size

Document = Mapping[str, Any]
_ESCAPED = {
    "\\": r"\textbackslash{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
}


# CSV


def make_csv(document: Document) -> str:
    """One line for each run, with names as in compare.json; an empty cell is a value that does not exist."""
    grid = list(document["grid"])
    rows = [_list_cells(document, entry, run, grid) for entry in document["methods"] for run in entry["runs"]]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _list_cells(
    document: Document, entry: Mapping[str, Any], run: Mapping[str, Any], grid: Iterable[str]
) -> dict[str, Any]:
    accuracy, sizes = run["accuracy"] or {}, run["bytes"]
    stopped = run["stopped"] or {}
    cells = {
        "name": entry["name"],
        "method": entry["method"],
        "model": entry["model"] or document["setting"]["model"],
        "seed": run["seed"],
        **{name: entry["point"].get(name) for name in grid},
        "run": run["run"],
        "num_rounds": run["num_rounds"],
        "stopped_by_byte_budget": stopped.get("byte_budget"),
        "accuracy_last": accuracy.get("last"),
        "accuracy_last10": accuracy.get("last10"),
        "accuracy_best": accuracy.get("best"),
        "best_is": accuracy.get("best_is"),
        "tensor_bytes": sizes["tensor"]["measured"],
        "tensor_bytes_predicted": sizes["tensor"]["predicted"],
        "message_bytes": sizes["message"],
        "kernel_bytes": sizes["kernel"],
        "overhead": run["overhead"],
        "seconds": run["seconds"],
        "seconds_predicted": (run["predicted"] or {}).get("seconds"),
        "link": (run["predicted"] or {}).get("link"),
        "cpu_seconds": run["cpu_seconds"],
        "peak_bytes": run["peak_bytes"],
        "epsilon": run["privacy"]["epsilon"],
        "delta": run["privacy"]["delta"],
        "privacy": run["privacy"]["text"],
        "raw_data": entry["raw_data"],
        "model_sha256": run["model_sha256"],
    }
    for found in run["targets"]:
        cells |= {f"{name}_to_{found['target']:g}": found[name] for name in ("rounds", "bytes", "seconds", "predicted")}
    if document["byte_budget"] is not None:
        cells["accuracy_at_byte_budget"] = (run["at_budget"] or {}).get("accuracy")
    return cells


# LaTeX


def make_latex(document: Document) -> str:
    """A booktabs table of all rows; it needs the package booktabs and nothing else."""
    several = has_several_runs(document)
    head = ["method", r"accuracy (\%)", *([r"to FedAvg"] if several else []), "messages", "overhead", "seconds"]
    head += [rf"to {target:g}\,\%" for target in document["targets"]] + [r"$\varepsilon$"]
    means = [entry["accuracy"]["last"] for entry in document["methods"] if entry["accuracy"]]
    rows = [_make_row(entry, several, max(means, default=None)) for entry in document["methods"]]
    setting = document["setting"]
    where = ", ".join(str(setting[name]) for name in ("dataset", "partition") if setting[name])
    tested = f", accuracies of {described}" if (described := describe_validation(document)) else ""
    lines = [
        f"% {where}, {describe_seeds(document['seeds'])}{tested}; fedrpc {document['version']}; "
        "needs \\usepackage{booktabs}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
        " & ".join(head) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        r"\bottomrule",
        *_list_guarantees(document, len(head)),
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _list_guarantees(document: Document, num_columns: int) -> list[str]:
    """What each epsilon in the table depends on: it is no number by itself."""
    lines = [f"{name}: {text}" for name, text in list_guarantees(document)]
    return [
        rf"\multicolumn{{{num_columns}}}{{p{{0.9\linewidth}}}}{{\footnotesize {escape(line)}}} \\" for line in lines
    ]


def _make_row(entry: Mapping[str, Any], several: bool, best: float | None) -> list[str]:
    found, epsilon = entry["statistics"], entry["privacy"]["epsilon"]
    accuracy = _format_spread(found["last"], ".2f")
    if entry["accuracy"] and entry["accuracy"]["last"] == best:
        accuracy = rf"\textbf{{{accuracy}}}"
    cells = [escape(label_method(entry)), accuracy]
    if several:
        cells.append(_format_difference(entry["difference"]["last"]))
    cells += [
        _format_size(entry["bytes"]["message"]),
        "--" if entry["overhead"] is None else rf"{entry['overhead']:.3f}\,$\times$",
        _format_spread(found["seconds"], ".1f"),
        *(_format_target(each) for each in entry["targets"]),
        r"$\infty$" if epsilon is None else f"{epsilon:.3g}",
    ]
    return cells


def _format_spread(found: Mapping[str, Any] | None, form: str) -> str:
    if found is None:
        return "--"
    return f"{found['mean']:{form}}" + ("" if found["sd"] is None else rf" $\pm$ {found['sd']:{form}}")


def _format_difference(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "--"
    interval = "" if found["low"] is None else f" [{found['low']:+.2f}, {found['high']:+.2f}]"
    return f"{found['mean']:+.2f}{interval}"


def _format_target(found: Mapping[str, Any]) -> str:
    if not found["reached"]:
        return "never"
    some = "" if found["reached"] == found["of"] else f" ({found['reached']}/{found['of']})"
    return f"{_format_size(found['bytes']['mean'])}{some}"


def _format_size(size: float) -> str:
    return format_size(size).replace(" ", r"\,")


def escape(text: str) -> str:
    """A text as LaTeX."""
    return "".join(_ESCAPED.get(char, char) for char in text)
