"""The results of a paper's experiment on the terminal, and as results.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedrpc.report.paper_words import (
    Results,
    describe_difference,
    describe_reservations,
    describe_verdict,
    find_printed,
    list_cells,
    list_circumstances,
    list_heads,
    list_run,
)
from fedrpc.report.sheet import write_text
from fedrpc.report.words import pluralize
from fedrpc.study.experiment import NOT, PARTLY, REPRODUCED

RESULTS_FILE = "results.json"
_STYLES = {REPRODUCED: "green", PARTLY: "yellow", NOT: "red", None: "dim"}
_NUMBERS = re.compile(r"\[\s+((?:[-+\d.e]+|null)(?:,\s+(?:[-+\d.e]+|null))*)\s+\]")


def write_results(folder: Path, results: Results) -> None:
    """Writes the results of an experiment into the folder of its runs."""
    write_text(folder / RESULTS_FILE, format_results(results))


def format_results(results: Results) -> str:
    """The results as JSON to keep: a line for each value, and one for each curve."""
    text = json.dumps(results, indent=1, ensure_ascii=False)
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def show_results(results: Results, console: Console) -> None:
    """Prints the table and the verdicts."""
    console.print(Text(f"{results['title']} ({results['paper']}, {results['where']})", style="bold"), soft_wrap=True)
    for line in list_circumstances(results):
        console.print(line, highlight=False, soft_wrap=True)
    printed = find_printed(results)
    table = Table(header_style="bold")
    table.add_column("row")
    for head in list_heads(results["measures"], printed):
        table.add_column(head, justify="right")
    for row in list_run(results):
        table.add_row(row["name"], *list_cells(row, results["measures"], printed, len(results["seeds"])))
    console.print(table)
    judged = [claim for claim in results["claims"] if claim["difference"] is not None or claim["left_out"]]
    for claim in judged:
        words = Text(f"{describe_verdict(claim)}: ", style=_STYLES[claim["verdict"]])
        told = f"{claim['says']} ({describe_difference(claim)})"
        console.print(words + Text("; ".join([told, *describe_reservations(claim)])), soft_wrap=True)
    if idle := len(results["claims"]) - len(judged):
        console.print(f"without runs: {pluralize(idle, 'claim')}", style="dim", highlight=False)
