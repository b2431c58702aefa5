"""Structural similarity of images or signals (Wang et al., 2004)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW, SIGMA = 11, 1.5  # as in the paper
K1, K2 = 0.01, 0.03


def ssim(a: Tensor, b: Tensor, data_range: float) -> Tensor:
    """The structural similarity of each pair: 1 for equal ones, about 0 for unrelated ones, below 0 for opposite ones.

    A Gaussian window of at most 11 values moves within the sample; channels are averaged.

    Args:
        a: Samples (n, channels, time) or (n, channels, height, width).
        b: Samples of the same shape.
        data_range: The difference between the largest and the smallest possible value.
    """
    if a.shape != b.shape or a.dim() not in (3, 4):
        raise ValueError(f"ssim needs pairs of signals or images, got {tuple(a.shape)} and {tuple(b.shape)}")
    if data_range <= 0:
        raise ValueError(f"a data range is above 0, got {data_range}")
    a, b = a.double(), b.double()  # variances are differences of squares
    c1, c2 = (K1 * data_range) ** 2, (K2 * data_range) ** 2
    mean_a, mean_b = _blur(a), _blur(b)
    spread_a, spread_b = _blur(a * a) - mean_a**2, _blur(b * b) - mean_b**2
    together = _blur(a * b) - mean_a * mean_b
    light = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * together + c2) / (spread_a + spread_b + c2)
    return (light * structure).flatten(1).mean(dim=1)


def _blur(x: Tensor) -> Tensor:
    """Weighted means over the window, one axis after the other, where it fits whole."""
    size = min(WINDOW, *x.shape[2:])
    size -= 1 - size % 2
    at = torch.arange(size, dtype=x.dtype, device=x.device) - size // 2
    weights = torch.exp(-(at**2) / (2 * SIGMA**2))
    weights = weights / weights.sum()
    convolve = F.conv1d if x.dim() == 3 else F.conv2d
    for axis in range(2, x.dim()):
        shape = [x.shape[1], 1, *(size if place == axis else 1 for place in range(2, x.dim()))]
        x = convolve(x, weights.view(shape[1:]).expand(shape), groups=x.shape[1])
    return x
