"""Losses that several methods and the oracle share."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # of a model, and the inputs and labels of a batch


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of a model's logits, averaged over the batch."""
    return F.cross_entropy(model(x), y)
