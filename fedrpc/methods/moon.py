"""MOON (Li et al., CVPR 2021): FedAvg with representations near the received model's, far from the previous one's.

Departs from the paper: the projection head's hidden layer has at most 256 units by default. The authors' is as wide as
the features, 84 or 512 in their networks; of a network with 1,568 features it would have 99 times FedAvg's bytes. Set
`hidden` to the number of features for theirs.

Where the paper is silent, or where others differ:
- A representation is the output of the projection head, two layers that the method puts between the configured
  network's features and a new output layer, so the network is larger than FedAvg's and travels whole.
- A client that takes part for the first time has no previous model, and trains on cross-entropy alone; with the
  received model in its place the term would be the constant log 2, and its gradient zero.
- The previous model is the one that this client sent last, whenever that was. It stays in the client's private store.
- FedDPMS's code compares class logits; here it is the projection head's outputs, as in the MOON paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedrpc.methods.fedavg import FIT, FedAvg, Global, Update
from fedrpc.methods.method import ClientContext, Loss, Params, allowed, on, register
from fedrpc.models import Model, require_stages
from fedrpc.models.state import load
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.message import Tensors

PREVIOUS = "previous"  # its key in a client's store
WIDTH = 256  # of a representation


@dataclass(frozen=True)
class Previous:
    """In a client's store: the model that it sent last."""

    weights: Tensors


def add_projection(model: nn.Module, hidden: int | None = None) -> nn.Module:
    """The network with a projection head and a new output layer after its features.

    Args:
        hidden: Units of the head's hidden layer; as many as there are features, and at most 256, by default.
    """
    parts = require_stages(model, "moon")
    features, classes = parts.classifier.in_features, parts.classifier.out_features
    hidden = min(features, WIDTH) if hidden is None else hidden
    parts.stages.append(nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH)))
    parts.classifier = nn.Linear(WIDTH, classes)
    return parts


def contrastive_loss(z: Tensor, received: Tensor, previous: Tensor, tau: float) -> Tensor:
    """-log(e^near / (e^near + e^far)) of the similarities to both models' representations, mean over the batch."""
    near, far = F.cosine_similarity(z, received), F.cosine_similarity(z, previous)
    return F.softplus((far - near) / tau).mean()


class MoonParams(Params):
    """The paper's temperature; FedDPMS tunes mu among 1, 5 and 10."""

    mu: float = Field(5.0, ge=0, description="weight of the contrastive term")
    tau: float = Field(0.5, gt=0, description="temperature of the similarities")
    hidden: int | None = Field(None, ge=1, description="units of the head's hidden layer; at most 256 by default")


@register
class Moon(FedAvg[MoonParams]):
    """FedAvg with a model-contrastive term.

    DP-SGD is allowed. Cross-entropy and the contrastive term are means of one term for each example; the two frozen
    models are the received one and the one that this client sent last, which private training covers already. So an
    example's gradient depends on other examples only through releases, and rounds compose.
    """

    name = "moon"
    dp_sgd = allowed()

    def network(self, build: Callable[[], nn.Module], params: MoonParams) -> nn.Module:
        """The configured network with a projection head before its output layer."""
        return add_projection(build(), params.hidden)

    @on(FIT)
    def fit(self, ctx: ClientContext[MoonParams], msg: Global) -> Update:
        """Trains the received model, and stores the result for the client's next round."""
        update = super().fit(ctx, msg)
        if ctx.params.mu:
            ctx.store.put(PREVIOUS, Previous(update.weights))
        return update

    def build_loss(self, ctx: ClientContext[MoonParams], msg: Global) -> Loss:
        """Cross-entropy plus the contrastive term, once the client has a previous model."""
        mu, tau = ctx.params.mu, ctx.params.tau
        kept = ctx.store.get(PREVIOUS, Previous)
        if not mu or kept is None:
            return cross_entropy
        received, previous = _load_frozen(ctx, msg.weights), _load_frozen(ctx, kept.weights)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            parts = require_stages(model, self.name)
            z = parts.features(x)
            with torch.no_grad():
                anchors = received.features(x), previous.features(x)
            total: Tensor = F.cross_entropy(parts.classifier(z), y) + mu * contrastive_loss(z, *anchors, tau)
            return total

        return loss


def _load_frozen(ctx: ClientContext[MoonParams], weights: Tensors) -> Model:
    model = require_stages(ctx.model().eval().requires_grad_(False), Moon.name)
    load(model, weights)
    return model
