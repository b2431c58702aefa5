"""Draws the examples that a finished run has made, a row of images for each class."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from fedrpc.config import build
from fedrpc.errors import ConfigError, WireError
from fedrpc.problem import Problem
from fedrpc.report.reading import read_run
from fedrpc.wire import stored

COLUMNS = 16
_INCHES = 0.5  # the width of an image


def show_made(folder: Path, data_dir: Path | None, console: Console) -> None:
    """Writes synthetic.png into a run's directory and says how many examples there are."""
    run = read_run(folder)
    problem = Problem(build(run.config), data_dir)
    made = made_examples(folder, problem)
    if made is None:
        raise ConfigError(f"{folder}: {problem.method.name} made no examples in this run that the server has kept")
    x, y = made
    classes = problem.dataset.classes
    path = draw(sheet(x, y, problem.env.bounds, len(classes)), classes, folder / "synthetic.png", run.title)
    counts = torch.bincount(y, minlength=len(classes)).tolist()
    console.print(Text(", ".join(f"{name} {count}" for name, count in zip(classes, counts, strict=True))))
    console.print(Text(f"written: {path}"), soft_wrap=True)


def made_examples(folder: Path, problem: Problem) -> tuple[Tensor, Tensor] | None:
    """The examples that a run's method has made by its last state, as inputs with labels."""
    try:
        manifest = json.loads((folder / "checkpoints" / "manifest.json").read_text())
        data = (folder / "checkpoints" / manifest["file"]).read_bytes()
        state = stored.loads(type(problem.method.init(problem.env)), data)
    except (OSError, ValueError, KeyError, WireError) as error:
        raise ConfigError(f"the last state in {folder / 'checkpoints'} can not be read: {error}") from None
    return problem.method.synthetic(problem.env, state)


def sheet(x: Tensor, y: Tensor, bounds: tuple[Tensor, Tensor] | None, num_classes: int) -> np.ndarray:
    """Images as one picture in [0, 1] (height, width, 3), a row for each class, a pixel of white between them.

    Args:
        x: Images (count, channels, height, width); of other than three channels the first is shown.
        y: Their classes; of each at most as many as there are columns are shown, from first to last.
        bounds: What black and white are; the least and the greatest value without.
    """
    low, high = bounds if bounds else (x.min(), x.max())
    shown = ((x - low) / (high - low)).clamp(0, 1)
    shown = shown if shown.shape[1] == 3 else shown[:, :1].expand(-1, 3, -1, -1)
    height, width = (side + 1 for side in shown.shape[2:])
    picture = torch.ones(num_classes * height, COLUMNS * width, 3)
    for c in range(num_classes):
        mine = (y == c).nonzero()[:, 0]
        chosen = mine[torch.linspace(0, len(mine) - 1, min(COLUMNS, len(mine))).long()] if len(mine) else mine
        for column, at in enumerate(chosen.tolist()):
            top, left = c * height, column * width
            picture[top : top + height - 1, left : left + width - 1] = shown[at].permute(1, 2, 0)
    return picture.numpy()


def draw(picture: np.ndarray, classes: Sequence[str], path: Path, title: str) -> Path:
    """Writes a sheet with the names of its rows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here, since it is slow to import
    from matplotlib.figure import Figure

    inch = _INCHES * COLUMNS / picture.shape[1]  # of a pixel
    figure = Figure(figsize=(inch * picture.shape[1], inch * picture.shape[0]), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(picture, interpolation="nearest")
    height = picture.shape[0] / len(classes)
    axes.set_yticks([(row + 0.5) * height for row in range(len(classes))], classes, fontsize=8)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    axes.set_title(f"Made in the run: {title}", loc="left", fontsize=10)
    try:
        figure.savefig(path, bbox_inches="tight", metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}; is there room, and may you write there?") from error
    return path
