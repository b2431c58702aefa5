"""Small smooth images, and evidence made of them, for tests of the attacks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedrpc.study.attacks.evidence import Effort, Evidence, Show

EFFORT = Effort(epochs=5, seed=3, sizes=(30,))


def images(count: int, seed: int = 0, channels: int = 1, side: int = 8) -> Tensor:
    """Blurred noise in [0, 1], mostly dark: neighbours are alike, as in images, and white stands out."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, side // 2, side // 2, generator=generator) ** 3
    return F.interpolate(coarse, (side, side), mode="bilinear", align_corners=False)


def signals(count: int, seed: int = 0) -> Tensor:
    """Waves of three channels, some of them high."""
    generator = torch.Generator().manual_seed(seed)
    phase, height = 6 * torch.rand(count, 3, 1, generator=generator), torch.rand(count, 3, 1, generator=generator) ** 2
    return height * torch.sin(phase + torch.arange(32) / 3)


def single(groups: Tensor) -> Tensor:
    """Shows inputs as they are."""
    return groups[:, 0]


def means(groups: Tensor) -> Tensor:
    """Shows means of groups."""
    return groups.mean(dim=1)


def blind(groups: Tensor) -> Tensor:
    """Shows nothing but a number of places."""
    return torch.zeros(len(groups), 4)


def evidence(
    show: Show = single,
    untrained: Show | None = None,
    *,
    inputs: Tensor | None = None,
    group_size: int = 1,
    num_items: int = 16,
    bounds: tuple[float, float] | None = (0.0, 1.0),
) -> Evidence:
    """What a method with such a view would have shared of the first inputs; the rest is the attacker's."""
    inputs = images(200) if inputs is None else inputs
    hidden = num_items * group_size
    groups = torch.arange(hidden).view(num_items, group_size)
    originals = inputs[:hidden]
    return Evidence(
        show(originals[groups]), originals, groups, inputs[hidden:], show, untrained or show, lambda x: x, bounds
    )
