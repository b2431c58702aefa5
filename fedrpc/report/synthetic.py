"""Inverts the final model of a finished run and has an oracle judge what comes out (Figure 3 of Fed-ZDA).

The oracle is the same network, trained centrally on all clients' training data: for this judgement only, since the
model that was inverted is no judge of its own inputs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedrpc import models
from fedrpc.config import build
from fedrpc.device import choose
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.zero_shot import Made, ZeroShotParams, inversion, require_statistics
from fedrpc.metrics.evaluate import BATCH_SIZE, Evaluation, evaluate, in_batches
from fedrpc.problem import Problem
from fedrpc.report.reading import Run, read_run
from fedrpc.seeds import derive

MAX_COLUMNS = 16  # of the contact sheet
_INCHES = 0.5  # the width of an image in it


@dataclass(frozen=True)
class Judgement:
    """Who says what: the inverted model and the oracle, of real test data and of made inputs."""

    made: Made
    model_on_real: Evaluation
    model_on_made: Evaluation
    oracle_on_real: Evaluation
    oracle_on_made: Evaluation


def show_synthetic(
    folder: Path, per_class: int, iterations: int | None, oracle_epochs: int, data_dir: Path | None, console: Console
) -> None:
    """Makes inputs from a run's model, prints how good they are, and writes synthetic.json and synthetic.png.

    Args:
        iterations: Another number than the run's own, or than the default where the method makes no data.
    """
    run = read_run(folder)
    problem = Problem(build(run.config), data_dir)
    own = problem.params if isinstance(problem.params, ZeroShotParams) else ZeroShotParams()
    changed = {"samples_per_class": per_class} | ({"iterations": iterations} if iterations else {})
    params = ZeroShotParams(**{name: getattr(own, name) for name in ZeroShotParams.model_fields} | changed)
    judgement = judge(problem, _model(run, problem), params, oracle_epochs)
    console.print(_table(judgement, problem.dataset.classes))
    facts = _facts(run, judgement, params, oracle_epochs) | {"classes": list(problem.dataset.classes)}
    written = [_write(folder / "synthetic.json", json.dumps(facts, indent=1) + "\n")]
    if len(problem.dataset.shape) == 3:
        written.append(_draw(judgement.made, problem, folder / "synthetic.png", run.title))
    console.print(Text("\n".join(f"written: {path}" for path in written)), soft_wrap=True)


def _model(run: Run, problem: Problem) -> nn.Module:
    path, model = run.folder / "model.safetensors", problem.network()
    try:
        models.load(model, load_file(path))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} can not be read: {error}") from None
    require_statistics("fedrpc synthetic", model)
    return model


def judge(problem: Problem, model: nn.Module, params: ZeroShotParams, oracle_epochs: int) -> Judgement:
    """Inverts a model, trains the oracle, and asks both."""
    device, seed = choose(problem.config.device), problem.config.seed
    batch = inversion(model.to(device), problem.env, params, derive(seed, "synthesis", "report"), device)
    batch.advance(params.iterations)
    made, oracle = batch.made(), problem.oracle(oracle_epochs, device)

    def of(network: nn.Module) -> tuple[Evaluation, Evaluation]:
        real, inputs = problem.external_test().batches(BATCH_SIZE), in_batches(made.x, made.y)
        one, two = (
            evaluate(network, data, num_classes=problem.env.num_classes, device=device) for data in (real, inputs)
        )
        return one, two

    return Judgement(made, *of(model), *of(oracle))


# What is said


def _facts(run: Run, judgement: Judgement, params: ZeroShotParams, oracle_epochs: int) -> dict[str, Any]:
    def of(found: Evaluation) -> dict[str, Any]:
        return {"accuracy": found.accuracy, "per_class": list(found.recalls)}

    made = judgement.made
    return {
        "run_id": run.summary["run_id"],
        "model_sha256": run.summary["model_sha256"],
        "generation": params.model_dump(exclude={"t_start"}),
        "loss_at_start": made.loss_at_start if np.isfinite(made.loss_at_start) else None,
        "loss": made.loss if made.usable else None,
        "oracle_epochs": oracle_epochs,
        "model_on_real": of(judgement.model_on_real),
        "model_on_made": of(judgement.model_on_made),
        "oracle_on_real": of(judgement.oracle_on_real),
        "oracle_on_made": of(judgement.oracle_on_made),
    }


def _table(judgement: Judgement, classes: Sequence[str]) -> Table:
    made = Table(title="Made inputs, percent correct", title_justify="left", header_style="bold")
    made.add_column("class")
    for name in ("oracle: made", "model: real", "oracle: real", "model: made"):
        made.add_column(name, justify="right")
    columns = (
        judgement.oracle_on_made,
        judgement.model_on_real,
        judgement.oracle_on_real,
        judgement.model_on_made,
    )
    for number, name in enumerate(classes):
        made.add_row(Text(name), *(_percent(column.recalls[number]) for column in columns))
    made.add_section()
    made.add_row("all", *(_percent(column.accuracy) for column in columns))
    return made


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _write(path: Path, text: str) -> Path:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}; is there room, and may you write there?") from error
    return path


# The contact sheet


def contact_sheet(x: Tensor, bounds: tuple[Tensor, Tensor] | None, num_rows: int) -> np.ndarray:
    """Images as one picture in [0, 1] (height, width, 3), as many in each row, a pixel of white between them.

    Args:
        x: Images (count, channels, height, width), row after row; of other than three channels the first is shown.
        bounds: What black and white are; the least and the greatest value without.
    """
    low, high = bounds if bounds else (x.min(), x.max())
    shown = ((x - low) / (high - low)).clamp(0, 1)
    shown = shown if shown.shape[1] == 3 else shown[:, :1].expand(-1, 3, -1, -1)
    framed = nn.functional.pad(shown, (0, 1, 0, 1), value=1.0)
    count, channels, height, width = framed.shape
    rows = framed.reshape(num_rows, count // num_rows, channels, height, width)
    return rows.permute(0, 3, 1, 4, 2).reshape(num_rows * height, -1, channels).numpy()


def _draw(made: Made, problem: Problem, path: Path, title: str) -> Path:
    try:  # slow to import, and only needed here
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing needs matplotlib, which is not installed: pip install matplotlib") from None
    classes = problem.dataset.classes
    columns = min(MAX_COLUMNS, len(made.y) // len(classes))
    first = made.x.reshape(len(classes), -1, *problem.dataset.shape)[:, :columns].flatten(0, 1)
    sheet = contact_sheet(first, problem.env.bounds, len(classes))
    inch = _INCHES * columns / sheet.shape[1]  # of a pixel
    figure = Figure(figsize=(inch * sheet.shape[1], inch * sheet.shape[0]), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(sheet, interpolation="nearest")
    height = sheet.shape[0] / len(classes)
    axes.set_yticks([(row + 0.5) * height for row in range(len(classes))], classes, fontsize=8)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    axes.set_title(f"Made from the final model: {title}", loc="left", fontsize=10)
    try:
        figure.savefig(path, bbox_inches="tight", metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}; is there room, and may you write there?") from error
    return path
