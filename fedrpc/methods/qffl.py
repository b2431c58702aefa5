"""q-FFL by q-FedAvg (Li et al., 2020): clients with a higher loss move the global model more.

Departs from the paper:
- Clients send the trained model and the loss; the server computes Delta and h from them, so clients need not know q.
- BatchNorm's statistics have no gradient: they move by the same step as the weights, between where they were and where
  clients brought them, and are not part of the squared norm. Averaged whole, they would belong to another model than
  the weights, which go only a part of the way. Counters are the largest of the clients'.
- 1e-10 is added to every loss, as in its authors' code. Powers of losses have a common scale, which
  cancels in the quotient: neither q = 50 nor a loss of 0 overflows.

q depends on the data and must be swept: the step shrinks as q grows, and near convergence q = 1 moves a fiftieth of
FedAvg's way.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from pydantic import Field
from torch import Tensor

from fedrpc.aggregation.mean import WeightedMean
from fedrpc.errors import ConfigError, QuorumError
from fedrpc.methods.fedavg import FedAvg, Global, Update, check_update
from fedrpc.methods.method import ClientContext, Cost, Env, Params, Phase, Round, Shapes, on, refused, register
from fedrpc.metrics.evaluate import BATCH_SIZE, evaluate
from fedrpc.models.state import load
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part

_LEAST_LOSS = 1e-10


@dataclass(frozen=True)
class FairUpdate(Update):
    """Up: FedAvg's update, and the mean loss of the received model on the client's training data."""

    loss: float = part(Kind.SCALARS)


def _check(question: Global, answer: FairUpdate) -> None:
    check_update(question, answer)
    if not 0 <= answer.loss < math.inf:
        raise ValueError(f"the loss of the received model should be a number of at least 0, got {answer.loss}")


FIT = Phase("fit", Global, FairUpdate, same=("weights",), check=_check)


class FairStep:
    """The step of q-FedAvg, one client at a time: start - sum of Delta / sum of h.

    Args:
        start: The model that clients began with.
        parameters: Names of the parameters, whose squared norm counts; all other tensors are buffers.
        q: The weight of fairness.
        lipschitz: L, one over the clients' learning rate.
    """

    def __init__(self, start: Tensors, parameters: Collection[str], *, q: float, lipschitz: float) -> None:
        self._start = {name: value.double() for name, value in start.items() if value.is_floating_point()}
        self._dtypes = {name: value.dtype for name, value in start.items()}
        self._parameters = parameters
        self._q, self._lipschitz = q, lipschitz
        self._scale = -math.inf  # the log of the largest F^q so far, by which both sums are divided
        self._delta: Tensors = {}
        self._h = 0.0
        self._counters = WeightedMean()
        self._names = list(start)

    def add(self, weights: Tensors, loss: float) -> None:
        """Adds one client's model and its loss before training."""
        log_loss = math.log(loss + _LEAST_LOSS)
        share = self._rescale(self._q * log_loss)
        step = {name: self._lipschitz * (value - weights[name].double()) for name, value in self._start.items()}
        norm2 = sum(float(step[name].square().sum()) for name in self._parameters)
        self._h += share * (self._q * norm2 * math.exp(-log_loss) + self._lipschitz)
        for name, tensor in step.items():
            self._delta[name] = self._delta[name].add_(tensor, alpha=share) if name in self._delta else tensor * share
        self._counters.add({name: value for name, value in weights.items() if name not in self._start}, 1.0)

    def _rescale(self, log_power: float) -> float:
        """F^q over the largest one; brings the sums so far to that scale."""
        if log_power > self._scale:
            shrink = math.exp(self._scale - log_power)
            self._scale = log_power
            self._h *= shrink
            for tensor in self._delta.values():
                tensor.mul_(shrink)
        return math.exp(log_power - self._scale)

    @property
    def value(self) -> Tensors:
        """The new model, in the dtypes and the order of the old one."""
        if not self._h:
            raise QuorumError("no client that answered had any training data, so there is no step to take")
        moved: dict[str, Tensor] = {
            name: (value - self._delta[name] / self._h).to(self._dtypes[name]) for name, value in self._start.items()
        }
        both = moved | dict(self._counters.combine())
        return {name: both[name] for name in self._names}


class QFflParams(Params):
    """The Fed-ZDA paper does not give its q; sweep 0.001, 0.01, 0.1 and 1 with `validation`."""

    q: float = Field(0.01, ge=0, description="0 is the uniform mean; more is fairer")


@register
class QFfl(FedAvg[QFflParams]):
    """FedAvg's clients, which also report a loss, and a step that favours clients with a high one."""

    name = "qffl"
    needs_each_update = aggregates_itself = "its step weighs each client's own update by its loss"
    dp_sgd = refused("the loss of the received model leaves a client without noise, and changes the next model")

    def check(self, env: Env[QFflParams]) -> None:
        """Refuses optimizers whose steps are not the gradient times the learning rate."""
        if env.params.q and (env.train.optimizer != "sgd" or env.train.momentum):
            raise ConfigError(
                "qffl uses one over the learning rate as the smoothness of the loss, which holds for plain SGD only, "
                f"got {env.train.optimizer} with momentum {env.train.momentum:g}; "
                "set train.optimizer=sgd and train.momentum=0"
            )

    async def round(self, state: Global, rnd: Round[QFflParams]) -> Global:
        """Asks the cohort to train and takes the step."""
        parameters = [name for name, _ in rnd.model().named_parameters()]
        step = FairStep(state.weights, parameters, q=rnd.params.q, lipschitz=1 / rnd.learning_rate())
        losses, before = {}, {}
        async for reply in rnd.ask(FIT, state):
            update = reply.body
            losses[reply.client] = update.losses.tolist()
            if update.num_examples:
                before[reply.client] = update.loss
                await rnd.compute(step.add, update.weights, update.loss)
        rnd.record(local_losses=losses, losses_before=before)
        if not losses:  # all abstained
            return state
        return Global(await rnd.compute(lambda: step.value))

    @on(FIT)
    def fit(self, ctx: ClientContext[QFflParams], msg: Global) -> FairUpdate:
        """Evaluates the received model on the client's training data, then trains it."""
        model = ctx.model()
        load(model, msg.weights)
        batches = ctx.data.train.batches(BATCH_SIZE)
        evaluation = evaluate(model, batches, num_classes=ctx.data.num_classes, device=ctx.device)
        update = super().fit(ctx, msg)
        return FairUpdate(**vars(update), loss=evaluation.loss or 0.0)

    def cost(self, shapes: Shapes[QFflParams]) -> Cost:
        """FedAvg's, plus one more scalar up for each participation."""
        return super().cost(shapes).add("up", Kind.SCALARS, 8 * shapes.num_asked)
