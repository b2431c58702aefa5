"""FedAvg (McMahan et al., 2017): local SGD on every sampled client, then the mean of their models weighted by examples.

Departs from the paper: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrpc.methods.blocks.updates import release_update, weigh_equally
from fedrpc.methods.method import ClientContext, Cost, Env, Loss, Method, P, Phase, Round, Shapes, allowed, on, register
from fedrpc.models.state import load, read_tensors
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part


@dataclass(frozen=True)
class Global:
    """Down: the global model. Also the server's whole state."""

    weights: Tensors = part(Kind.WEIGHTS)


@dataclass(frozen=True)
class Update:
    """Up: the locally trained model, the number of examples it was trained on, and the mean loss of each epoch."""

    weights: Tensors = part(Kind.WEIGHTS, averaged_by="num_examples")
    num_examples: int = part(Kind.SCALARS, counts_examples=True)
    losses: Tensor = part(Kind.SCALARS, by_epoch=True)


@dataclass(frozen=True)
class EqualUpdate(Update):
    """Up: the same for methods whose mean is uniform over the clients that trained on anything."""

    weights: Tensors = part(Kind.WEIGHTS, averaged_by=weigh_equally)


def check_update(question: Global, answer: Update) -> None:
    """Raises ValueError when an update is invalid."""
    if answer.num_examples < 0 or answer.losses.dtype != torch.float64 or answer.losses.dim() != 1:
        raise ValueError("an update needs a number of examples of at least 0 and a loss for each epoch")


# An update's weights must have the names, shapes and dtypes of the model that was sent.
FIT = Phase("fit", Global, Update, same=("weights",), check=check_update)


@register
class FedAvg(Method[Global, P]):
    """Both halves of FedAvg."""

    name = "fedavg"
    dp_sgd = allowed()

    def init(self, env: Env[P]) -> Global:
        """The configured network's initial weights."""
        return Global(read_tensors(env.model()))

    async def round(self, state: Global, rnd: Round[P]) -> Global:
        """Asks the cohort to train; the aggregate of its models is the next one."""
        fit = await rnd.mean(FIT, state)
        rnd.record(local_losses={client: answer.losses.tolist() for client, answer in fit.answers.items()})
        return Global(fit.weights) if fit.clients else state  # unchanged if all abstained

    @on(FIT)
    def fit(self, ctx: ClientContext[P], msg: Global) -> Update:
        """Trains the received model on the client's own data."""
        model = ctx.model()
        load(model, msg.weights)
        report = ctx.train(model, self.build_loss(ctx, msg), on_grad=self.build_correction(ctx, msg))
        return Update(**release_update(ctx, model, report))  # its fields, each with a privacy row

    def build_loss(self, ctx: ClientContext[P], msg: Global) -> Loss:
        """The loss of a batch; methods that change nothing else override this."""
        return cross_entropy

    def build_correction(self, ctx: ClientContext[P], msg: Global) -> Callable[[nn.Module], None] | None:
        """A function that changes every gradient: for terms of the weights alone, which DP-SGD need not clip."""
        return None

    def model(self, state: Global) -> Tensors:
        """The global model."""
        return state.weights

    def cost(self, shapes: Shapes[P]) -> Cost:
        """The model both ways for each participation; up also the number of examples and a loss for each epoch."""
        n, size = shapes.num_asked, shapes.weights_bytes
        cost = Cost().add("down", Kind.WEIGHTS, n * size).add("up", Kind.WEIGHTS, n * size)
        return cost.add("up", Kind.SCALARS, n * 8 * (1 + shapes.env.train.epochs))
