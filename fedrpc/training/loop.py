"""The training loop: the run's optimizer, epochs and batches for any loss, on a client or on the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedrpc.config import TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.privacy.mechanisms import Mechanism
from fedrpc.training.acceleration import Precision, accelerating, wants_channels_last
from fedrpc.training.batches import load_batches
from fedrpc.training.losses import Loss


@dataclass(frozen=True)
class TrainReport:
    """The result of a local training."""

    num_examples: int
    num_steps: int
    epoch_losses: tuple[float, ...]  # NaN under DP-SGD, which does not cover them
    covered: Mechanism | None = None  # covers releases computed from the trained model alone; None without DP-SGD
    described: Mechanism | None = None  # covers the number of examples and the losses

    @property
    def loss(self) -> float:
        """The mean loss of the last epoch."""
        return self.epoch_losses[-1] if self.epoch_losses else 0.0


def compute_learning_rate(config: TrainConfig, round_index: int) -> float:
    """The learning rate of a round after decay; set-up (round -1) has the first one."""
    decayed = config.lr * config.lr_decay ** (max(round_index, 0) // config.lr_decay_every)
    return max(decayed, config.lr_min)


def build_optimizer(config: TrainConfig, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """A new optimizer: one for each client and round."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # All parameters in one operation on a GPU, where each one has its price; on a CPU the bits would be others.
    fused = True if trainable and all(parameter.is_cuda for parameter in trainable) else None
    if config.optimizer == "adam":
        return torch.optim.Adam(trainable, lr=lr, weight_decay=config.weight_decay, fused=fused)
    return torch.optim.SGD(trainable, lr=lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=fused)


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
    """Trains a model in place.

    Args:
        order: Shuffles the examples; it does not depend on the method, so all methods see the same batches.
        check: Called before each batch; raises Cancelled when the server withdrew the task.
        on_grad: Called between backward and step.
        epochs: The number of epochs, if not the run's.
        draw: The number of examples sampled, without replacement, in each epoch; all of them when None.
    """
    size = len(data) if draw is None else min(draw, len(data))
    model.train()
    with accelerating(model, config, device):
        steps = _Steps(model, loss, config, lr, device, on_grad)
        for _ in range(config.epochs if epochs is None else epochs):
            for x, y in load_batches(data, order.permutation(len(data))[:size], config.batch_size, device):
                check()
                steps.take(x, y)
            steps.end_epoch()
        return steps.report(size)


class _Steps:
    """The steps of one training, which wait for the device only when all are taken."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        config: TrainConfig,
        lr: float,
        device: torch.device,
        on_grad: Callable[[nn.Module], None] | None,
    ) -> None:
        self._model, self._loss, self._on_grad = model, loss, on_grad
        self._optimizer, self._precision = build_optimizer(config, model, lr), Precision(config, device)
        self._relays = wants_channels_last(config, device)
        self._values: list[Tensor] = []  # of this epoch, on the device
        self._epochs: list[Tensor] = []  # the values of those before it
        self._sizes: list[list[int]] = [[]]  # of the batches, by epoch

    def take(self, x: Tensor, y: Tensor) -> None:
        """Trains on one batch."""
        if self._relays and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        self._optimizer.zero_grad(set_to_none=True)
        with self._precision.casting():
            value = self._loss(self._model, x, y)
        self._precision.differentiate(value, self._optimizer)
        if self._on_grad is not None:
            self._on_grad(self._model)
        self._precision.step(self._optimizer)
        self._values.append(value.detach())
        self._sizes[-1].append(len(y))

    def end_epoch(self) -> None:
        """Puts the epoch's losses together, still on the device."""
        if self._values:
            self._epochs.append(torch.stack(self._values))
        self._sizes.append([])
        self._values = []

    def report(self, size: int) -> TrainReport:
        """The result, once the device has computed all of it.

        Args:
            size: The number of examples in an epoch.
        """
        means = iter(torch.cat(self._epochs).tolist() if self._epochs else [])
        losses = [sum(next(means) * count for count in sizes) / size if size else 0.0 for sizes in self._sizes[:-1]]
        num_steps = sum(map(len, self._sizes)) - self._precision.count_left_out()
        return TrainReport(size, num_steps, tuple(losses))
