"""FedAvg (McMahan et al., 2017): local SGD on every sampled client, then the mean of their models by sample count.

Departs from the paper: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrpc.aggregation.mean import WeightedMean
from fedrpc.methods.method import (
    ClientContext,
    Cost,
    Env,
    Loss,
    Method,
    P,
    Phase,
    Round,
    Shapes,
    TrainReport,
    allowed,
    on,
    register,
)
from fedrpc.models.state import load, read_tensors
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part


@dataclass(frozen=True)
class Global:
    """Down: the global model. Also the server's whole state."""

    weights: Tensors = part(Kind.WEIGHTS)


@dataclass(frozen=True)
class Update:
    """Up: the locally trained model, how many examples it saw, and the mean loss of each local epoch."""

    weights: Tensors = part(Kind.WEIGHTS)
    num_examples: int = part(Kind.SCALARS)
    losses: Tensor = part(Kind.SCALARS)


def check_update(question: Global, answer: Update) -> None:
    """Raises ValueError when an update makes no sense."""
    if answer.num_examples < 0 or answer.losses.dtype != torch.float64 or answer.losses.dim() != 1:
        raise ValueError("an update needs a sample count of at least 0 and a loss for each epoch")


FIT = Phase("fit", Global, Update, same=("weights",), check=check_update)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The local objective."""
    return F.cross_entropy(model(x), y)


def update_of(ctx: ClientContext, model: nn.Module, report: TrainReport) -> Update:
    """A trained model as it goes up, with what its training promises."""
    return Update(
        ctx.release("weights", read_tensors(model), report.covered),
        ctx.release("num_examples", report.num_examples, report.described),
        ctx.release("losses", torch.tensor(report.epoch_losses, dtype=torch.float64), report.described),
    )


class Average:
    """The mean of a round's updates over those who answered, and the record of their losses.

    Attributes:
        losses: By client. Empty when all abstained, their privacy budget being spent: the state then stays as it is.
    """

    def __init__(self, rnd: Round) -> None:
        self._rnd, self._mean = rnd, WeightedMean()
        self.losses: dict[int, list[float]] = {}
        rnd.record(local_losses=self.losses)

    async def add(self, client: int, update: Update, weight: float | None = None) -> None:
        """Adds a client's update by its sample count, or by another weight."""
        await self._rnd.compute(self._mean.add, update.weights, update.num_examples if weight is None else weight)
        self.losses[client] = update.losses.tolist()

    @property
    def weights(self) -> Tensors:
        """The mean."""
        return self._mean.value


@register
class FedAvg(Method[Global, P]):
    """Both halves of FedAvg."""

    name = "fedavg"
    dp_sgd = allowed()

    def init(self, env: Env[P]) -> Global:
        """The configured network's initial weights."""
        return Global(read_tensors(env.model()))

    async def round(self, state: Global, rnd: Round[P]) -> Global:
        """Asks the cohort to train and averages what comes back."""
        average = Average(rnd)
        async for reply in rnd.ask(FIT, state):
            await average.add(reply.client, reply.body)
        return Global(average.weights) if average.losses else state

    @on(FIT)
    def fit(self, ctx: ClientContext[P], msg: Global) -> Update:
        """Trains the received model on the client's own data."""
        model = ctx.model()
        load(model, msg.weights)
        report = ctx.train(model, self.objective(ctx, msg), on_grad=self.correction(ctx, msg))
        return update_of(ctx, model, report)

    def objective(self, ctx: ClientContext[P], msg: Global) -> Loss:
        """The loss of a batch; methods that change nothing else override this."""
        return cross_entropy

    def correction(self, ctx: ClientContext[P], msg: Global) -> Callable[[nn.Module], None] | None:
        """What is done to every gradient; for terms of weights alone, which DP-SGD need not touch."""
        return None

    def model(self, state: Global) -> Tensors:
        """The global model."""
        return state.weights

    def cost(self, shapes: Shapes[P]) -> Cost:
        """The model both ways for each participation; up also the sample count and a loss for each epoch."""
        n = shapes.num_asked
        return (
            Cost()
            .add("down", Kind.WEIGHTS, n * shapes.weights_bytes)
            .add("up", Kind.WEIGHTS, n * shapes.weights_bytes)
            .add("up", Kind.SCALARS, n * 8 * (1 + shapes.env.train.epochs))
        )
