"""Generators conditioned on a label: their input, a loss against collapse, and training that can be checkpointed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedrpc.methods.blocks.mixup import one_hot
from fedrpc.models.state import load_optimizer, read_optimizer, read_tensors
from fedrpc.wire.message import Tensors


def append_label(noise: Tensor, y: Tensor, num_classes: int) -> Tensor:
    """Noise and one-hot label side by side."""
    return torch.cat([noise, one_hot(y, num_classes).to(noise)], dim=1)


def diversity_loss(noise: Tensor, outputs: Tensor) -> Tensor:
    """1 where all outputs are the same, less the farther apart the outputs of distant noise are (Zhu et al., 2021)."""
    outputs = outputs.flatten(1)
    apart = torch.cdist(outputs, outputs, p=1) / outputs.shape[1]
    distant = torch.cdist(noise, noise).square() / noise.shape[1]
    return torch.exp(-(distant * apart).mean())


def train_generator(
    generator: nn.Module, moments: Tensors, loss: Callable[[], Tensor], *, lr: float, steps: int
) -> tuple[Tensors, Tensors, float]:
    """Trains a generator with Adam, whose moments continue from the last call.

    Args:
        moments: The moments that the last call returned; empty at first.
        loss: Samples a batch and returns its loss.

    Returns:
        The generator's weights, Adam's moments, and the mean loss.
    """
    optimizer = torch.optim.Adam(generator.parameters(), lr=lr)
    if moments:
        load_optimizer(optimizer, moments)
    generator.train()
    values: list[Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        values.append(value.detach())
    total = sum(torch.stack(values).tolist()) if values else 0.0  # read once: reading waits for the device
    return read_tensors(generator), read_optimizer(optimizer), total / max(steps, 1)
