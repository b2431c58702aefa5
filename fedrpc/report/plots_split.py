"""How the data was split, as figures: samples of each client by class, and class shares as a heat map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedrpc.report.markup import Figure
from fedrpc.report.plots_learning import MAX_BARS
from fedrpc.report.svg import WIDE, Axis, Plot, colour
from fedrpc.study.reading import Run

MAX_COLOURS = 20  # more classes than this can not be told apart by colour


def _left(names: Sequence[str]) -> int:
    """Room for the names of classes; the same for both figures, so that a client is in one place."""
    return 20 + max(28, 6 * min(14, max(map(len, names))))


def _clients_axis(count: int) -> Axis:
    step = 1 if count <= 50 else -(-count // 20)
    return Axis(0, count, [place + 0.5 for place in range(0, count, step)], "client", lambda tick: str(int(tick)))


def bars(run: Run) -> Figure:
    """Stacked bars; with very many classes only the sizes."""
    counts, names = np.array(run.card["n_kc"]), run.classes
    num_clients, num_classes = counts.shape
    if num_classes > MAX_COLOURS:
        counts, names = counts.sum(axis=1, keepdims=True), ["all classes"]
    top = float(counts.sum(axis=1).max())
    y = Axis.over([top], "", zero=True)
    plot = Plot(
        _clients_axis(num_clients),
        y,
        "samples of each client by class",
        width=WIDE,
        height=250,
        left=_left(run.classes),
    )
    below = np.zeros(num_clients)
    legend = []
    for index, name in enumerate(names):
        style = colour(index, len(names))
        above = below + counts[:, index]
        if num_clients > MAX_BARS:
            plot.stairs(below.tolist(), above.tolist(), style)
        else:
            for client in np.flatnonzero(counts[:, index]):
                words = f"client {client}, class {name}: {counts[client, index]:,} samples"
                plot.block(client + 0.07, client + 0.93, below[client], above[client], style, words)
        below = above
        legend.append((style, name if name == "all classes" or not name.isdigit() else f"class {name}"))
    return Figure("Samples of each client", plot.svg(), "", legend, wide=True)


def heat(run: Run) -> Figure:
    """Class shares of each client."""
    counts, names = np.array(run.card["n_kc"]), run.classes
    num_clients, num_classes = counts.shape
    shares = (counts / np.maximum(1, counts.sum(axis=1, keepdims=True))).T
    # With many classes one client of a single class would leave all others pale.
    top = max(float(np.quantile(shares, 0.998 if num_classes > 20 else 1.0)), 1.5 / num_classes)
    height = 46 + min(560, max(90, 22 * num_classes))
    plot = Plot(
        _clients_axis(num_clients),
        Axis(num_classes, 0, ()),
        "class shares",
        width=WIDE,
        height=height,
        left=_left(run.classes),
    )
    plot.picture(shares / top)
    step = -(-num_classes // 25)
    for index in range(0, num_classes, step):
        name = names[index] if len(names[index]) <= 14 else names[index][:13] + "…"
        plot.write(_left(names) - 7, plot.y(index + 0.5) + 4, name, "end", "tick")
    if num_clients <= 25 and num_classes <= 20:
        for client, index in np.argwhere(counts):
            style = "cell full" if shares[index, client] > 0.85 * top else "cell"
            plot.write(plot.x(client + 0.5), plot.y(index + 0.5) + 4, f"{counts[client, index]:,}", "middle", style)
    full = 100 * min(top, 1.0)
    caption = f"Class (down) by client (across); full colour is {full:.0f} % of the client's samples."
    return Figure("Class shares", plot.svg(grid=False), caption, wide=True)
