"""Compares finished runs of several methods: one table, compare.json and compare.html.

compare.json (sizes in bytes, accuracies in percent; `null` where a value does not exist):

    schema        1
    version       of fedrpc
    setting       {dataset, partition, model, num_clients, clients_a_round, num_rounds, seed}: the same for all
    same          {partition_sha256, initial_model, cohorts}: why the runs compare like with like. `initial_model` says
                  what it follows from; `cohorts` is {agree, rounds_apart: {method: [round, ...]}}, read off the ledgers
    baseline      {method, by}: what overheads are measured against; `by` is "run" or "formula"
    methods       a list in the order in which they were named, of
      method, run             its name, and its run directory, relative to this file
      params                  its own parameters
      shares, raw_data        what leaves a client besides weights and scalars; whether that is raw data
      accuracy                {last, last10, best, best_round, best_is} or null; last10 is the mean of the last ten
      bytes.by_kind.<kind>    {down, up}.{measured, predicted}: tensor bytes of the method's own phases
      bytes.tensor            {measured, predicted}: their sums
      bytes.message           the method's own messages, both ways
      bytes.kernel            everything that TCP carried, both ways
      bytes.kernel_note       why that is not exact (a run that was resumed: a lower bound), or ""
      overhead                tensor bytes over those of FedAvg
      seconds
      privacy                 {epsilon, delta, reason, text}; `text` is "no guarantee: ..." or the epsilon in full
      model_sha256
      curve                   [[round, message bytes up to its end, accuracy], ...] of the evaluated rounds
    failed        a list of {method, reason, exit_code}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

import fedrpc
from fedrpc.errors import ConfigError
from fedrpc.files import explain_damage, explain_unwritable, write_atomically
from fedrpc.registry import METHODS
from fedrpc.report.comparison_page import (
    BASELINE,
    RAW,
    describe_guarantee,
    describe_overhead,
    describe_sameness,
    describe_sharing,
    format_accuracy,
    format_deviation,
    format_kernel_bytes,
    format_overhead,
    list_guarantees,
    make_title,
    render_page,
    sum_directions,
)
from fedrpc.report.formula import DIFFERS, list_differing
from fedrpc.report.page import show_runs
from fedrpc.report.plots_bytes import FILLS, list_spending
from fedrpc.report.table import format_size
from fedrpc.report.words import describe_privacy, pluralize
from fedrpc.study.reading import Run, read_run
from fedrpc.wire.kinds import DIRECTIONS, Kind
from fedrpc.wire.ledger import EVALUATE, SESSION

# What may differ between runs that are compared: the method, and what does not change the result.
MAY_DIFFER = frozenset({"method", "params", "parallel", "device", "limits"})


@dataclass(frozen=True)
class Failure:
    """A method that has no finished run, and why, in one line."""

    method: str
    reason: str
    exit_code: int = 1


@dataclass(frozen=True)
class Comparison:
    """Finished runs of several methods in one setting.

    Attributes:
        folder: Where compare.json and compare.html go.
        runs: By method, in the order in which they are shown.
    """

    folder: Path
    runs: Mapping[str, Run]
    failures: Sequence[Failure]

    @cached_property
    def document(self) -> dict[str, Any]:
        """What compare.json holds, and all that table and page show."""
        first = next(iter(self.runs.values()))
        baseline = self.runs.get(BASELINE)
        measured = _sum_tensor_bytes(baseline) if baseline else None
        heading = {name: first.summary[name] for name in ("dataset", "partition", "model", "num_clients")}
        return {
            "schema": 1,
            "version": fedrpc.__version__,
            "setting": heading
            | {"clients_a_round": _cohort_size(first), "num_rounds": first.summary["num_rounds"]}
            | {"seed": first.summary["seed"]},
            "same": {
                "partition_sha256": first.partition["sha256"],
                "initial_model": f"follows from seed {first.summary['seed']} and model {first.summary['model']}",
                "cohorts": _compare_cohorts(self.runs),
            },
            "baseline": {"method": BASELINE, "by": "run" if baseline else "formula"},
            "methods": [_make_entry(method, run, self.folder, measured) for method, run in self.runs.items()],
            "failed": [vars(failure) for failure in self.failures],
        }


def show_comparison(
    folder: Path, methods: Sequence[str], failures: Sequence[Failure], console: Console
) -> Sequence[Failure]:
    """Prints the table of the runs in `folder`/<method>, and writes compare.json and compare.html.

    Returns:
        The failures passed in, and the runs that cannot be compared.
    """
    found = read_comparison(folder, methods, failures)
    if not found.runs:
        console.print(_tabulate_failures([vars(failure) for failure in found.failures]))
        return found.failures
    _write(folder / "compare.json", json.dumps(found.document, indent=1) + "\n")
    _write(folder / "compare.html", render_page(found.document))
    console.print(format_comparison(found.document))
    where = f"run directories: {folder}/<method>\nvalues: {folder}/compare.json\npage: {folder}/compare.html"
    console.print(Text(where), soft_wrap=True)
    return found.failures


def show_finished(folders: Sequence[Path], console: Console) -> None:
    """Prints the tables of finished runs and comparisons, and rewrites their pages."""
    compared = [folder for folder in folders if (folder / "compare.json").is_file()]
    show_runs([folder for folder in folders if folder not in compared], console)
    for folder in compared:
        path = folder / "compare.json"
        with explain_damage(path, remedy="run the comparison again, which writes it anew"):
            written = json.loads(path.read_bytes())
            methods = [str(entry["method"]) for entry in (*written["methods"], *written["failed"])]
        show_comparison(folder, methods, (), console)


def read_comparison(folder: Path, methods: Iterable[str], failures: Sequence[Failure] = ()) -> Comparison:
    """The runs of these methods, without those that failed, cannot be read, or were run in another setting."""
    runs: dict[str, Run] = {}
    failed = {failure.method: failure for failure in failures}
    for method in methods:
        if method in failed:
            continue
        try:
            run = read_run(folder / method)
            if runs:
                _check_alike(next(iter(runs.values())), run)
            runs[method] = run
        except ConfigError as error:
            failed[method] = Failure(method, str(error), error.exit_code)
    return Comparison(folder, runs, list(failed.values()))


def _check_alike(first: Run, other: Run) -> None:
    """Raises ConfigError unless partition, network and schedule of two runs are the same."""
    one, two = ({k: v for k, v in run.config.items() if k not in MAY_DIFFER} for run in (first, other))
    for name in sorted(one.keys() | two.keys()):
        if one.get(name) != two.get(name):
            raise ConfigError(
                f"its {name} is {two.get(name)!r}, that of {first.summary['method']} {one.get(name)!r}: not the same "
                f"setting; remove {other.folder} and run the comparison again"
            )
    if first.partition["sha256"] != other.partition["sha256"]:
        raise ConfigError(
            f"its partition {other.partition['sha256'][:16]} is not that of {first.summary['method']}, "
            f"{first.partition['sha256'][:16]}: was it run on other data? Remove {other.folder} and "
            "run the comparison again"
        )


def _write(path: Path, text: str) -> None:
    with explain_unwritable(path):
        write_atomically(path, text)


# The values


def _sum_tensor_bytes(run: Run) -> int:
    return sum(int(run.summary["bytes"]["method"][direction]["tensor"]) for direction in DIRECTIONS)


def _cohort_size(run: Run) -> int:
    return max(1, round(float(run.config.get("fraction", 1.0)) * int(run.summary["num_clients"])))


def read_cohorts(run: Run) -> dict[int, set[int]]:
    """The clients asked in each round, from the ledger; without set-up and finalisation, which ask all."""
    found: dict[int, set[int]] = {index: set() for index in range(run.summary["num_rounds"])}
    for key, _ in run.ledger():
        if key.direction == "down" and key.phase not in (SESSION, EVALUATE) and key.round in found:
            found[key.round].add(key.client)
    return found


def _compare_cohorts(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Whether every round asked the same clients; a client that was absent from one run counts as a difference."""
    cohorts = {method: read_cohorts(run) for method, run in runs.items()}
    first = next(iter(cohorts.values()))
    apart = {
        method: [index for index, clients in rounds.items() if clients != first[index]]
        for method, rounds in cohorts.items()
    }
    apart = {method: rounds for method, rounds in apart.items() if rounds}
    return {"agree": not apart, "rounds_apart": apart}


def _make_entry(method: str, run: Run, folder: Path, baseline: int | None) -> dict[str, Any]:
    part, accuracy = run.summary["bytes"], run.summary["accuracy"]
    by_kind = _sum_by_kind(part)
    measured = _sum_tensor_bytes(run)
    shares = METHODS[method].shares if method in METHODS else "not known: the method is not installed here"
    shares += f"; {run.summary['caveat']}" if run.summary.get("caveat") else ""
    overhead = part["overhead_vs_fedavg"] if baseline is None else measured / baseline if baseline else None
    return {
        "method": method,
        "run": run.folder.relative_to(folder).as_posix(),
        "params": dict(run.config.get("params", {})),
        "shares": shares,
        "raw_data": _shows_raw_data(method, run) or Kind.SAMPLES.label in by_kind,
        "accuracy": {"last": accuracy["global"]}
        | {name: accuracy[name] for name in ("last10", "best", "best_round", "best_is")}
        if accuracy
        else None,
        "bytes": {
            "by_kind": by_kind,
            "tensor": {"measured": measured, "predicted": part["predicted"]["total"]},
            "message": sum(part["method"][direction]["message"] for direction in DIRECTIONS),
            "kernel": sum(part["total"][direction]["kernel"] for direction in DIRECTIONS),
            "kernel_note": part["kernel_note"],
        },
        "formula": run.summary.get("formula", {}),
        "overhead": overhead,
        "seconds": run.summary["seconds"],
        "privacy": _summarize_privacy(run.summary["privacy"]),
        "model_sha256": run.summary["model_sha256"],
        "curve": [list(point) for point in list_spending(run)],
    }


def _shows_raw_data(method: str, run: Run) -> bool:
    """Whether raw data leaves clients by design, or the run used an oracle trained on it."""
    shares = method in METHODS and METHODS[method].shares_raw_data
    return shares or any("oracle" in row for row in run.records)


def _sum_by_kind(part: Mapping[str, Any]) -> dict[str, Any]:
    """Tensor bytes by kind, direction and source, of the kinds that have any."""
    found = {}
    for kind in FILLS:
        sides = {
            direction: {
                "measured": part["method"][direction]["by_kind"].get(kind, {"tensor": 0})["tensor"],
                "predicted": part["predicted"]["by_kind"][direction].get(kind, 0),
            }
            for direction in DIRECTIONS
        }
        if any(value for side in sides.values() for value in side.values()):
            found[kind] = sides
    return found


def _summarize_privacy(privacy: Mapping[str, Any]) -> dict[str, Any]:
    return {name: privacy[name] for name in ("epsilon", "delta", "reason")} | {"text": describe_privacy(privacy)}


# The table


def format_comparison(document: Mapping[str, Any]) -> RenderableType:
    """The comparison for a terminal."""
    setting = document["setting"]
    setup = (
        f"{setting['clients_a_round']:,} of {pluralize(setting['num_clients'], 'client')} a round, "
        f"{pluralize(setting['num_rounds'], 'round')}, seed {setting['seed']}"
    )
    agree = document["same"]["cohorts"]["agree"]
    pieces: list[RenderableType] = [
        Text(f"\n{make_title(document)}, {setting['partition']}", style="bold"),
        Text(setup, style="bold"),
        Text(describe_sameness(document), style="dim" if agree else "bold yellow"),
        Text(f"{describe_overhead(document)}; best: picked on the test set\n", style="dim"),
    ]
    for table in (_tabulate_outcome(document), _tabulate_kinds(document), _tabulate_sharing(document)):
        pieces += [table, Text()]
    if list_guarantees(document):
        pieces += [_format_guarantees(document), Text()]
    if document["failed"]:
        pieces += [_tabulate_failures(document["failed"]), Text()]
    return Group(*pieces)


def _make_table(*columns: str, words: int = 1) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        number = place >= words
        table.add_column(name, justify="right" if number else "left", no_wrap=number or place == 0, vertical="top")
    return table


def _tabulate_outcome(document: Mapping[str, Any]) -> Table:
    accuracies = ("\naccuracy\n%, last", "\nmean of\nlast ten", "best,\ntest-\nselected")
    table = _make_table("\n\nmethod", *accuracies, "\n\nmessages", "\n\nkernel", "\nover-\nhead", "\n\nseconds")
    means = [entry["accuracy"]["last10"] for entry in document["methods"] if entry["accuracy"]]
    for entry in document["methods"]:
        top = len(means) > 1 and entry["accuracy"] and entry["accuracy"]["last10"] == max(means)
        table.add_row(
            _style_name(entry),
            format_accuracy(entry, "last"),
            Text(format_accuracy(entry, "last10"), style="bold green" if top else ""),
            format_accuracy(entry, "best"),
            format_size(entry["bytes"]["message"]),
            format_kernel_bytes(entry),
            format_overhead(entry),
            f"{entry['seconds']:,.1f}" if entry["seconds"] < 1000 else f"{entry['seconds']:,.0f}",
        )
    return table


def _style_name(entry: Mapping[str, Any]) -> Text:
    if not entry["raw_data"]:
        return Text(entry["method"], style="bold cyan")
    return Text.assemble((entry["method"], "bold red"), "\n", (RAW, "bold white on red"))


def _tabulate_kinds(document: Mapping[str, Any]) -> Table:
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
    return table


def _tabulate_sharing(document: Mapping[str, Any]) -> Table:
    table = _make_table("\nmethod", "leaves a client besides\nweights and scalars", "\nprivacy", words=3)
    for entry in document["methods"]:
        leaves = Text(describe_sharing(entry))
        leaves.highlight_words([RAW], "bold white on red")
        table.add_row(_style_name(entry), leaves, Text(describe_guarantee(entry)))
    return table


def _format_guarantees(document: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for method, line in list_guarantees(document):
        table.add_row(Text(method, style="bold cyan"), Text(line))
    return table


def _tabulate_failures(failed: Iterable[Mapping[str, Any]]) -> Table:
    table = _make_table("failed", "why", words=2)
    for failure in failed:
        table.add_row(Text(failure["method"], style="bold red"), Text(failure["reason"]))
    return table
