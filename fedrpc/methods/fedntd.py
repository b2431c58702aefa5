"""FedNTD (Lee et al., 2022): FedAvg that distils the received model's predictions for the not-true classes.

Departs from the paper: nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedrpc.methods.fedavg import FedAvg, Global
from fedrpc.methods.method import ClientContext, Loss, Params, allowed, register
from fedrpc.models.state import load
from fedrpc.training.losses import cross_entropy


def drop_true_class(logits: Tensor, y: Tensor) -> Tensor:
    """The logits without the true class's column."""
    # By position: a mask would make the host wait for the device, to count what it selects.
    others = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, others + (others >= y[:, None]))


def not_true_distillation_loss(student: Tensor, teacher: Tensor, y: Tensor, tau: float) -> Tensor:
    """tau^2 KL(teacher || student) over the not-true classes, mean over the batch."""
    log_student = F.log_softmax(drop_true_class(student, y) / tau, dim=1)
    log_teacher = F.log_softmax(drop_true_class(teacher, y) / tau, dim=1)
    return tau**2 * F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)


class FedNTDParams(Params):
    """The values of the authors' configuration."""

    beta: float = Field(1.0, ge=0, description="weight of the distillation")
    tau: float = Field(1.0, gt=0, description="temperature of the distillation")


@register
class FedNTD(FedAvg[FedNTDParams]):
    """FedAvg with not-true distillation."""

    name = "fedntd"
    dp_sgd = allowed()

    def build_loss(self, ctx: ClientContext[FedNTDParams], msg: Global) -> Loss:
        """Cross-entropy plus distillation from the received model, frozen and in evaluation mode."""
        beta: float = ctx.params.beta
        tau: float = ctx.params.tau
        if beta == 0:
            return cross_entropy
        teacher = ctx.model().eval().requires_grad_(False)
        load(teacher, msg.weights)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            logits = model(x)
            with torch.no_grad():
                wanted = teacher(x)
            return F.cross_entropy(logits, y) + beta * not_true_distillation_loss(logits, wanted, y, tau)

        return loss
