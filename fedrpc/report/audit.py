"""Shows an audit of a finished run's privacy: a table, what is wrong, and audit.json."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedrpc.report.sheet import write_text
from fedrpc.report.words import describe_kinds, describe_privacy, pluralize
from fedrpc.study.audit import Audit

_MAX_FAULTS = 40  # that are printed


def show_audit(folder: Path, audit: Audit, console: Console) -> None:
    """Prints an audit and writes audit.json into the run directory."""
    console.print(_table(folder, audit))
    privacy = json.loads((folder / "summary.json").read_text())["privacy"]
    run = {"the run": describe_privacy(privacy)} if privacy["epsilon"] is not None else {}
    for what, line in (run | describe_kinds(privacy)).items():
        console.print(Text(f"{what}: {line}"), soft_wrap=True)
    for fault in audit.faults[:_MAX_FAULTS]:
        console.print(Text("wrong ", style="red") + Text(fault), soft_wrap=True)
    if len(audit.faults) > _MAX_FAULTS:
        console.print(f"... and {len(audit.faults) - _MAX_FAULTS:,} more, all in audit.json", highlight=False)
    for note in audit.notes:
        console.print(Text("not checked ", style="yellow") + Text(note), soft_wrap=True)
    console.print(describe_verdict(audit), highlight=False, soft_wrap=True)
    write_audit(folder, audit)


def write_audit(folder: Path, audit: Audit) -> None:
    """Writes audit.json into the run directory."""
    write_text(folder / "audit.json", _to_json(audit))


def describe_verdict(audit: Audit) -> str:
    """What an audit came to, in one line."""
    about = f"{audit.num_rows:,} releases of {pluralize(len(audit.heads), 'client')}"
    if audit.faults:
        more = f"; and {len(audit.faults) - 1:,} more" if len(audit.faults) > 1 else ""
        return f"{about}: {pluralize(len(audit.faults), 'fault')}: {audit.faults[0]}{more}"
    signed = "every chain is whole and signed, and claims what its answers cost"
    checked, limits = ("every chain is whole", ", as far as they were checked") if audit.notes else (signed, "")
    promised = any(line.reported is not None for line in audit.lines)
    accounts = f"the accountants agree{limits}" if promised else "no epsilon is claimed"
    return f"{about}: {checked}; all that went up has its row; {accounts}"


def _table(folder: Path, audit: Audit) -> Table:
    table = Table(title=f"Privacy of {folder}", title_justify="left", header_style="bold")
    for name in ("what", "reported", "again", "dp-accounting", "tight", "from facts", "what is promised"):
        table.add_column(name, justify="left" if name.startswith("what") else "right")
    for line in audit.lines:
        values = (line.reported, line.again, line.second, line.tight, line.facts)
        promise = line.covers + (f" ({line.accountant})" if line.accountant else "")
        table.add_row(line.what, *("-" if value is None else f"{value:.4g}" for value in values), Text(promise))
    return table


def _to_json(audit: Audit) -> str:
    # With the heads kept elsewhere, one can see later whether the whole file was rewritten.
    heads = {client: {"rows": count, "head": head.hex()} for client, (count, head) in audit.heads.items()}
    lines = [vars(line) for line in audit.lines]
    found = {"rows": audit.num_rows, "faults": audit.faults, "notes": audit.notes, "lines": lines, "heads": heads}
    found |= {"keys": audit.keys}
    return json.dumps(found, indent=1) + "\n"
