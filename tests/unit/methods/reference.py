"""`tests.fakes.mlp` in plain float64 numpy: loss gradient, batches and local SGD, to hold methods against their papers.

Nothing here is the project's code but the seeds that shuffle, so that both sides see the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedrpc.problem import Problem
from fedrpc.seeds import derive

Arrays = dict[str, np.ndarray]


def uneven(**train: Any) -> dict[str, Any]:
    """Options of a problem whose first cohort differs in steps, with decaying rates and clients that come back."""
    usual = {"epochs": 2, "batch_size": 4, "lr": 0.1, "lr_decay": 0.5}
    return {"partition": "dirichlet:0.5", "fraction": 0.75, "train": usual | train}


def as_arrays(tensors: Mapping[str, Any]) -> Arrays:
    """Tensors as float64 arrays."""
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def zeros(like: Arrays) -> Arrays:
    return {name: np.zeros_like(value) for name, value in like.items()}


def combine(*terms: tuple[float, Arrays]) -> Arrays:
    """The sum of scaled models."""
    return {name: sum(scale * value[name] for scale, value in terms) for name in terms[0][1]}


def examples(problem: Problem, client: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = problem.load_client_data(client).train.all()
    return x.reshape(len(y), -1).double().numpy(), y.numpy()


def gradient(w: Arrays, x: np.ndarray, y: np.ndarray) -> Arrays:
    """Of the mean cross-entropy of a network with one hidden layer of tanh."""
    hidden = np.tanh(x @ w["1.weight"].T + w["1.bias"])
    logits = hidden @ w["3.weight"].T + w["3.bias"]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ w["3.weight"]) * (1 - hidden**2)
    return {"1.weight": back.T @ x, "1.bias": back.sum(0), "3.weight": p.T @ hidden, "3.bias": p.sum(0)}


def batches(problem: Problem, client: int, round_index: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every batch of a client's local epochs."""
    x, y = examples(problem, client)
    order, size = derive(problem.config.seed, "order", client, round_index, 0), problem.config.train.batch_size
    for _ in range(problem.config.train.epochs):
        shuffled = order.permutation(len(y))
        while len(shuffled):
            # A last batch of one example joins the one before it.
            count = len(shuffled) if len(shuffled) <= size + 1 else size
            yield x[shuffled[:count]], y[shuffled[:count]]
            shuffled = shuffled[count:]


def train(
    problem: Problem,
    client: int,
    round_index: int,
    start: Arrays,
    correction: Callable[[Arrays], Arrays] = zeros,
) -> tuple[Arrays, int]:
    """Local SGD, with momentum and weight decay as torch defines them, and the number of steps.

    Args:
        correction: What is added to the gradient at a model.
    """
    config = problem.config.train
    lr = config.lr * config.lr_decay**round_index
    w, velocity, steps = dict(start), zeros(start), 0
    for x, y in batches(problem, client, round_index):
        g = combine((1, gradient(w, x, y)), (1, correction(w)), (config.weight_decay, w))
        velocity = combine((config.momentum, velocity), (1, g))
        w = combine((1, w), (-lr, velocity))
        steps += 1
    return w, steps


def mean(models: Sequence[Arrays], weights: Sequence[float] | None = None) -> Arrays:
    weights = weights or [1] * len(models)
    return combine(*((weight / sum(weights), model) for weight, model in zip(weights, models, strict=True)))


def distance(got: Mapping[str, Any], wanted: Arrays) -> float:
    """The largest difference, over the largest value wanted."""
    largest = max(float(np.abs(value).max()) for value in wanted.values())
    arrays = as_arrays(got)
    assert list(arrays) == list(wanted)
    return max(float(np.abs(arrays[name] - value).max()) for name, value in wanted.items()) / largest
