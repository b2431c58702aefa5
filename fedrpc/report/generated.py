"""Shows the images of a run's own generator: what is known of them, generated.json, and contact sheets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedrpc.report.sheet import MAX_COLUMNS, write_sheet, write_text
from fedrpc.study.generated import Generated


def show_generated(found: Generated, console: Console) -> None:
    """Prints what is known of the images, and writes generated.json, generated.png and progress.png."""
    console.print(_table(found.values))
    folder, bounds, title = found.run.folder, found.bounds, found.run.title
    written = [write_text(folder / "generated.json", json.dumps(found.values, indent=1) + "\n")]
    written.append(
        write_sheet(_arrange_rows(found), bounds, folder / "generated.png", f"Generated and nearest real: {title}")
    )
    if found.progress:
        heading = f"The generator as it learned: {title}"
        written.append(write_sheet(found.progress, bounds, folder / "progress.png", heading))
    console.print(Text("\n".join(f"written: {path}" for path in written)), soft_wrap=True)


def _arrange_rows(found: Generated) -> dict[str, Tensor]:
    """Each row of samples above the training images nearest to them, then real images."""
    rows: dict[str, Tensor] = {}
    for name, images in found.samples.items():
        rows |= {name: images, f"nearest to {name}": found.nearest[name]}
    rows |= found.real
    columns = min(MAX_COLUMNS, *(len(images) for images in rows.values()))
    return {name: images[:columns] for name, images in rows.items()}


def _table(values: Mapping[str, Any]) -> Table:
    near, labels = values["neighbours"], values["labels"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    if values["caveat"]:
        table.add_row("caveat", values["caveat"])
    table.add_row(
        "nearest real",
        f"generated {near['generated_median']:.3f} in the median, {near['generated_least']:.3f} at least; "
        f"test images {near['test_median']:.3f} and {near['test_least']:.3f}",
    )
    nearer = f"{near['nearer_than_any_test_image']} of {near['num_generated']}"
    table.add_row("copies?", f"{nearer} are nearer to a training image than any test image is")
    if labels:
        agrees = f"an oracle agrees with {labels['oracle_agrees']:.1f} % of {labels['num_given']:,} labels"
        table.add_row("labels", f"{agrees} (right on {labels['oracle_on_test']:.1f} % of test images)")
    return table
