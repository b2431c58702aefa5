"""FLea: the loss of local training on mixed activations, with distillation and de-correlation (equation 6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrpc.methods.blocks.mixup import EndlessOrder, mix, one_hot, soft_cross_entropy
from fedrpc.methods.flea.messages import (
    Features,
)
from fedrpc.metrics.features import dcor2
from fedrpc.models import cut, require_stages


def kl_divergence(log_p: Tensor, log_g: Tensor) -> Tensor:
    """KL(p || g) of log-probabilities, mean over the batch."""
    return (log_p.exp() * (log_p - log_g)).sum(dim=1).mean()


class Objective:
    """Equation 6 on the batches of one local training.

    Args:
        cut: The stage after which networks are cut.
        received: The received network, which is frozen; without it there is no distillation.
        buffer: The activations to mix with; None in the first round.
        lambda2: The round's weight of the distance correlation.
        order: Shuffles the buffer.
        weights: Samples the weights of the mix-up.
    """

    def __init__(
        self,
        params: Any,
        layer: int,
        received: nn.Module | None,
        buffer: Features | None,
        *,
        lambda2: float,
        order: np.random.Generator,
        weights: np.random.Generator,
    ) -> None:
        self._params, self._cut, self._buffer, self._weights = params, layer, buffer, weights
        self._lambda2 = lambda2
        self._received_tail = cut(received.eval().requires_grad_(False), layer)[1] if received is not None else None
        self._order = EndlessOrder(order, len(buffer.labels)) if buffer is not None else None

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch, which passes through every layer of the model once."""
        head, tail = cut(model, self._cut)
        own = head(x)
        activations, wanted = self._mix_batch(own, y, num_classes=require_stages(model, "flea").classifier.out_features)
        log_p = F.log_softmax(tail(activations), dim=1)
        loss = soft_cross_entropy(log_p, wanted)
        if self._received_tail is not None:
            with torch.no_grad():
                log_g = F.log_softmax(self._received_tail(activations), dim=1)
            loss = loss + self._params.lambda1 * kl_divergence(log_p, log_g)
        if self._lambda2:
            loss = loss + self._lambda2 * self._correlate(require_stages(model, "flea").select_input(x), own)
        return loss

    def _correlate(self, x: Tensor, own: Tensor) -> Tensor:
        """How much the activations reveal of the inputs."""
        squared = dcor2(x, own)
        if self._params.decorrelation == "dcor2":
            return squared
        # The root has an infinite gradient at 0: a batch of one, or of equal examples, gets 0 and no gradient.
        known = squared > 0
        return torch.where(known, torch.where(known, squared, torch.ones_like(squared)).sqrt(), squared)

    def _mix_batch(self, own: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        """Equation 2: mixed activations and label distributions, each pair with a weight of its own."""
        wanted = one_hot(y, num_classes)
        if self._buffer is None or self._order is None:
            return own, wanted
        index = torch.from_numpy(self._order.take(len(y)))
        theirs, labels = self._buffer.activations[index], self._buffer.labels[index]
        weight = torch.from_numpy(self._weights.beta(self._params.a, self._params.a, len(y)))
        return mix(own, theirs, weight), mix(wanted, one_hot(labels, num_classes), weight)
