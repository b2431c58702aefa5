"""Writes contact sheets: named rows of images as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedrpc.errors import ConfigError
from fedrpc.files import explain_unwritable, write_atomically

MAX_COLUMNS = 16
_INCHES = 0.5  # the width of an image


def make_contact_sheet(x: Tensor, bounds: tuple[Tensor, Tensor] | None, num_rows: int) -> np.ndarray:
    """Images as one picture in [0, 1] (height, width, 3), rows of equal length, with a pixel of white between images.

    Args:
        x: Images (count, channels, height, width), row after row; unless there are three channels, the first is shown.
        bounds: The values of black and white; by default the smallest and the largest value.
    """
    low, high = bounds if bounds else (x.min(), x.max())
    shown = ((x - low) / (high - low)).clamp(0, 1)
    shown = shown if shown.shape[1] == 3 else shown[:, :1].expand(-1, 3, -1, -1)
    framed = nn.functional.pad(shown, (0, 1, 0, 1), value=1.0)
    count, channels, height, width = framed.shape
    rows = framed.reshape(num_rows, count // num_rows, channels, height, width)
    return rows.permute(0, 3, 1, 4, 2).reshape(num_rows * height, -1, channels).numpy()


def write_sheet(rows: Mapping[str, Tensor], bounds: tuple[Tensor, Tensor] | None, path: Path, title: str) -> Path:
    """Writes a PNG of named rows of images, all of equal length."""
    try:  # slow to import, and only needed here
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a picture needs matplotlib, which is not installed: pip install matplotlib") from None
    sheet = make_contact_sheet(torch.cat(list(rows.values())), bounds, len(rows))
    columns = len(next(iter(rows.values())))
    inch = _INCHES * columns / sheet.shape[1]  # of a pixel
    figure = Figure(figsize=(inch * sheet.shape[1], inch * sheet.shape[0]), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(sheet, interpolation="nearest")
    height = sheet.shape[0] / len(rows)
    axes.set_yticks([(row + 0.5) * height for row in range(len(rows))], list(rows), fontsize=8)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    axes.set_title(title, loc="left", fontsize=10)
    with explain_unwritable(path):
        figure.savefig(path, bbox_inches="tight", metadata={"Software": None})
    return path


def write_text(path: Path, text: str) -> Path:
    """Writes the JSON that goes with a sheet."""
    with explain_unwritable(path):
        write_atomically(path, text)
    return path
