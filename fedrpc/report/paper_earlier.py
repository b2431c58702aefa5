"""The page of results with one seed that were measured before `fedrpc paper`: tables without verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedrpc.report.paper_words import NONE
from fedrpc.report.words import write_markdown_row

EARLIER = "earlier"
_HEAD = """\
# Earlier runs with one seed

Measured before there was `fedrpc paper`, with one seed each: differences of a point or two mean nothing, and no claim
is judged by them. Where an experiment of [the report](../README.md) has the same methods, its verdict counts; these
stay for the others. `python -m fedrpc.report.paper docs/results` makes this page, too.
"""
_COLUMNS = {  # heading: where it is in a run
    "rounds": ("rounds",),
    "last ten rounds": ("accuracy", "last10"),
    "best round": ("accuracy", "best"),
    "last round": ("accuracy", "global"),
    "rounds 21 to 30": ("accuracy_after_rounds", "mean of 21 to 30"),
    "class variance, last ten": ("last_ten_rounds", "class_variance_mean_of_10"),
    "tensor bytes over FedAvg's": ("overhead_vs_fedavg",),
}


def write_earlier(folder: Path) -> str:
    """The page; empty without such results."""
    found = {path.stem: json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))}
    tables = [line for name, results in found.items() for line in _write_table(name, results)]
    return "\n".join([_HEAD, *tables]) if found else ""


def _write_table(name: str, results: Mapping[str, Any]) -> list[str]:
    setting, runs = results["setting"], results["runs"]
    what = f"{setting['dataset']}, {setting['partition']}, {setting['model']}, {setting['num_clients']} clients"
    columns = [path for path in _COLUMNS.values() if any(_look_up(run, path) is not None for run in runs.values())]
    heads = [f"paper ({results['paper_of']})", *(head for head, path in _COLUMNS.items() if path in columns)]
    lines = [f"## {name}", "", f"{results['title']} ({what}, seed {setting['seed']}).", ""]
    lines += [write_markdown_row("", *heads), f"|---|{'---:|' * len(heads)}"]
    for label, run in runs.items():
        values = [results["paper"].get(label), *(_look_up(run, path) for path in columns)]
        lines.append(write_markdown_row(label, *map(_format, values)))
    untested = [f"an untested explanation: {why}" for why in results.get("explanations", [])]
    notes = [f"- {note}" for note in [*results["notes"], *untested]]
    return [*lines, "", *notes, "", f"Made by `{results['command']}`.", ""]


def _look_up(run: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = run
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


def _format(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"
