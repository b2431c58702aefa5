"""FedVAE (Chen and Vikalo, 2022, beside FedDPMS): FedAvg on a network that also reconstructs its inputs.

It is a variational auto-encoder with a classifier on its latent vector: encoder, both heads, classifier and decoder are
trained on cross-entropy plus `lam` times divergence and reconstruction, and all of them travel and are averaged.

Departs from the paper: nothing. Where the paper is silent, `blocks/vae.py` defines the terms. The configured network
must be `dpms`: encoder, latent mean and classifier, on which all other methods can run too, for a fair comparison.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field
from torch import nn

from fedrpc.methods.blocks.vae import Pixels, VaeLoss
from fedrpc.methods.fedavg import FedAvg, Global
from fedrpc.methods.method import ClientContext, Env, Loss, Params, allowed, register
from fedrpc.models.dpms import Vae, require_latent


class FedVaeParams(Params):
    """The paper's value."""

    lam: float = Field(0.05, ge=0, description="weight of divergence and reconstruction")


@register
class FedVae(FedAvg[FedVaeParams]):
    """FedAvg on a variational auto-encoder.

    DP-SGD is allowed: every term of the loss is a mean over examples, and the latent noise depends on no data.
    """

    name = "fedvae"
    needs_model = "dpms"
    dp_sgd = allowed()

    def network(self, build: Callable[[], nn.Module], params: FedVaeParams) -> nn.Module:
        """The configured network with a decoder and a log-variance head."""
        return Vae(require_latent(build(), self.name))

    def check(self, env: Env[FedVaeParams]) -> None:
        """Refuses data without bounds."""
        Pixels.of(env, self.name)

    def build_loss(self, ctx: ClientContext[FedVaeParams], msg: Global) -> Loss:
        """The classifying auto-encoder's loss."""
        return VaeLoss(ctx.params.lam, Pixels.of(ctx.env, self.name))
