"""What the client half of a method is given: data, network, randomness, training and the private store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch
from torch import nn

from fedrpc.data.examples import Examples
from fedrpc.errors import Abstained, Cancelled
from fedrpc.methods.base import ClientData, Loss, Store, TrainReport
from fedrpc.methods.blocks.train import learning_rate, train
from fedrpc.problem import Problem
from fedrpc.seeds import derive
from fedrpc.wire.v1 import coordinator_pb2 as pb


class AnswerContext:
    """One answer's context; implements `methods.base.ClientContext`.

    Args:
        question: The envelope of the task.
        stop: Set when the server withdrew the task.
    """

    def __init__(
        self,
        problem: Problem,
        data: ClientData,
        client: int,
        question: pb.Envelope,
        *,
        device: torch.device,
        store: Store,
        stop: threading.Event,
    ) -> None:
        self.client, self.round, self.phase, self.step = client, question.round, question.phase, question.step
        self.env, self.data, self.params, self.device = problem.env, data, problem.params, device
        self.store: Store = store
        self._problem, self._stop = problem, stop

    def model(self) -> nn.Module:
        """A fresh copy of the run's network on the client's device."""
        return self._problem.network().to(self.device)

    def rng(self, purpose: str) -> np.random.Generator:
        """The stream for a purpose, this client and this round."""
        return derive(self._problem.config.seed, purpose, self.client, self.round, self.step)

    def learning_rate(self) -> float:
        """The rate of this round, after decay."""
        return learning_rate(self.env.train, self.round)

    def train(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        data: Examples | None = None,
        on_grad: Callable[[nn.Module], None] | None = None,
        epochs: int | None = None,
        draw: int | None = None,
    ) -> TrainReport:
        """Trains with the run's optimizer, epochs and batch size."""
        return train(
            model,
            loss,
            self.data.train if data is None else data,
            self.env.train,
            lr=self.learning_rate(),
            order=self.rng("order"),
            device=self.device,
            check=self.check,
            on_grad=on_grad,
            epochs=epochs,
            draw=draw,
        )

    def check(self) -> None:
        """Raises Cancelled when the server withdrew the task."""
        if self._stop.is_set():
            raise Cancelled("the server withdrew the task")

    def abstain(self, reason: str) -> NoReturn:
        """Ends this answer without one."""
        raise Abstained(reason)
