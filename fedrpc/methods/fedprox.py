"""FedProx (Li et al., 2020): FedAvg whose local objective is pulled towards the received model.

Departs from the paper: every client does all its epochs (no partial work from stragglers).
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from fedrpc.methods import base
from fedrpc.methods.base import ClientContext, Loss, register
from fedrpc.methods.fedavg import FedAvg, Global, cross_entropy
from fedrpc.wire.message import Tensors


def proximal(model: nn.Module, anchor: Tensors, mu: float) -> Tensor:
    """Half mu times the squared distance of all trainable parameters to the received ones; buffers do not count."""
    squares = [(p - anchor[name]).square().sum() for name, p in model.named_parameters() if p.requires_grad]
    return 0.5 * mu * torch.stack(squares).sum()


@register
class FedProx(FedAvg):
    """FedAvg with a proximal term."""

    name = "fedprox"

    class Params(base.Params):
        """Card values: FedDPMS uses 0.001; FLea's grid is 0.1, 0.01, 0.001."""

        mu: float = Field(0.01, ge=0)

    def objective(self, ctx: ClientContext, msg: Global) -> Loss:
        """Cross-entropy plus the proximal term."""
        mu: float = ctx.params.mu
        if mu == 0:
            return cross_entropy
        anchor = {name: tensor.to(ctx.device) for name, tensor in msg.weights.items()}
        return lambda model, x, y: cross_entropy(model, x, y) + proximal(model, anchor, mu)
