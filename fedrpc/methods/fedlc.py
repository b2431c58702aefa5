"""FedLC (Zhang et al., 2022): FedAvg with logits calibrated by how often a client has each class.

Departs from the paper: the softmax keeps the true class in its denominator, as all published code does.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedrpc.methods.fedavg import FedAvg, Global
from fedrpc.methods.method import ClientContext, Loss, Params, refused, register
from fedrpc.training.losses import cross_entropy

_ALMOST_NONE = 1e-6  # examples of an absent class, as FLea's code counts them


def compute_margins(counts: Tensor, tau: float, *, mask: bool = True) -> Tensor:
    """The margin of each class: tau n^(-1/4).

    Args:
        counts: The client's number of examples of each class.
        mask: Whether classes without any get an infinite margin, which takes them out of the softmax; otherwise their
            margin is that of a millionth of an example, 31.6 tau.
    """
    margins = tau * counts.double().clamp(min=_ALMOST_NONE) ** -0.25
    return torch.where(counts > 0, margins, math.inf).float() if mask else margins.float()


class FedLCParams(Params):
    """FLea's grid is 0.1 to 1, its script has 1."""

    tau: float = Field(1.0, ge=0, description="scale of the margins")
    absent: Literal["mask", "margin"] = Field(
        "mask", description="classes that a client lacks: out of the softmax, or with a margin of 31.6 tau"
    )


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
        margin = compute_margins(counts, ctx.params.tau, mask=ctx.params.absent == "mask").to(ctx.device)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(x) - margin, y)

        return loss
