"""FedLC (Zhang et al., 2022): FedAvg with logits calibrated by how often a client has each class.

Departs from the paper: the softmax keeps the true class in its denominator, as all published code does.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedrpc.methods.fedavg import FedAvg, Global
from fedrpc.methods.method import ClientContext, Loss, Params, refused, register
from fedrpc.training.losses import cross_entropy


def compute_margins(counts: Tensor, tau: float) -> Tensor:
    """The margin of each class: tau n^(-1/4), or infinite where the client has no example to be a target."""
    return torch.where(counts > 0, tau * counts.double().clamp(min=1) ** -0.25, math.inf).float()


class FedLCParams(Params):
    """FLea's grid is 0.1 to 1, its script has 1."""

    tau: float = Field(1.0, ge=0, description="scale of the margins")


@register
class FedLC(FedAvg[FedLCParams]):
    """FedAvg with calibrated logits."""

    name = "fedlc"
    dp_sgd = refused("margins depend on a client's class counts, so one record changes the gradient of every example")

    def build_loss(self, ctx: ClientContext[FedLCParams], msg: Global) -> Loss:
        """Cross-entropy on calibrated logits; margins are used in training only."""
        if ctx.params.tau == 0:
            return cross_entropy
        counts = torch.bincount(ctx.data.train.y, minlength=ctx.data.num_classes)
        margin = compute_margins(counts, ctx.params.tau).to(ctx.device)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(x) - margin, y)

        return loss
