"""FedProx (Li et al., 2020): FedAvg whose local objective is pulled towards the received model.

Departs from the paper: every client does all its epochs (no partial work from stragglers). Reported
losses exclude the proximal term, whose gradient is added directly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import Field
from torch import nn

from fedrpc.methods.fedavg import FedAvg, Global
from fedrpc.methods.method import ClientContext, Params, allowed, register
from fedrpc.wire.message import Tensors


def add_proximal_gradient(model: nn.Module, anchor: Tensors, mu: float) -> None:
    """Adds the gradient of half mu times the squared distance of all trainable parameters to the received ones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter - anchor[name], alpha=mu)


class FedProxParams(Params):
    """FedDPMS uses 0.001; FLea's grid is 0.1, 0.01, 0.001."""

    mu: float = Field(0.01, ge=0, description="weight of the proximal term")


@register
class FedProx(FedAvg[FedProxParams]):
    """FedAvg with a proximal term."""

    name = "fedprox"
    dp_sgd = allowed()

    def build_correction(self, ctx: ClientContext[FedProxParams], msg: Global) -> Callable[[nn.Module], None] | None:
        """The gradient of the proximal term; it depends on no data, so DP-SGD need not clip or charge it."""
        mu: float = ctx.params.mu
        if mu == 0:
            return None
        anchor = {name: tensor.to(ctx.device) for name, tensor in msg.weights.items()}
        return lambda model: add_proximal_gradient(model, anchor, mu)
