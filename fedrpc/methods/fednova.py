"""FedNova (Wang et al., NeurIPS 2020): updates are normalised by the clients' local steps before they are averaged.

Client i trains y_i from x; a_i, its effective steps, is the sum of the coefficients with which its gradients enter
x - y_i, over the learning rate: the number of steps, or more with momentum. With p_i its share of the examples,
d_i = (x - y_i) / a_i and tau_eff = sum p_i a_i: x <- x - tau_eff sum p_i d_i.

Departs from the paper:
- x - d_i travels, so that the run's aggregators see a model; tau_eff scales the step that they make of it. So a server
  optimizer works on normalised updates, and its rate is multiplied by tau_eff.
- BatchNorm's buffers have no gradient: they are averaged, and not scaled.
- The proximal variant is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.updates import release_update, train_cohort
from fedrpc.methods.fedavg import FedAvg, Global, Update, check_update
from fedrpc.methods.method import ClientContext, Cost, Env, Params, Phase, Round, Shapes, allowed, on, register
from fedrpc.models.state import load
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import part


@dataclass(frozen=True)
class NormalisedUpdate(Update):
    """Up: FedAvg's update, with the received model moved by the normalised update, and the effective steps."""

    effective_steps: float = part(Kind.SCALARS)


def _check(question: Global, answer: NormalisedUpdate) -> None:
    check_update(question, answer)
    if not 0 <= answer.effective_steps < math.inf:
        raise ValueError(f"effective steps should be a number of at least 0, got {answer.effective_steps}")


FIT = Phase("fit", Global, NormalisedUpdate, same=("weights",), check=_check)


def count_effective_steps(num_steps: int, momentum: float) -> float:
    """The sum of the coefficients of all gradients in the local change: (1 - rho^k) / (1 - rho) for k = 1, 2, ..."""
    return (num_steps - momentum * (1 - momentum**num_steps) / (1 - momentum)) / (1 - momentum)


@register
class FedNova(FedAvg[Params]):
    """FedAvg with normalised updates.

    DP-SGD is allowed: what travels follows from the privately trained model and from the number of its steps, which
    follows from the number of examples.
    """

    name = "fednova"
    dp_sgd = allowed()

    def check(self, env: Env[Params]) -> None:
        """Refuses optimizers in whose steps gradients have no known coefficients."""
        if env.train.optimizer != "sgd":
            raise ConfigError(
                "fednova divides an update by the coefficients of its gradients, which are known for SGD with or "
                f"without momentum, got {env.train.optimizer}; set train.optimizer=sgd"
            )

    async def round(self, state: Global, rnd: Round[Params]) -> Global:
        """Asks the cohort to train and scales the mean normalised update by the mean of effective steps."""
        train = rnd.env.train

        def check(_: Global, answer: NormalisedUpdate) -> None:
            batches = train.epochs * math.ceil(answer.num_examples / train.batch_size)
            if answer.effective_steps > (most := count_effective_steps(batches, train.momentum)):
                raise ValueError(f"effective steps should be {most:g} at most, got {answer.effective_steps:g}")

        fit = await train_cohort(rnd, FIT, state, check=check)
        if not fit.clients:
            return state
        answers = fit.answers.values()
        steps = sum(a.num_examples * a.effective_steps for a in answers) / sum(a.num_examples for a in answers)
        rnd.record(effective_steps=steps)
        learned, x = {name for name, _ in rnd.model().named_parameters(remove_duplicate=False)}, state.weights
        return Global({n: x[n].lerp(mean, steps) if n in learned else mean for n, mean in fit.weights.items()})

    @on(FIT)
    def fit(self, ctx: ClientContext[Params], msg: Global) -> NormalisedUpdate:
        """Trains the received model, and normalises how far it moved."""
        model = ctx.model()
        load(model, msg.weights)
        report = ctx.train(model, cross_entropy)
        steps = count_effective_steps(report.num_steps, ctx.env.train.momentum)
        with torch.no_grad():
            for name, y in model.named_parameters():
                x = msg.weights[name].to(y.device)
                y.copy_(x.lerp(y, 1 / steps) if steps else x)
        update = release_update(ctx, model, report)
        return NormalisedUpdate(**update, effective_steps=ctx.release("effective_steps", steps, report.described))

    def cost(self, shapes: Shapes[Params]) -> Cost:
        """FedAvg's, and one more scalar up for each participation."""
        return super().cost(shapes).add("up", Kind.SCALARS, 8 * shapes.num_asked)
