"""The results of a paper's experiment on the terminal, and as results.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedrpc.report.paper_words import (
    Results,
    describe_outcome,
    describe_reservations,
    describe_verdict,
    find_printed,
    is_tuning,
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
_GAP = 2  # letters between two columns
_NUMBERS = re.compile(r"\[\s+((?:[-+\d.e]+|null)(?:,\s+(?:[-+\d.e]+|null))*)\s+\]")


def write_results(folder: Path, results: Results) -> None:
    """Writes the results of an experiment into the folder of its runs."""
    write_text(folder / RESULTS_FILE, format_results(results))


def format_results(results: Results) -> str:
    """The results as JSON to keep: a line for each value, and one for each curve."""
    text = json.dumps(results, indent=1, ensure_ascii=False)
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _split_table(results: Results, width: int) -> Iterator[Table]:
    """The table, as several with some measures each where it would be wider than that."""
    left = list(results["measures"])
    while left:
        for count in range(len(left), 0, -1):
            columns = _list_columns(results, left[:count])
            if sum(size + _GAP for size, *_ in columns) - _GAP <= width:
                break
        left = left[count:]
        yield _build_table(columns)


def _list_columns(results: Results, measures: Sequence[str]) -> list[tuple[int, str, list[str]]]:
    """Width, head and cells of each column: a head may have several lines, a cell has one."""
    printed = [name for name in find_printed(results) if name in measures]
    rows = [(row["name"], *list_cells(row, measures, printed, len(results["seeds"]))) for row in list_run(results)]
    columns = zip(("row", *list_heads(measures, printed)), *rows, strict=True)
    return [(max(map(len, [*head.split(), *cells])), head, cells) for head, *cells in columns]


def _build_table(columns: Sequence[tuple[int, str, list[str]]]) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for number, (size, head, _) in enumerate(columns):
        table.add_column(head, justify="right" if number else "left", width=size, vertical="bottom")
    for row in zip(*(cells for *_, cells in columns), strict=True):
        table.add_row(*row)
    return table


def show_results(results: Results, console: Console) -> None:
    """Prints the table and the verdicts."""
    console.print(Text(f"{results['title']} ({results['paper']}, {results['where']})", style="bold"), soft_wrap=True)
    for line in list_circumstances(results):
        console.print(line, highlight=False, soft_wrap=True)
    for table in _split_table(results, console.width):
        console.print()
        console.print(table)
    console.print()
    if is_tuning(results):
        told = "no verdict: tested on training examples that were held out, to choose settings"
        console.print(told, style="dim", highlight=False)
        return
    judged = [claim for claim in results["claims"] if claim["difference"] is not None or claim["left_out"]]
    for claim in judged:
        words = Text(f"{describe_verdict(claim)}: ", style=_STYLES[claim["verdict"]])
        told = "; ".join([describe_outcome(results, claim), *describe_reservations(claim)])
        console.print(words + Text(told), soft_wrap=True)
    if idle := len(results["claims"]) - len(judged):
        console.print(f"without runs: {pluralize(idle, 'claim')}", style="dim", highlight=False)
