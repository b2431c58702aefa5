"""Shows inputs made from a run's model: a table of their evaluations, synthetic.json and the sheet synthetic.png."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedrpc.report.generated import show_generated
from fedrpc.report.sheet import MAX_COLUMNS, write_sheet, write_text
from fedrpc.study.generated import Generated
from fedrpc.study.synthetic import Synthetic


def show_synthetic(found: Synthetic | Generated, console: Console) -> None:
    """Prints the evaluations, writes synthetic.json and synthetic.png, and says where they are."""
    if isinstance(found, Generated):
        show_generated(found, console)
        return
    console.print(_table(found))
    folder = found.run.folder
    written = [write_text(folder / "synthetic.json", json.dumps(found.values, indent=1) + "\n")]
    if found.images is not None:
        rows = {name: images[:MAX_COLUMNS] for name, images in found.images.items()}
        title = f"Made from the final model: {found.run.title}"
        written.append(write_sheet(rows, found.bounds, folder / "synthetic.png", title))
    console.print(Text("\n".join(f"written: {path}" for path in written)), soft_wrap=True)


def _table(found: Synthetic) -> Table:
    table = Table(title="Made inputs, percent correct", title_justify="left", header_style="bold")
    table.add_column("class")
    for name in ("oracle: made", "model: real", "oracle: real", "model: made"):
        table.add_column(name, justify="right")
    values = found.evaluations
    columns = (values.oracle_on_made, values.model_on_real, values.oracle_on_real, values.model_on_made)
    for number, name in enumerate(found.classes):
        table.add_row(Text(name), *(_percent(column.recalls[number]) for column in columns))
    table.add_section()
    table.add_row("all", *(_percent(column.accuracy) for column in columns))
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
