"""Training: the run's optimizer, epochs and batches around any loss, on a client or on the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedrpc.config import TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.privacy.mechanisms import Mechanism
from fedrpc.training.losses import Loss


@dataclass(frozen=True)
class TrainReport:
    """What a local training did."""

    num_examples: int
    num_steps: int
    epoch_losses: tuple[float, ...]  # NaN under DP-SGD, which does not cover them
    covered: Mechanism | None = None  # for what follows from the trained model alone; None unless DP-SGD
    described: Mechanism | None = None  # for the two figures above

    @property
    def loss(self) -> float:
        """Mean loss of the last epoch."""
        return self.epoch_losses[-1] if self.epoch_losses else 0.0


def learning_rate(config: TrainConfig, round_index: int) -> float:
    """The rate of a round after decay; set-up (round -1) trains at the first rate."""
    decayed = config.lr * config.lr_decay ** (max(round_index, 0) // config.lr_decay_every)
    return max(decayed, config.lr_min)


def optimizer_of(config: TrainConfig, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """A fresh optimizer: one for each client and round."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.optimizer == "adam":
        return torch.optim.Adam(wanted, lr=lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(wanted, lr=lr, momentum=config.momentum, weight_decay=config.weight_decay)


def index_batches(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Consecutive slices; a last one of a single example joins its neighbour, since BatchNorm can not take it."""
    starts = list(range(0, len(order), size))
    if len(starts) > 1 and len(order) - starts[-1] == 1:
        starts.pop()
    for number, start in enumerate(starts):
        yield order[start : starts[number + 1]] if number + 1 < len(starts) else order[start:]


def train(
    model: nn.Module,
    loss: Loss,
    data: Examples,
    config: TrainConfig,
    *,
    lr: float,
    order: np.random.Generator,
    device: torch.device,
    check: Callable[[], None] = lambda: None,
    on_grad: Callable[[nn.Module], None] | None = None,
    epochs: int | None = None,
    draw: int | None = None,
) -> TrainReport:
    """Runs the epochs.

    Args:
        order: The stream that shuffles; it knows nothing of the method, so methods see the same batches.
        check: Called before each batch; raises Cancelled when the server withdrew the task.
        on_grad: Called between backward and step.
        epochs: Another number of epochs than the run's.
        draw: So many examples are drawn, without replacement, in each epoch; all of them when None.
    """
    size = len(data) if draw is None else min(draw, len(data))
    model.train()
    optimizer = optimizer_of(config, model, lr)
    losses, steps = [], 0
    for _ in range(config.epochs if epochs is None else epochs):
        total = 0.0
        for index in index_batches(order.permutation(len(data))[:size], config.batch_size):
            check()
            x, y = data.batch(index)
            optimizer.zero_grad(set_to_none=True)
            value = loss(model, x.to(device), y.to(device))
            value.backward()  # type: ignore[no-untyped-call]
            if on_grad is not None:
                on_grad(model)
            optimizer.step()
            total += float(value.detach()) * len(index)
            steps += 1
        losses.append(total / size if size else 0.0)
    return TrainReport(size, steps, tuple(losses))
