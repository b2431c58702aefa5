"""Shows a partition card to people: a picture of clients by classes, and a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from fedrpc.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

MAX_ROWS, MAX_COLUMNS = 20, 12
INK, FAINT = "#22303c", "#8795a1"


def draw(card: dict[str, Any], path: Path, title: str, classes: Sequence[str] | None = None) -> None:
    """Writes a PNG: above, how many samples each client holds, by class; below, the class shares as a heat map.

    Args:
        card: What `partition_card.card` gave.
        path: Where the picture goes.
        title: Its heading.
        classes: Names of the classes; their numbers by default.
    """
    try:  # slow to import, and only needed here
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing needs matplotlib, which is not installed: pip install matplotlib") from None
    counts = np.array(card["n_kc"])
    num_clients, num_classes = counts.shape
    names = list(classes) if classes is not None else [str(c) for c in range(num_classes)]
    height = 3.2 + min(6.0, max(1.6, 0.24 * num_classes))
    figure = Figure(figsize=(min(14.0, max(8.5, 5.0 + 0.06 * num_clients)), height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        2, 2, height_ratios=(2.0, height - 3.2), width_ratios=(1, 0.018), hspace=0.14, wspace=0.03
    )
    bars, heat = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    colours = _colours(num_classes)
    _bars(bars, counts, names, colours)
    image = _heat(heat, counts, names)
    scale = figure.colorbar(image, cax=figure.add_subplot(grid[1, 1]))
    scale.set_label("share of the client's samples", color=INK, fontsize=8)
    scale.ax.tick_params(labelsize=7, colors=INK, length=2)
    scale.outline.set_visible(False)
    bars.set_title(title, loc="left", fontsize=12, color=INK, pad=24, fontweight="bold")
    bars.text(0, 1.04, caption(card), transform=bars.transAxes, fontsize=7, color=FAINT)
    figure.savefig(path, bbox_inches="tight", metadata={"Software": None})


def caption(card: dict[str, Any]) -> str:
    """The card in one line."""
    sizes = card["sizes"]
    rest = f", {card['dropped']:,} dropped" if card["dropped"] else ""
    return (
        f"{card['spec']}   {card['num_clients']} clients, {card['num_samples']:,} samples{rest}   "
        f"sizes {sizes['min']} to {sizes['max']}, median {sizes['median']:g}   "
        f"class variance {card['class_variance']['mean']:.4f}   distance to pooled {card['emd']['mean']:.3f}   "
        f"sha256 {card['sha256'][:12]}"
    )


def _colours(num_classes: int) -> np.ndarray:
    """One colour a class: distinct ones up to twenty, else a walk through the colour wheel."""
    from matplotlib import colormaps

    wheel: Colormap = colormaps["tab10" if num_classes <= 10 else "tab20" if num_classes <= 20 else "turbo"]
    return np.asarray(wheel(np.arange(num_classes) if num_classes <= 20 else np.linspace(0.02, 0.98, num_classes)))


def _bars(axes: Axes, counts: np.ndarray, names: Sequence[str], colours: np.ndarray) -> None:
    """Stacked bars; without gaps, as one shape a class, where there are so many that single bars would be slow."""
    num_clients, num_classes = counts.shape
    below = np.zeros(num_clients)
    if num_clients <= 60 and num_classes <= 20:
        for column in range(num_classes):
            axes.bar(np.arange(num_clients), counts[:, column], 0.86, below, color=colours[column], label=names[column])
            below += counts[:, column]
    else:
        edges = np.arange(num_clients + 1) - 0.5
        for column in range(num_classes):
            above = below + counts[:, column]
            axes.stairs(above, edges, baseline=below, fill=True, color=colours[column], label=names[column], lw=0)
            below = above
    axes.set_xlim(-0.5, num_clients - 0.5)
    axes.set_ylim(0, counts.sum(axis=1).max() * 1.03)
    axes.set_ylabel("samples", fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK, labelbottom=False, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    if num_classes <= 20:
        axes.legend(
            loc="upper left", bbox_to_anchor=(1.005, 1.02), fontsize=7, frameon=False, labelcolor=INK, reverse=True
        )


def _heat(axes: Axes, counts: np.ndarray, names: Sequence[str]) -> Any:
    num_clients, num_classes = counts.shape
    shares = (counts / counts.sum(axis=1, keepdims=True)).T
    # With many classes one client of a single class would leave all others pale.
    top = max(float(np.quantile(shares, 0.998 if num_classes > 20 else 1.0)), 1.5 / num_classes)
    image = axes.imshow(shares, aspect="auto", cmap="Blues", vmin=0, vmax=top, interpolation="nearest")
    step = max(1, -(-num_classes // 25))
    axes.set_yticks(range(0, num_classes, step), [names[c] for c in range(0, num_classes, step)])
    axes.set_xlabel("client", fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=2)
    axes.tick_params(axis="y", labelsize=7)
    if num_clients <= 30:
        axes.set_xticks(range(num_clients))
    if num_clients <= 20 and num_classes <= 20:
        for client, column in np.argwhere(counts):
            dark = shares[column, client] > 0.6 * top
            text = str(counts[client, column])
            axes.text(client, column, text, ha="center", va="center", fontsize=6, color="white" if dark else INK)
    axes.spines[:].set_visible(False)
    return image


def table(card: dict[str, Any], classes: Sequence[str] | None = None) -> Table:
    """Samples of each client by class, for a terminal; long and wide tables are cut, and say so."""
    counts = np.array(card["n_kc"])
    num_clients, num_classes = counts.shape
    shown = num_classes if num_classes <= MAX_COLUMNS else MAX_COLUMNS - 2
    names = list(classes) if classes is not None else [str(c) for c in range(num_classes)]
    made = Table(title=f"{card['spec']}, {num_clients} clients", caption=caption(card), header_style="bold")
    made.add_column("client", justify="right")
    for name in names[:shown]:
        made.add_column(name, justify="right", overflow="fold")
    if shown < num_classes:
        made.add_column(f"{num_classes - shown} more", justify="right")
    made.add_column("all", justify="right", style="bold")
    made.add_column("classes", justify="right")
    for client, row in enumerate(counts[:MAX_ROWS]):
        made.add_row(str(client), *_cells(row, shown), str(row.sum()), str((row > 0).sum()))
    if num_clients > MAX_ROWS:
        made.add_row(f"... {num_clients - MAX_ROWS} more")
    made.add_section()
    total = counts.sum(axis=0)
    made.add_row("all", *_cells(total, shown), str(total.sum()), str((total > 0).sum()), style="bold")
    return made


def _cells(row: np.ndarray, shown: int) -> list[str]:
    cells = [str(count) if count else "·" for count in row[:shown]]
    return [*cells, str(row[shown:].sum())] if shown < len(row) else cells
