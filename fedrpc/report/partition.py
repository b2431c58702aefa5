"""Shows a partition: a table, its summary in words, and a picture on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedrpc.data.datasets import load
from fedrpc.data.partition_summary import summarize_partition
from fedrpc.data.validation import hold_out, partition_rest
from fedrpc.errors import ConfigError
from fedrpc.files import explain_unwritable
from fedrpc.report.plots_partition import plot_counts, plot_shares
from fedrpc.report.png import write_png
from fedrpc.report.words import describe_partition

MAX_ROWS, MAX_COLUMNS = 20, 12


def show_partition(
    dataset: str,
    partition: str,
    clients: int,
    seed: int,
    train_size: int | None,
    validation: float | None,
    data_dir: Path | None,
    png: Path | None,
    console: Console,
) -> None:
    """Prints the partition that a run with these settings has, and plots it to `png` if given."""
    if png is not None and png.suffix.lower() != ".png":
        raise ConfigError(f"--png: expected a name that ends in .png, got '{png}'")
    data = load(dataset, data_dir)
    y, group = data.train.y, data.train.group
    held = hold_out(y, group, validation, seed) if validation else None
    parts = partition_rest(partition, y, clients, seed, group=group, train_size=train_size, held=held)
    summary = summarize_partition(parts, y, data.num_classes)
    for piece in _fit_table(summary, data.classes, console):
        console.print(piece)
    told = describe_partition(summary) + ([f"{len(held):,} more are held out, to test on."] if held is not None else [])
    console.print(Text("\n".join(told)))
    if png is not None:
        with explain_unwritable(png):
            png.parent.mkdir(parents=True, exist_ok=True)
            write_partition_png(summary, data.classes, png, f"{dataset}, {partition}, {clients} clients")
        console.print(Text(f"picture: {png}"), soft_wrap=True)


def write_partition_png(summary: Mapping[str, Any], classes: Sequence[str], path: Path, title: str) -> None:
    """Writes the plots that a run's page has of its partition as one picture."""
    sizes = summary["sizes"]
    dropped = f", {summary['dropped']:,} dropped" if summary["dropped"] else ""
    subtitle = (
        f"{summary['spec']}   {summary['num_clients']} clients, {summary['num_samples']:,} samples{dropped}   "
        f"sizes {sizes['min']} to {sizes['max']}, median {sizes['median']:g}   "
        f"class variance {summary['class_variance']['mean']:.4f}   "
        f"distance to pooled {summary['emd']['mean']:.3f}   sha256 {summary['sha256'][:12]}"
    )
    counts = summary["n_kc"]
    write_png([plot_counts(counts, classes), plot_shares(counts, classes)], path, title, subtitle)


def _fit_table(summary: Mapping[str, Any], classes: Sequence[str], console: Console) -> list[RenderableType]:
    """The table with the classes' names, or with their numbers and a key where the names would not fit."""
    wide = console.options.update(max_width=10_000)
    named = tabulate_partition(summary, classes)
    if Measurement.get(console, wide, named).maximum <= console.width:
        return [named]
    shown = [f"{number} {name}" for number, name in enumerate(classes)][:MAX_COLUMNS]
    more = f", {len(classes) - len(shown)} more" if len(classes) > len(shown) else ""
    return [tabulate_partition(summary), Text(f"Classes: {', '.join(shown)}{more}.")]


def tabulate_partition(summary: Mapping[str, Any], classes: Sequence[str] | None = None) -> Table:
    """Samples of each client by class, for a terminal; long and wide tables are cut, and say so."""
    counts = np.array(summary["n_kc"])
    num_clients, num_classes = counts.shape
    shown = num_classes if num_classes <= MAX_COLUMNS else MAX_COLUMNS - 2
    names = list(classes) if classes is not None else [str(c) for c in range(num_classes)]
    table = Table(title=f"{summary['spec']}, {num_clients} clients", header_style="bold")
    table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)  # so that a dozen columns of numbers fit in 80
    table.add_column("client", justify="right")
    for name in names[:shown]:
        table.add_column(name, justify="right", overflow="fold")
    if shown < num_classes:
        table.add_column(f"{num_classes - shown} more", justify="right")
    table.add_column("all", justify="right", style="bold")
    table.add_column("classes", justify="right")
    for client, row in enumerate(counts[:MAX_ROWS]):
        table.add_row(str(client), *_format_counts(row, shown), str(row.sum()), str((row > 0).sum()))
    if num_clients > MAX_ROWS:
        table.add_row(f"... {num_clients - MAX_ROWS} more")
    table.add_section()
    total = counts.sum(axis=0)
    table.add_row("all", *_format_counts(total, shown), str(total.sum()), str((total > 0).sum()), style="bold")
    return table


def _format_counts(row: np.ndarray, shown: int) -> list[str]:
    cells = [str(count) if count else "·" for count in row[:shown]]
    return [*cells, str(row[shown:].sum())] if shown < len(row) else cells
