"""Studies the images that a finished run's own generator makes: how close they come to training images, and labels.

Whether a generator copies its training data is asked of all clients' images at once, and an oracle trained on all of
them checks the labels; no party of the run could do either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedrpc.data.examples import Examples
from fedrpc.device import choose
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.earlier import load_earlier_state
from fedrpc.methods.runtime import Env
from fedrpc.methods.tools import Pictures
from fedrpc.metrics.evaluate import BATCH_SIZE, evaluate, iterate_batches
from fedrpc.problem import Problem
from fedrpc.seeds import derive
from fedrpc.study.reading import Run

_COMPARED = 100  # images of each row


@runtime_checkable
class MakesPictures(Protocol):
    """A method that generates images and can show them after a run."""

    def generate_pictures(self, state: Any, env: Env, count: int, rng: np.random.Generator) -> Pictures | None:
        """What it has to show, `count` images in a row; None when there is nothing."""
        ...


@dataclass(frozen=True)
class Generated:
    """Images of a run's own generator, and what is known of them.

    Attributes:
        samples: Generated images, by row of a contact sheet.
        nearest: The training image nearest to each of them, by the same names.
        real: Real images of one client, by a row name of their own.
        progress: Generated images as training went on, by row; empty when none were kept.
        bounds: The least and the greatest value that an image can have, if there are such.
        values: The content of generated.json.
    """

    run: Run
    samples: Mapping[str, Tensor]
    nearest: Mapping[str, Tensor]
    real: Mapping[str, Tensor]
    progress: Mapping[str, Tensor]
    bounds: tuple[Tensor, Tensor] | None
    values: Mapping[str, Any]


def study_generated(run: Run, problem: Problem, oracle_epochs: int) -> Generated:
    """Has a run's generator make images, and compares them with the training data.

    Raises:
        ConfigError: The run has no images to show.
    """
    pictures = _load_pictures(run, problem)
    bounds, seed, train = problem.env.bounds, problem.config.seed, problem.pool_train_data()
    samples = torch.cat(list(pictures.samples.values()))
    distances, nearest = find_nearest(samples, train, bounds)
    test = problem.load_external_test()
    take = derive(seed, "pictures-test").permutation(len(test))[: len(samples)]
    held_out, _ = find_nearest(test.batch(take)[0], train, bounds)
    values = {
        "run_id": run.summary["run_id"],
        "caveat": run.summary.get("caveat", ""),
        "neighbours": compare_distances(distances, held_out),
        "labels": _measure_agreement(pictures.given, problem, oracle_epochs) if pictures.given else None,
    }
    images = torch.split(train.batch(nearest.numpy())[0], [len(row) for row in pictures.samples.values()])
    by_row = dict(zip(pictures.samples, images, strict=True))
    return Generated(run, pictures.samples, by_row, _take_real(problem), pictures.progress, bounds, values)


def _load_pictures(run: Run, problem: Problem) -> Pictures:
    method, env = problem.method, problem.env
    assert isinstance(method, MakesPictures), "the caller has checked"
    state, _ = load_earlier_state(run.folder, type(method.init(env)), None)
    found = method.generate_pictures(state, env, _COMPARED, derive(problem.config.seed, "pictures"))
    if found is None:
        raise ConfigError(
            f"the {problem.config.method} run in {run.folder} has no images to show: none were made, or too few were "
            "accepted for their classes: give one of more rounds, or with parameters that accept more"
        )
    return found


def find_nearest(x: Tensor, data: Examples, bounds: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """The distance of each image to the nearest one of a set, and its position there.

    Distances are root mean squares over an image's values, scaled to [0, 1] if there are bounds.
    """
    low, high = bounds if bounds else (torch.tensor(0.0), torch.tensor(1.0))

    def flat(images: Tensor) -> Tensor:
        return ((images - low) / (high - low)).flatten(1)

    wanted, first = flat(x), 0
    best, which = torch.full((len(x),), torch.inf), torch.zeros(len(x), dtype=torch.int64)
    for images, _ in data.batches(BATCH_SIZE):
        distance, at = torch.cdist(wanted, flat(images)).min(dim=1)
        nearer = distance < best
        best[nearer], which[nearer] = distance[nearer], at[nearer] + first
        first += len(images)
    # Again by subtraction: the fast distances above are rounded, most of all where one image is a copy of the other.
    exact = (wanted - flat(data.batch(which.numpy())[0])).square().mean(dim=1).sqrt()
    return exact, which


def compare_distances(generated: Tensor, held_out: Tensor) -> dict[str, Any]:
    """How close generated images come to training images, beside real images that were never trained on."""
    return {
        "num_generated": len(generated),
        "generated_median": float(generated.median()),
        "generated_least": float(generated.min()),
        "test_median": float(held_out.median()),
        "test_least": float(held_out.min()),
        "nearer_than_any_test_image": int((generated < held_out.min()).sum()),
    }


def _measure_agreement(given: tuple[Tensor, Tensor], problem: Problem, oracle_epochs: int) -> dict[str, Any]:
    """How often an oracle agrees with the labels of the images that clients were given."""
    device = choose(problem.config.device)
    oracle, classes = problem.train_oracle(oracle_epochs, device), problem.env.num_classes
    real, made = (
        evaluate(oracle, data, num_classes=classes, device=device)
        for data in (problem.load_external_test().batches(BATCH_SIZE), iterate_batches(*given))
    )
    return {
        "num_given": len(given[1]),
        "histogram": torch.bincount(given[1], minlength=classes).tolist(),
        "oracle_agrees": made.accuracy,
        "oracle_agrees_by_class": list(made.recalls),
        "oracle_on_test": real.accuracy,
        "oracle_epochs": oracle_epochs,
    }


def _take_real(problem: Problem) -> dict[str, Tensor]:
    """Real images of the first client that has any, repeated where they are few."""
    client = int(np.argmax([count > 0 for count in problem.env.num_examples()]))
    data = problem.load_client_data(client).train
    return {f"client {client}, real": data.batch(np.resize(np.arange(len(data)), _COMPARED))[0]}
