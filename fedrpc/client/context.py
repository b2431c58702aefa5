"""What the client half of a method is given: data, network, randomness, training and the private store."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from fedrpc.client.trainer import learning_rate, train
from fedrpc.data.examples import Examples
from fedrpc.errors import Cancelled
from fedrpc.methods.base import ClientData, Loss, Store, TrainReport
from fedrpc.problem import Problem
from fedrpc.seeds import derive


class AnswerContext:
    """One answer's context; implements `methods.base.ClientContext`.

    Args:
        cancelled: Set when the server withdrew the task.
    """

    def __init__(
        self,
        problem: Problem,
        data: ClientData,
        client: int,
        round_index: int,
        step: int,
        device: torch.device,
        store: Store,
        cancelled: threading.Event,
    ) -> None:
        self.client, self.round, self.step = client, round_index, step
        self.data, self.params, self.device = data, problem.params, device
        self.store: Store = store
        self._problem, self._cancelled = problem, cancelled

    def model(self) -> nn.Module:
        """A fresh copy of the run's network on the client's device."""
        return self._problem.network().to(self.device)

    def rng(self, purpose: str) -> np.random.Generator:
        """The stream for a purpose, this client and this round."""
        return derive(self._problem.config.seed, purpose, self.client, self.round, self.step)

    def learning_rate(self) -> float:
        """The rate of this round, after decay."""
        return learning_rate(self._problem.config.train, self.round)

    def train(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        data: Examples | None = None,
        on_grad: Callable[[nn.Module], None] | None = None,
    ) -> TrainReport:
        """Trains with the run's optimizer, epochs and batch size."""
        return train(
            model,
            loss,
            self.data.train if data is None else data,
            self._problem.config.train,
            lr=self.learning_rate(),
            order=self.rng("order"),
            device=self.device,
            check=self._check,
            on_grad=on_grad,
        )

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled("the server withdrew the task")
