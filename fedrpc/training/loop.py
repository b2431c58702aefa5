"""The training loop: the run's optimizer, epochs and batches for any loss, on a client or on the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedrpc.config import TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.privacy.mechanisms import Mechanism
from fedrpc.training.losses import Loss

_BLOCK_BYTES = 8 << 20  # of examples that are gathered at a time


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
    if config.optimizer == "adam":
        return torch.optim.Adam(trainable, lr=lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(trainable, lr=lr, momentum=config.momentum, weight_decay=config.weight_decay)


def slice_batches(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Consecutive slices; a last one of a single example joins its neighbour, because BatchNorm fails on it."""
    starts = list(range(0, len(order), size))
    if len(starts) > 1 and len(order) - starts[-1] == 1:
        starts.pop()
    for number, start in enumerate(starts):
        yield order[start : starts[number + 1]] if number + 1 < len(starts) else order[start:]


def load_batches(
    data: Examples, order: np.ndarray, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Loads the batches of an epoch onto a device, many at a time, since every gathering call has a cost."""
    batches, first, at_a_time = list(slice_batches(order, batch_size)), 0, 1
    while first < len(batches):
        block = batches[first : first + at_a_time]
        x, y = (values.to(device) for values in data.batch(np.concatenate(block)))
        first += len(block)
        at_a_time = max(1, len(block) * _BLOCK_BYTES // max(1, x.nbytes))
        start = 0
        for index in block:
            yield x[start : start + len(index)], y[start : start + len(index)]
            start += len(index)


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
    optimizer = build_optimizer(config, model, lr)
    losses, steps = [], 0
    for _ in range(config.epochs if epochs is None else epochs):
        values: list[Tensor] = []
        sizes: list[int] = []
        for x, y in load_batches(data, order.permutation(len(data))[:size], config.batch_size, device):
            check()
            optimizer.zero_grad(set_to_none=True)
            value = loss(model, x, y)
            value.backward()  # type: ignore[no-untyped-call]
            if on_grad is not None:
                on_grad(model)
            optimizer.step()
            values.append(value.detach())
            sizes.append(len(y))
        # Read once an epoch: reading a value of a device waits for all work before it.
        means = torch.stack(values).tolist() if values else []
        losses.append(sum(mean * count for mean, count in zip(means, sizes, strict=True)) / size if size else 0.0)
        steps += len(values)
    return TrainReport(size, steps, tuple(losses))
