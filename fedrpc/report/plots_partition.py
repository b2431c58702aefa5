"""Plots a partition: examples of each client by class, and class shares as a heat map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedrpc.report.markup import Plot
from fedrpc.report.plots_learning import MAX_BARS
from fedrpc.report.svg import WIDE, Axis, Canvas, pick_fill

MAX_COLOURS = 20  # more classes than this cannot be distinguished by colour
Counts = Sequence[Sequence[int]]  # examples by client and class


def _find_margin(names: Sequence[str]) -> int:
    """Pixels for the names of classes; the same for both plots, so that a client is in one place."""
    return 20 + max(28, 6 * min(14, max(map(len, names))))


def _make_clients_axis(count: int) -> Axis:
    step = 1 if count <= 50 else -(-count // 20)
    return Axis(0, count, [place + 0.5 for place in range(0, count, step)], "client", lambda tick: str(int(tick)))


def plot_counts(n_kc: Counts, classes: Sequence[str]) -> Plot:
    """Examples of each client, stacked by class; with very many classes only their sum."""
    counts, names = np.array(n_kc), classes
    num_clients, num_classes = counts.shape
    if num_classes > MAX_COLOURS:
        counts, names = counts.sum(axis=1, keepdims=True), ["all classes"]
    canvas = Canvas(
        _make_clients_axis(num_clients),
        Axis.over([float(counts.sum(axis=1).max())], "", zero=True),
        "samples of each client by class",
        width=WIDE,
        height=250,
        left=_find_margin(classes),
    )
    below = np.zeros(num_clients)
    legend = []
    for index, name in enumerate(names):
        style = pick_fill(index, len(names))
        above = below + counts[:, index]
        if num_clients > MAX_BARS:
            canvas.stairs(below.tolist(), above.tolist(), style)
        else:
            for client in np.flatnonzero(counts[:, index]):
                words = f"client {client}, class {name}: {counts[client, index]:,} samples"
                canvas.block(client + 0.07, client + 0.93, below[client], above[client], style, words)
        below = above
        legend.append((style, f"class {name}" if name.isdigit() else name))
    return Plot("Samples of each client", canvas.svg(), "", legend, wide=True)


def plot_shares(n_kc: Counts, classes: Sequence[str]) -> Plot:
    """Class shares of each client."""
    counts = np.array(n_kc)
    num_clients, num_classes = counts.shape
    shares = (counts / np.maximum(1, counts.sum(axis=1, keepdims=True))).T
    # With many classes one client of a single class would leave all others pale.
    top = max(float(np.quantile(shares, 0.998 if num_classes > 20 else 1.0)), 1.5 / num_classes)
    canvas = Canvas(
        _make_clients_axis(num_clients),
        Axis(num_classes, 0, ()),
        "class shares",
        width=WIDE,
        height=46 + min(560, max(90, 22 * num_classes)),
        left=_find_margin(classes),
    )
    canvas.heat_map(shares / top)
    step = -(-num_classes // 25)
    for index in range(0, num_classes, step):
        name = classes[index] if len(classes[index]) <= 14 else classes[index][:13] + "…"
        canvas.write(_find_margin(classes) - 7, canvas.y(index + 0.5) + 4, name, "end", "tick")
    if num_clients <= 25 and num_classes <= 20:
        for client, index in np.argwhere(counts):
            style = "cell full" if shares[index, client] > 0.85 * top else "cell"
            text = f"{counts[client, index]:,}"
            canvas.write(canvas.x(client + 0.5), canvas.y(index + 0.5) + 4, text, "middle", style)
    full = 100 * min(top, 1.0)
    caption = f"Class (down) by client (across); full colour is {full:.0f} % of the client's samples."
    return Plot("Class shares", canvas.svg(grid=False), caption, wide=True)
