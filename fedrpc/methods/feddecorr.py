"""FedDecorr (Shi et al., 2023): FedAvg with a penalty on correlated features, against dimensional collapse.

Departs from the paper: the penalty has the scale of the published code (the squared off-diagonal entries of the
unnormalised correlation matrix over the batch size), for which beta = 0.1 was tuned.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedrpc.methods.fedavg import FedAvg, Global
from fedrpc.methods.method import ClientContext, Loss, Params, refused, register
from fedrpc.models import require_stages
from fedrpc.training.losses import cross_entropy

_EPS = 1e-8  # a constant feature has no variance to divide by


def decorrelation_loss(features: Tensor) -> Tensor:
    """Mean squared off-diagonal entry of Z'Z over the batch size, Z standardised by batch; 0 for one example."""
    n, d = features.shape
    if n == 1 or d == 1:
        return features.new_zeros(())
    z = features - features.mean(dim=0)
    z = z / torch.sqrt(z.var(dim=0) + _EPS)
    # Z'Z and ZZ' have the same sum of squares; the smaller is faster, by far with 8,448 features of 32 examples.
    total = (z @ z.T if n < d else z.T @ z).square().sum()
    diagonal = z.square().sum(dim=0).square().sum()
    return (total - diagonal) / (d * (d - 1)) / n


class FedDecorrParams(Params):
    """The paper's value."""

    beta: float = Field(0.1, ge=0, description="weight of the penalty")


@register
class FedDecorr(FedAvg[FedDecorrParams]):
    """FedAvg with decorrelated features."""

    name = "feddecorr"
    dp_sgd = refused("the penalty couples the examples of a batch, so there are no per-example gradients")

    def build_loss(self, ctx: ClientContext[FedDecorrParams], msg: Global) -> Loss:
        """Cross-entropy plus the penalty on the penultimate features."""
        beta: float = ctx.params.beta
        if beta == 0:
            return cross_entropy

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            parts = require_stages(model, "feddecorr")
            features = parts.features(x)
            return F.cross_entropy(parts.classifier(features), y) + beta * decorrelation_loss(features)

        return loss
