"""NaiveMix (Yoon et al., ICLR 2021; what FLea calls FedMix): plain mix-up with other clients' averaged data.

Departs from the paper:
- As in FLea (Xia et al., KDD 2024), one weight for a whole batch is sampled from Beta(2, 2); the original has a
  fixed weight. The loss is cross-entropy with the mixed labels alone.
- Every example of a batch is paired with a mean of its own, sampled again in each batch.
- A client's own means stay in the pool. Examples that do not fill a group of `mean_size` are not shared.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedrpc.methods.blocks.mixup import mix, one_hot, soft_cross_entropy
from fedrpc.methods.fedmix import MeanMixMethod, Means, MixParams
from fedrpc.methods.method import ClientContext, Loss, refused, register


class NaiveMixParams(MixParams):
    """FLea's values."""

    a: float = Field(2.0, gt=0, description="the weight of a batch is sampled from Beta(a, a)")


@register
class NaiveMix(MeanMixMethod[NaiveMixParams]):
    """FedMix's pool of means, with mix-up that is not approximated."""

    name = "naivemix"
    dp_sgd = refused("means of private inputs leave a client without noise, and clients train on them")

    def uses_pool(self, params: NaiveMixParams) -> bool:
        """Always: a weight from a Beta distribution never excludes the pool."""
        return True

    def build_mixed_loss(self, ctx: ClientContext[NaiveMixParams], pool: Means) -> Loss:
        """Soft-label cross-entropy of the mixed batch."""
        a, rng, num_classes = ctx.params.a, ctx.rng("mixup"), ctx.env.num_classes

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            weight = torch.tensor([rng.beta(a, a)])
            x_mean, y_mean = pool.sample(rng, len(x), x.device)
            log_p = F.log_softmax(model(mix(x, x_mean, weight)), dim=1)
            return soft_cross_entropy(log_p, mix(one_hot(y, num_classes), y_mean, weight))

        return loss
