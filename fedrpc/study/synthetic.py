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
from fedrpc.methods.blocks.zero_shot import SyntheticBatch, ZeroShotParams, require_statistics, start_inversion
from fedrpc.metrics.evaluate import BATCH_SIZE, Evaluation, evaluate, in_batches
from fedrpc.problem import Problem
from fedrpc.report.sheet import MAX_COLUMNS, draw_sheet, write_text
from fedrpc.seeds import derive
from fedrpc.study.generated import MakesPictures, show_generated
from fedrpc.study.reading import Run, read_run


@dataclass(frozen=True)
class Judgement:
    """Who says what: the inverted model and the oracle, of real test data and of made inputs."""

    made: SyntheticBatch
    model_on_real: Evaluation
    model_on_made: Evaluation
    oracle_on_real: Evaluation
    oracle_on_made: Evaluation


def show_synthetic(
    folder: Path, per_class: int, iterations: int | None, oracle_epochs: int, data_dir: Path | None, console: Console
) -> None:
    """Makes inputs from a run's model, prints how good they are, and writes synthetic.json and synthetic.png.

    Args:
        per_class: As these two, of no meaning for a run whose method generates images itself: those are shown then.
        iterations: Another number than the run's own, or than the default where the method makes no data.
    """
    run = read_run(folder)
    problem = Problem(build(run.config), data_dir)
    if isinstance(problem.method, MakesPictures):
        show_generated(run, problem, oracle_epochs, console)
        return
    own = problem.params if isinstance(problem.params, ZeroShotParams) else ZeroShotParams()
    changed = {"samples_per_class": per_class} | ({"iterations": iterations} if iterations else {})
    params = ZeroShotParams(**{name: getattr(own, name) for name in ZeroShotParams.model_fields} | changed)
    judgement = judge(problem, _model(run, problem), params, oracle_epochs)
    console.print(_table(judgement, problem.dataset.classes))
    facts = _facts(run, judgement, params, oracle_epochs) | {"classes": list(problem.dataset.classes)}
    written = [write_text(folder / "synthetic.json", json.dumps(facts, indent=1) + "\n")]
    if len(problem.dataset.shape) == 3:
        rows, title = _rows(judgement.made, problem), f"Made from the final model: {run.title}"
        written.append(draw_sheet(rows, problem.env.bounds, folder / "synthetic.png", title))
    console.print(Text("\n".join(f"written: {path}" for path in written)), soft_wrap=True)


def _rows(made: SyntheticBatch, problem: Problem) -> dict[str, Tensor]:
    by_class = made.x.reshape(len(problem.dataset.classes), -1, *problem.dataset.shape)[:, :MAX_COLUMNS]
    return dict(zip(problem.dataset.classes, by_class, strict=True))


def _model(run: Run, problem: Problem) -> nn.Module:
    if problem.config.privacy.dp_sgd:  # the network's name would say that it has BatchNorm
        raise ConfigError(
            f"the run in {run.folder} was trained with DP-SGD, which puts GroupNorm in place of BatchNorm: there are "
            "no statistics to make inputs from; give a run without --dp-sgd"
        )
    path, model = run.folder / "model.safetensors", problem.copy_network()
    try:
        models.load(model, load_file(path))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} can not be read: {error}") from None
    require_statistics("fedrpc synthetic", model)
    return model


def judge(problem: Problem, model: nn.Module, params: ZeroShotParams, oracle_epochs: int) -> Judgement:
    """Inverts a model, trains the oracle, and asks both."""
    device, seed = choose(problem.config.device), problem.config.seed
    batch = start_inversion(model.to(device), problem.env, params, derive(seed, "synthesis", "report"), device)
    batch.advance(params.iterations)
    made, oracle = batch.finish(), problem.train_oracle(oracle_epochs, device)

    def of(network: nn.Module) -> tuple[Evaluation, Evaluation]:
        real, inputs = problem.load_external_test().batches(BATCH_SIZE), in_batches(made.x, made.y)
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
        "loss": made.loss if made.is_usable else None,
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
