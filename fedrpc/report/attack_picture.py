"""Draws originals beside their reconstructions from shared items: images as images, signals as lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from fedrpc.study.attacks.rebuilding import Rebuilt

MAX_CHANNELS = 6  # of a signal


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether an input of this shape is shown as an image; long and narrow ones are signals."""
    return len(shape) == 3 and min(shape[1:]) >= 8


def to_pixels(image: Tensor, low: float, high: float) -> np.ndarray:
    """An image of any number of channels as bytes (rows, columns, 3): three are colours, else the first is grey."""
    shades = ((image.double() - low) / (high - low or 1.0)).clamp(0, 1)
    chosen = shades[:3] if len(shades) == 3 else shades[:1].expand(3, -1, -1)
    return (chosen.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)


def find_bounds(rebuilt: Rebuilt) -> tuple[float, float]:
    """Black and white: the least and the largest value of the originals, or 0 and 1 where these are the bounds."""
    original = rebuilt.shown["original"]
    low, high = float(original.min()), float(original.max())
    return (0.0, 1.0) if rebuilt.data_range == 1.0 and low >= 0 and high <= 1 else (low, high)


def to_lines(sample: Tensor) -> np.ndarray:
    """A signal, or any other input that is not an image, as rows of values: one line a channel."""
    flat = sample.double().reshape(1, -1) if sample.dim() < 2 else sample.double()
    if flat.dim() == 3:  # such as (1, time, axes): the longest axis is time
        flat = flat.movedim(1 + int(np.argmax(flat.shape[1:])), -1).reshape(-1, max(flat.shape[1:]))
    return flat[:MAX_CHANNELS].numpy()


def write_picture(rebuilt: Rebuilt, path: Path, title: str) -> None:
    """Writes the PNG."""
    from matplotlib.figure import Figure  # slow to import, and only this needs it

    columns = list(rebuilt.shown)
    count = len(rebuilt.shown["original"])
    image = is_image(tuple(rebuilt.shown["original"].shape[1:]))
    size = (1.7 * len(columns), 1.7 * count + 0.6) if image else (4.2 * len(columns), 1.3 * count + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=9)
    grid = figure.subplots(count, len(columns), squeeze=False, sharey=not image)
    low, high = find_bounds(rebuilt)
    for row, axes_of_row in enumerate(grid):
        for axes, name in zip(axes_of_row, columns, strict=True):
            sample = rebuilt.shown[name][row]
            if image:
                axes.imshow(to_pixels(sample, low, high), interpolation="nearest")
                axes.set_axis_off()
            else:
                axes.plot(to_lines(sample).T, linewidth=0.9)
                axes.tick_params(labelsize=6)
            words = name if row == 0 else ""
            if name in rebuilt.shown_mse:
                words = f"{words}\nMSE {rebuilt.shown_mse[name][row]:.3g}".strip()
            axes.set_title(words, fontsize=8)
    figure.savefig(path, dpi=110, format="png")
