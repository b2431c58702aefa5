"""A multilayer perceptron, the default network for tables."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedrpc.errors import ConfigError
from fedrpc.models.base import Model, Shape, architecture


@architecture("mlp", takes="a row of numbers, such as (12,)", fits=lambda shape: len(shape) == 1)
class Mlp(Model):
    """Two hidden layers with ReLU, and one linear layer; a cut is legal after each hidden layer.

    It has no BatchNorm: an imported table is standardised already, and clients' own statistics would differ.

    Args:
        shape: The number of columns of a row.
        num_classes: How many logits.
        width: The units of a hidden layer.
        depth: The number of hidden layers.
    """

    def __init__(self, shape: Shape, num_classes: int, width: int = 64, depth: int = 2) -> None:
        if width < 1 or depth < 1:
            raise ConfigError(f"mlp needs a width and a depth of 1 or more, got {width} and {depth}")
        widths = [shape[0], *[width] * depth]
        stages = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths)]
        super().__init__(stages, nn.Linear(width, num_classes))
