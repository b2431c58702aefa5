"""FedAvg as a bare loop: two worker processes of one thread each, with all data in memory, and nothing else."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedrpc import models

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Problem:
    """What is trained."""

    folder: Path
    model: str
    num_clients: int
    batch_size: int
    epochs: int
    lr: float


class Worker:
    """One process: it has the network and the examples of everybody."""

    def __init__(self, problem: Problem) -> None:
        torch.set_num_threads(1)
        self._problem = problem
        x = torch.from_numpy(np.load(problem.folder / "x_train.npy")).float().div_(255)
        self._x = x.sub_(x.mean()).div_(x.std())
        self._y = torch.from_numpy(np.load(problem.folder / "y_train.npy"))
        self._model = build(problem)

    def train(self, client: int, weights: Weights) -> Weights:
        """Trains the given model on a client's examples."""
        problem, model = self._problem, self._model
        model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=problem.lr)
        mine = torch.arange(client, len(self._y), problem.num_clients)
        for _ in range(problem.epochs):
            for index in mine[torch.randperm(len(mine))].split(problem.batch_size):
                optimizer.zero_grad(set_to_none=True)
                F.cross_entropy(model(self._x[index]), self._y[index]).backward()
                optimizer.step()
        return read(model)


def build(problem: Problem) -> nn.Module:
    """The network of the run that the loop is held against."""
    return models.build(problem.model, (1, 28, 28), 10)


def read(model: nn.Module) -> Weights:
    """A network's weights, apart from it."""
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


_worker: Worker


def _start(problem: Problem) -> None:
    global _worker
    _worker = Worker(problem)


def _train(job: tuple[int, Weights]) -> Weights:
    return _worker.train(*job)


class Loop:
    """Rounds of the bare loop."""

    def __init__(self, problem: Problem, pool: Pool) -> None:
        self._problem, self._pool = problem, pool
        self._weights = read(build(problem))

    def play_round(self, cohort: list[int]) -> None:
        """Trains a cohort, each worker one client at a time, and averages."""
        sums: dict[str, Any] = {}
        for update in self._pool.imap(_train, [(client, self._weights) for client in cohort]):
            for name, value in update.items():
                sums[name] = sums.get(name, 0) + value.astype(np.float64)
        # asarray: a sum of counters, which have no dimension, is a number and no array.
        self._weights = {
            name: np.asarray(sums[name] / len(cohort), dtype=old.dtype) for name, old in self._weights.items()
        }


@contextmanager
def running_loop(problem: Problem, num_workers: int) -> Iterator[Loop]:
    """A loop with its workers."""
    with multiprocessing.get_context("spawn").Pool(num_workers, _start, (problem,)) as pool:
        yield Loop(problem, pool)
