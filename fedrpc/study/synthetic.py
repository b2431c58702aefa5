"""Inverts the final model of a finished run and evaluates what comes out with an oracle (Figure 3 of Fed-ZDA).

The oracle is the same network, trained centrally on all clients' training data. It is needed because the model that was
inverted is biased towards its own inputs; no party of the run could train it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedrpc import models
from fedrpc.config import open_run_config
from fedrpc.device import choose
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.zero_shot import SyntheticBatch, ZeroShotParams, require_statistics, start_inversion
from fedrpc.metrics.evaluate import BATCH_SIZE, Evaluation, evaluate, iterate_batches
from fedrpc.problem import Problem
from fedrpc.seeds import derive
from fedrpc.study.generated import Generated, MakesPictures, study_generated
from fedrpc.study.model import load_weights
from fedrpc.study.reading import Run, read_run


@dataclass(frozen=True)
class Evaluations:
    """The inverted model and the oracle, each evaluated on real test data and on the made inputs."""

    made: SyntheticBatch
    model_on_real: Evaluation
    model_on_made: Evaluation
    oracle_on_real: Evaluation
    oracle_on_made: Evaluation


@dataclass(frozen=True)
class Synthetic:
    """Inputs made from the final model of a run, and their evaluations.

    Attributes:
        classes: The names of the classes.
        images: The made inputs by class; None where inputs are not images.
        bounds: The least and the greatest value that an input can have, if there are such.
        values: The content of synthetic.json.
    """

    run: Run
    classes: Sequence[str]
    evaluations: Evaluations
    images: Mapping[str, Tensor] | None
    bounds: tuple[Tensor, Tensor] | None
    values: Mapping[str, Any]


def study_synthetic(
    folder: Path, per_class: int, iterations: int | None, oracle_epochs: int, data_dir: Path | None
) -> Synthetic | Generated:
    """Makes inputs from a run's final model and evaluates them; takes the method's own images where it generates any.

    Args:
        per_class: The number of inputs made of each class; without effect where the method generates images itself.
        iterations: Instead of the run's own number of iterations, or of the default where the method makes no data;
            without effect where the method generates images itself.
    """
    run = read_run(folder)
    problem = Problem(open_run_config(folder), data_dir)
    if isinstance(problem.method, MakesPictures):
        return study_generated(run, problem, oracle_epochs)
    own = problem.params if isinstance(problem.params, ZeroShotParams) else ZeroShotParams()
    changed = {"samples_per_class": per_class} | ({"iterations": iterations} if iterations else {})
    params = ZeroShotParams(**{name: getattr(own, name) for name in ZeroShotParams.model_fields} | changed)
    found = evaluate_inversion(problem, _load_model(run, problem), params, oracle_epochs)
    classes = problem.dataset.classes
    values = _collect_values(run, found, params, oracle_epochs) | {"classes": list(classes)}
    is_image = len(problem.dataset.shape) == 3
    images = _group_by_class(found.made, problem) if is_image else None
    return Synthetic(run, classes, found, images, problem.env.bounds, values)


def _load_model(run: Run, problem: Problem) -> nn.Module:
    if problem.config.privacy.dp_sgd:  # the name of the network would suggest that it has BatchNorm
        raise ConfigError(
            f"the run in {run.folder} was trained with DP-SGD, which puts GroupNorm in place of BatchNorm: there are "
            "no statistics to make inputs from; give a run without --dp-sgd"
        )
    model = problem.copy_network()
    models.load(model, load_weights(run))
    require_statistics("fedrpc synthetic", model)
    return model


def evaluate_inversion(problem: Problem, model: nn.Module, params: ZeroShotParams, oracle_epochs: int) -> Evaluations:
    """Inverts a model, trains the oracle, and evaluates both."""
    device, seed = choose(problem.config.device), problem.config.seed
    batch = start_inversion(model.to(device), problem.env, params, derive(seed, "synthesis", "report"), device)
    batch.advance(params.iterations)
    made, oracle = batch.finish(), problem.train_oracle(oracle_epochs, device)

    def evaluate_both(network: nn.Module) -> tuple[Evaluation, Evaluation]:
        real, inputs = problem.load_external_test().batches(BATCH_SIZE), iterate_batches(made.x, made.y)
        on_real, on_made = (
            evaluate(network, data, num_classes=problem.env.num_classes, device=device) for data in (real, inputs)
        )
        return on_real, on_made

    return Evaluations(made, *evaluate_both(model), *evaluate_both(oracle))


def _group_by_class(made: SyntheticBatch, problem: Problem) -> dict[str, Tensor]:
    by_class = made.x.reshape(len(problem.dataset.classes), -1, *problem.dataset.shape)
    return dict(zip(problem.dataset.classes, by_class, strict=True))


def _collect_values(run: Run, found: Evaluations, params: ZeroShotParams, oracle_epochs: int) -> dict[str, Any]:
    def to_values(evaluation: Evaluation) -> dict[str, Any]:
        return {"accuracy": evaluation.accuracy, "per_class": list(evaluation.recalls)}

    made = found.made
    return {
        "run_id": run.summary["run_id"],
        "model_sha256": run.summary["model_sha256"],
        "generation": params.model_dump(exclude={"t_start"}),
        "loss_at_start": made.loss_at_start if np.isfinite(made.loss_at_start) else None,
        "loss": made.loss if made.is_usable else None,
        "oracle_epochs": oracle_epochs,
        "model_on_real": to_values(found.model_on_real),
        "model_on_made": to_values(found.model_on_made),
        "oracle_on_real": to_values(found.oracle_on_real),
        "oracle_on_made": to_values(found.oracle_on_made),
    }
