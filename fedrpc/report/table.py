"""The tables at the end of a run: accuracy, what it cost on the wire by kind and layer, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fedrpc.report.formula import DIFFERS, describe_formula, list_differing
from fedrpc.report.words import (
    describe_code,
    describe_computing,
    describe_curve,
    describe_kinds,
    describe_privacy,
    describe_reported,
    format_cell,
    pluralize,
)


def format_size(num_bytes: float | None) -> str:
    """Bytes in decimal units: 1.23 MB."""
    if num_bytes is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 1000 or unit == "TB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    raise AssertionError("the last unit covers everything")


def format_size_tick(value: float) -> str:
    """Bytes for an axis, without needless digits."""
    number, unit = format_size(value).split(" ")
    return f"{float(number):g} {unit}"


def describe_stop(stopped: Mapping[str, Any], num_rounds: int) -> str:
    """When and why a budget ended a run before its last round."""
    spent, budget = format_size(stopped["message_bytes"]), format_size(stopped["byte_budget"])
    return f"after {pluralize(num_rounds, 'round')} with {spent} of messages, over the byte budget of {budget}"


def list_kinds(part: Mapping[str, Any]) -> list[str]:
    """The kinds that a method sent, or was predicted to send, from the bytes of a summary."""
    method, predicted = part["method"], part["predicted"]["by_kind"]
    sent = {kind for d in ("down", "up") for kind, sums in method[d]["by_kind"].items() if any(sums.values())}
    return sorted(sent | {kind for d in ("down", "up") for kind, value in predicted[d].items() if value})


def count_text_columns(entry: Mapping[str, Any]) -> int:
    """How many of the first columns of a method's own rows are text, at least one."""
    text = [all(isinstance(row[name], str) for row in entry["value"]) for name in entry["columns"]]
    return max(1, [*text, False].index(False))


def _tabulate_bytes(summary: dict[str, Any]) -> Table:
    part = summary["bytes"]
    table = Table(title="Bytes on the wire", title_justify="left", header_style="bold")
    for name in ("what", "down", "up"):
        table.add_column(name, justify="left" if name == "what" else "right")
    predicted = part["predicted"]["by_kind"]
    for kind in list_kinds(part):
        sums = [part["method"][d]["by_kind"].get(kind, {"tensor": 0, "message": 0}) for d in ("down", "up")]
        if any(s["tensor"] for s in sums) or any(predicted[d].get(kind) for d in ("down", "up")):
            table.add_row(f"{kind}: tensors", *(f"{s['tensor']:,}" for s in sums))
            wrong = kind in list_differing(summary)
            name = f"  predicted: {DIFFERS}" if wrong else "  predicted"
            sizes = (f"{predicted[d].get(kind, 0):,}" for d in ("down", "up"))
            table.add_row(name, *sizes, style="bold red" if wrong else "dim")
        table.add_row(f"{kind}: messages", *(f"{s['message']:,}" for s in sums))
    table.add_section()
    table.add_row("method, all messages", *(f"{part['method'][d]['message']:,}" for d in ("down", "up")))
    rest = [part["total"][d]["message"] - part["method"][d]["message"] for d in ("down", "up")]
    table.add_row("session, evaluation, retries", *(f"{value:,}" for value in rest))
    kernel = [part["total"][d]["kernel"] for d in ("down", "up")]
    counted = ("no wire" if size is None else f"{size:,}" for size in kernel)
    table.add_row("kernel (TCP payload)", *counted, style="bold")
    return table


def list_time(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Where the time of a median round went: the heading, with a column for each phase, and a row for each part.

    There are no rows for a run from before time was measured.
    """
    time = summary.get("time", {"parts": {}, "by_phase": {}})
    phases, rows = time["by_phase"], []
    for part in time["parts"]:
        seconds = [found["median"][part] for found in phases.values()]
        if any(seconds):
            rows.append([part, *map(_format_seconds, seconds)])
    if rows:
        rows.append(["all", *(_format_seconds(found["median"]["seconds"]) for found in phases.values())])
    return ["seconds", *phases], rows


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds else "-"


def _tabulate_time(summary: Mapping[str, Any]) -> Iterator[Table]:
    head, rows = list_time(summary)
    if not rows:
        return
    table = Table(title="Where the time went, median round", title_justify="left", header_style="bold")
    for place, name in enumerate(head):
        table.add_column(Text(name), justify="right" if place else "left", overflow="fold")
    for row in rows[:-1]:
        table.add_row(*map(Text, row))
    table.add_section()
    table.add_row(*map(Text, rows[-1]), style="bold")
    yield table


def _describe_ledgers(check: Mapping[str, int]) -> str:
    one_sided = check["only_server"] + check["only_client"]
    whole = "agree where both have rows" if one_sided or check["missing"] else "agree to the byte"
    agree = f"DIFFER in {check['differing']} rows" if check["differing"] else whole
    more = f", {one_sided:,} on one side only" if one_sided else ""
    silent = f"; {pluralize(check['missing'], 'client')} did not answer" if check["missing"] else ""
    return f"server and {pluralize(check['clients'], 'client')} {agree} ({check['compared']} rows{more}){silent}"


def _list_facts(summary: dict[str, Any], num_evaluations: int) -> Table:
    part, accuracy = summary["bytes"], summary["accuracy"]
    message = sum(part["total"][d]["message"] for d in ("down", "up"))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    if accuracy:
        beside = describe_curve(accuracy, summary["num_rounds"], num_evaluations)
        facts.add_row("accuracy", f"{accuracy['global']:.2f} %; {beside}")
        if accuracy.get("class_variance") is not None:
            facts.add_row("class variance", f"{accuracy['class_variance']:.1f} %²")
        if accuracy.get("client_mean") is not None:
            clients = f"mean {accuracy['client_mean']:.2f} %, variance {accuracy['client_variance']:.1f} %²"
            facts.add_row("on clients' tests", f"{clients}, worst tenth {accuracy['worst_decile']:.2f} %")
        if (measured := accuracy.get("features")) and measured.get("davies_bouldin") is not None:
            correlation = f"distance correlation {measured['dcor']:.2f} (unrelated {measured['dcor_null']:.2f})"
            facts.add_row("features", f"Davies-Bouldin {measured['davies_bouldin']:.2f}; {correlation}")
    if summary.get("exposure"):
        reached = ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in summary["exposure"].items())
        facts.add_row("exposure", f"{reached} of all pairs of clients")
    overhead = part["overhead_vs_fedavg"]
    facts.add_row("overhead", f"{overhead:.3f} x FedAvg's tensor bytes" if overhead else "-")
    if summary.get("in_process"):
        facts.add_row("transport", part["kernel_note"])
    elif part["transport"] is None:
        facts.add_row("transport", f"not exact: {part['kernel_note']}")
    else:
        share = 100 * part["transport"] / message if message else 0.0
        facts.add_row("transport", f"{format_size(part['transport'])} of HTTP/2 over the messages ({share:.3f} %)")
    facts.add_row("ledgers", _describe_ledgers(summary["ledger_check"]))
    if formula := describe_formula(summary):
        facts.add_row("formula", Text(formula, style="bold red" if list_differing(summary) else ""))
    if summary.get("stopped"):
        facts.add_row("stopped", describe_stop(summary["stopped"], summary["num_rounds"]))
    if summary.get("unanswered"):
        facts.add_row("answers", Text(summary["unanswered"], style="bold red"))
    if summary.get("code"):
        facts.add_row("own code", Text(describe_code(summary)))
    if summary.get("caveat"):
        facts.add_row("caveat", summary["caveat"])
    for entry in summary.get("reported", {}).values():
        if not entry.get("columns"):
            facts.add_row(Text(entry["words"]), Text(describe_reported(entry)))
    facts.add_row("privacy", Text(describe_privacy(summary["privacy"])))
    for what, line in describe_kinds(summary["privacy"]).items():
        facts.add_row("", Text(f"{what}: {line}"))
    facts.add_row("time", f"{summary['seconds']:.1f} s")
    if computing := describe_computing(summary):
        facts.add_row("computed", Text(computing))
    facts.add_row("network", summary["model"])
    facts.add_row("model", summary["model_sha256"][:16])
    return facts


def _tabulate_reported(summary: dict[str, Any]) -> Iterator[Table]:
    """The method's own values that have rows, each as a table with its explanation."""
    for entry in summary.get("reported", {}).values():
        if not (columns := entry.get("columns")):
            continue
        table = Table(title=Text(entry["words"].capitalize()), title_justify="left", header_style="bold")
        table.caption, table.caption_justify, table.caption_style = Text(describe_reported(entry)), "left", ""
        rows = [[format_cell(row[name]) for name in columns] for row in entry["value"]]
        for place, heading in enumerate(columns.values()):
            # On a narrow terminal headings and words wrap first: a number that is cut off would be misread.
            longest = max((len(row[place]) for row in rows), default=0)
            whole = len(heading) <= max(longest, 8) and not any(" " in row[place] for row in rows)
            table.add_column(Text(heading), vertical="bottom", no_wrap=whole, overflow="fold")
            table.columns[place].justify = "left" if place < count_text_columns(entry) else "right"
        for row in rows:
            table.add_row(*map(Text, row))
        yield table


def print_summary(summary: dict[str, Any], console: Console, num_evaluations: int = 0) -> None:
    """Prints a finished run.

    Args:
        num_evaluations: Of its curve: from ten on, the mean of the last ten is told.
    """
    layers = [name for name in summary.get("aggregators", []) if name != "mean"]
    title = Text(
        f"{' + '.join([summary['method'], *layers])} on {summary['dataset']}, {summary['partition']}, "
        f"{summary['num_clients']} clients, "
        f"{summary['num_rounds']} rounds, seed {summary['seed']}",
        style="bold",
    )
    tables = (_tabulate_bytes(summary), *_tabulate_time(summary), *_tabulate_reported(summary))
    console.print(Group(Text(), title, *tables, _list_facts(summary, num_evaluations)))
