"""The attackers' networks: from a shared item back to its input, and from an item to whether its input was marked.

The linear decoder is that of FLea's authors (Xia et al., KDD 2024): a 1x1 convolution to 32 channels, a transposed 3x3
one of stride 2, a 3x3 one of stride 2 and a 1x1 one, without any non-linearity. Where the item is a smaller map than
the input there are only transposed ones of stride 2; where it is no map at all, a linear layer makes one of it first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]

WIDTH, HIDDEN = 32, 512
MANY = 400  # places of a map
_CONV: dict[int, type[nn.Conv1d | nn.Conv2d]] = {1: nn.Conv1d, 2: nn.Conv2d}
_GROW: dict[int, type[nn.ConvTranspose1d | nn.ConvTranspose2d]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d}
_MODES = {1: "linear", 2: "bilinear"}


class Standardised(nn.Module):
    """Shifts and scales items to zero mean and unit deviation, by the statistics of the attacker's training items.

    Args:
        items: The training items, in any float type.
        by_place: Whether every place of a map has a mean of its own, or a channel one for all its places; the deviation
            is always a channel's.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, items: Tensor, *, by_place: bool) -> None:
        super().__init__()
        axes = (0, *range(2, items.dim()))
        mean = items.float().mean(dim=0 if by_place else axes, keepdim=True)
        std = (items.float() - mean).square().mean(dim=axes, keepdim=True).sqrt()
        self.register_buffer("mean", mean)
        self.register_buffer("std", torch.where(std > 1e-6, std, torch.ones_like(std)))  # dead channels stay

    def forward(self, items: Tensor) -> Tensor:
        """The items as float32, standardised."""
        out: Tensor = (items.float() - self.mean) / self.std
        return out


class Resize(nn.Module):
    """Linear interpolation to a size."""

    def __init__(self, size: Sequence[int]) -> None:
        super().__init__()
        self._size = tuple(size)

    def forward(self, x: Tensor) -> Tensor:
        """The map at its new size."""
        if x.shape[2:] == self._size:
            return x
        return F.interpolate(x, self._size, mode=_MODES[len(self._size)], align_corners=False)


class Residual(nn.Module):
    """Two 3-wide convolutions with ReLUs around a shortcut."""

    def __init__(self, axes: int, width: int) -> None:
        super().__init__()
        self.path = nn.Sequential(_build_conv(axes, width, width), nn.ReLU(), _build_conv(axes, width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The map, corrected."""
        return F.relu(x + self.path(x))


class Corrected(nn.Module):
    """A linear decoder and a network with ReLUs that adds what the linear one cannot express."""

    def __init__(self, linear: nn.Module, correction: nn.Module) -> None:
        super().__init__()
        self.linear, self.correction = linear, correction

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        out: Tensor = self.linear(x) + self.correction(x)
        return out


def build_linear_decoder(item: Shape, target: Shape) -> nn.Module:
    """The paper's decoder for items of one shape and inputs of another; it starts as the constant 0."""
    axes = len(target) - 1
    if axes not in _CONV:
        return nn.Sequential(nn.Flatten(), _zero(nn.Linear(math.prod(item), math.prod(target))), _unflatten(target))
    entry, size = _build_entry(item, target, kernel=1)
    stride = 2 if size == target[1:] else 1  # the paper's case: one step up and one down
    wanted = tuple(stride * side for side in target[1:])
    shrink = _CONV[axes](WIDTH, WIDTH, 3, stride=stride, padding=1)
    return nn.Sequential(
        entry, *_build_growth(size, wanted), Resize(wanted), shrink, _zero(_CONV[axes](WIDTH, target[0], 1))
    )


def build_residual_decoder(item: Shape, target: Shape) -> nn.Module:
    """A stronger attacker: the linear decoder, corrected by a residual network; it starts as the constant 0."""
    axes, linear = len(target) - 1, build_linear_decoder(item, target)
    if axes not in _CONV:
        last = _zero(nn.Linear(HIDDEN, math.prod(target)))
        hidden = [nn.Linear(math.prod(item), HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
        return Corrected(linear, nn.Sequential(nn.Flatten(), *hidden, last, _unflatten(target)))
    entry, size = _build_entry(item, target, kernel=3)
    blocks = [Residual(axes, WIDTH) for _ in range(2 if math.prod(size) <= MANY else 1)]  # large maps are slow
    grown = [layer for step in _build_growth(size, target[1:]) for layer in (step, nn.ReLU())]
    last = _zero(_build_conv(axes, WIDTH, target[0]))
    return Corrected(linear, nn.Sequential(entry, nn.ReLU(), *blocks, *grown, Resize(target[1:]), last))


def build_detector(item: Shape) -> nn.Module:
    """FLea's context detector: 1x1 to 32, 3x3 of stride 2, 1x1 to 8, two logits; dense layers for plain vectors."""
    axes = len(item) - 1
    if axes not in _CONV:
        sizes = (math.prod(item), WIDTH, WIDTH, 8)
        dense = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *dense, nn.Linear(8, 2))
    conv, sides = _CONV[axes], [-(-side // 2) for side in item[1:]]
    return nn.Sequential(
        conv(item[0], WIDTH, 1),
        nn.ReLU(),
        conv(WIDTH, WIDTH, 3, stride=2, padding=1),
        nn.ReLU(),
        conv(WIDTH, 8, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * math.prod(sides), 2),
    )


def _build_entry(item: Shape, target: Shape, kernel: int) -> tuple[nn.Module, Shape]:
    """From an item to a map of 32 channels with the target's axes, and its size."""
    axes = len(target) - 1
    if len(item) - 1 == axes:
        return _CONV[axes](item[0], WIDTH, kernel, padding=kernel // 2), item[1:]
    if len(item) == 3 and axes == 1:  # a signal that its network reads as an image: the second axis is channels
        return nn.Sequential(SecondAxisToChannels(), _CONV[1](item[0] * item[2], WIDTH, kernel, padding=kernel // 2)), (
            item[1],
        )
    size = tuple(-(-side // 4) for side in target[1:])
    dense = nn.Linear(math.prod(item), WIDTH * math.prod(size))
    return nn.Sequential(nn.Flatten(), dense, _unflatten((WIDTH, *size))), size


class SecondAxisToChannels(nn.Module):
    """(n, channels, time, places) becomes (n, channels * places, time)."""

    def forward(self, x: Tensor) -> Tensor:
        """The signal."""
        return x.transpose(2, 3).flatten(1, 2)


def _build_growth(size: Sequence[int], wanted: Sequence[int]) -> list[nn.Module]:
    """Transposed convolutions that each double the size, until it is enough."""
    times = max(0, *(math.ceil(math.log2(want / have)) for have, want in zip(size, wanted, strict=True)))
    grow = _GROW[len(size)]
    return [grow(WIDTH, WIDTH, 3, stride=2, padding=1, output_padding=1) for _ in range(times)]


def _build_conv(axes: int, channels: int, width: int) -> nn.Conv1d | nn.Conv2d:
    return _CONV[axes](channels, width, 3, padding=1)


def _unflatten(shape: Shape) -> nn.Module:
    return nn.Unflatten(1, shape)


def _zero(layer: nn.Module) -> nn.Module:
    """Sets a layer to 0: an attacker that has learned nothing guesses the mean."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
