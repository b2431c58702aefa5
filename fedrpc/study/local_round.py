"""Plays one more round of FedAvg on a finished run's model, with clients of any size (Figure 3 of FLea).

How well classes separate in the features is measured by the Davies-Bouldin score: of each local model on its own data
and on test data, and of their mean on test data beside the model before. Clients are drawn anew from all the run's
training data, IID, so that models of clients of different sizes start from the same one.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedrpc import models
from fedrpc.config import open_run_config
from fedrpc.data.examples import Examples
from fedrpc.device import choose
from fedrpc.errors import ConfigError
from fedrpc.metrics.evaluate import BATCH_SIZE
from fedrpc.metrics.features import davies_bouldin
from fedrpc.models import require_stages
from fedrpc.problem import Problem
from fedrpc.seeds import derive
from fedrpc.study.model import load_weights
from fedrpc.study.reading import read_run
from fedrpc.training.loop import compute_learning_rate, train
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.message import Tensors

MEASURED = 2000  # examples, at most, of which features are measured


def study_local_round(
    folder: Path, data_dir: Path | None, *, clients: int, examples: int, shared: int = 0
) -> dict[str, float | None]:
    """Trains the final model on so many clients' data and measures features.

    Args:
        clients: How many train.
        examples: How many each has.
        shared: How many more all of them have in common.
    """
    run = read_run(folder)
    problem = Problem(open_run_config(folder), data_dir)
    config, device, test = problem.config, choose(problem.config.device), problem.load_external_test()
    start = problem.copy_network().to(device)
    models.load(start, load_weights(run))
    before = measure_separation(start, test, device)
    trained: list[Tensors] = []
    on_own: list[float | None] = []
    on_test: list[float | None] = []
    for number, data in enumerate(draw_clients(problem, clients, examples, shared)):
        model = copy.deepcopy(start)
        lr, order = compute_learning_rate(config.train, config.rounds), derive(config.seed, "local-round", number)
        train(model, cross_entropy, data, config.train, lr=lr, order=order, device=device)
        on_own.append(measure_separation(model, data, device))
        on_test.append(measure_separation(model, test, device))
        trained.append(models.read_tensors(model))
    averaged = copy.deepcopy(start)
    models.load(averaged, average(trained))
    after, own, local = measure_separation(averaged, test, device), _mean(on_own), _mean(on_test)
    return {
        "before": before,
        "local_train": own,
        "local_test": local,
        "gap": None if own is None or local is None else local - own,
        "after": after,
        "change": None if after is None or before is None else after - before,
    }


def draw_clients(problem: Problem, clients: int, examples: int, shared: int) -> list[Examples]:
    """Disjoint random parts of all the run's training data, each with the same shared examples added."""
    pool = problem.pool_train_data()
    needed = clients * examples + shared
    if needed > len(pool):
        raise ConfigError(
            f"{clients} clients of {examples} examples and {shared} shared ones need {needed}, but the run has "
            f"{len(pool)}; use fewer"
        )
    order = derive(problem.config.seed, "local-round", "clients").permutation(len(pool))
    common = order[clients * examples : needed]
    parts = np.split(order[: clients * examples], clients)
    return [Examples.of(*pool.batch(np.concatenate([part, common]))) for part in parts]


def measure_separation(model: nn.Module, data: Examples, device: torch.device) -> float | None:
    """The Davies-Bouldin score of the model's features; None where it has no value."""
    network = require_stages(copy.deepcopy(model).eval(), "local-round")
    count = min(len(data), MEASURED)
    features = []
    with torch.inference_mode():
        for first in range(0, count, BATCH_SIZE):
            x, _ = data.batch(np.arange(first, min(first + BATCH_SIZE, count)))
            features.append(network.features(x.to(device)).cpu())
    return davies_bouldin(torch.cat(features), data.y[:count])


def average(all_weights: Sequence[Tensors]) -> Tensors:
    """The mean of models of clients of one size; of whole numbers the largest is kept."""
    stacked = {name: torch.stack([weights[name] for weights in all_weights]) for name in all_weights[0]}
    return {name: x.mean(0) if x.is_floating_point() else x.amax(0) for name, x in stacked.items()}


def _mean(values: Sequence[Any]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return statistics.fmean(known) if known else None
