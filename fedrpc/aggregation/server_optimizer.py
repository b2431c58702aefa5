"""Server optimizers (Reddi et al., 2021): the mean update as a gradient for FedAvgM, FedAdam, FedYogi, FedAdagrad.

With x the model that clients started from and D = mean - x: m <- beta1 m + (1 - beta1) D, v by the rule of each
optimizer, x <- x + lr m / (sqrt(v) + tau); v starts at tau^2, and there is no bias correction. FedAvgM has no v:
m <- beta m + D, x <- x + lr m.

Only parameters are optimized. BatchNorm's statistics, which have no gradient, are the clients' mean, and so is any
other field that is averaged (a decoder).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from fedrpc.aggregation.aggregator import Aggregator, P, register_aggregator
from fedrpc.errors import ConfigError
from fedrpc.methods.phases import Answering, Params
from fedrpc.methods.runtime import Env, Round
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, averaged_fields, part

FIELD = "weights"  # the answers' field with the run's network in it


@dataclass(frozen=True)
class Moments:
    """The optimizer's state: first and second moments by parameter; empty before the first step."""

    first: Tensors = part(Kind.WEIGHTS)
    second: Tensors = part(Kind.WEIGHTS)


class MomentumParams(Params):
    """FedAvgM."""

    lr: float = Field(1.0, gt=0, description="server learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="share of the last step that is added to the next")


class AdaptiveParams(Params):
    """The paper's beta1, beta2 and tau; its best lr depends on the task, from 0.001 to 1."""

    lr: float = Field(0.01, gt=0, description="server learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of the second moment; adagrad has none")
    tau: float = Field(1e-3, gt=0, description="degree of adaptivity: added to the root of the second moment")


class ServerOptimizer(Aggregator[Moments, P]):
    """What the four optimizers share: a step for each parameter of the run's network."""

    def check(self, env: Env, method: Answering) -> None:
        """Refuses methods that do not average the run's network under the name that it is looked for."""
        if not any(FIELD in phase.same and FIELD in averaged_fields(phase.up) for phase, _ in method.phases.values()):
            raise ConfigError(
                f"server optimizer '{self.name}' needs a phase that sends and averages '{FIELD}', which this method "
                "does not have; leave --server-optimizer out"
            )

    def init(self, env: Env) -> Moments:
        """No moments yet."""
        return Moments({}, {})

    async def finish(
        self, state: Moments, rnd: Round, aggregates: Mapping[str, Tensors], sent: Mapping[str, Tensors]
    ) -> tuple[Mapping[str, Tensors], Moments]:
        """Takes one step from the model that was sent, along the mean update."""
        if FIELD not in aggregates:
            return aggregates, state  # a phase that averages something else
        if FIELD not in sent:
            raise TypeError(f"a server optimizer needs one model that all clients started from, in the field '{FIELD}'")
        weights, state = await rnd.compute(self._step, state, sent[FIELD], aggregates[FIELD], rnd)
        return {**aggregates, FIELD: weights}, state

    def _step(self, state: Moments, start: Tensors, mean: Tensors, rnd: Round) -> tuple[Tensors, Moments]:
        weights, first, second = dict(mean), dict(state.first), dict(state.second)
        for name, parameter in rnd.model().named_parameters(remove_duplicate=False):
            if not parameter.requires_grad or name not in mean:
                continue
            x = start[name].double()
            delta = mean[name].double() - x
            m = first[name].double() if name in first else torch.zeros_like(x)
            v = second[name].double() if name in second else None
            step, m, v = self.step(delta, m, v)
            weights[name] = (x + step).to(mean[name].dtype)
            dtype = torch.promote_types(mean[name].dtype, torch.float32)  # small steps would be lost in less
            first[name] = m.to(dtype)
            if v is not None:
                second[name] = v.to(dtype)
        return weights, Moments(first, second)

    def step(self, delta: Tensor, m: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The step of one parameter and its new moments.

        Args:
            delta: The mean update.
            m: The first moment.
            v: The second moment; None before the first step.
        """
        raise NotImplementedError


@register_aggregator
class Sgdm(ServerOptimizer[MomentumParams]):
    """FedAvgM (Hsu et al., 2019): momentum on the mean update; with momentum 0 and lr 1 it is FedAvg."""

    name = "sgdm"

    def step(self, delta: Tensor, m: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Momentum."""
        m = self.params.momentum * m + delta
        return self.params.lr * m, m, None


class Adaptive(ServerOptimizer[AdaptiveParams]):
    """What the three adaptive optimizers share."""

    def step(self, delta: Tensor, m: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """An adaptive step."""
        p = self.params
        m = p.beta1 * m + (1 - p.beta1) * delta
        v = self.second_moment(torch.full_like(delta, p.tau**2) if v is None else v, delta.square())
        return p.lr * m / (v.sqrt() + p.tau), m, v

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The new second moment."""
        raise NotImplementedError


@register_aggregator
class Adagrad(Adaptive):
    """FedAdagrad."""

    name = "adagrad"

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The sum of squares."""
        return v + square


@register_aggregator
class Yogi(Adaptive):
    """FedYogi."""

    name = "yogi"

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Moves towards the square by an amount that does not depend on v."""
        return v - (1 - self.params.beta2) * square * torch.sign(v - square)


@register_aggregator
class Adam(Adaptive):
    """FedAdam."""

    name = "adam"

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The exponential mean of squares."""
        return self.params.beta2 * v + (1 - self.params.beta2) * square
