"""FedMix (Yoon et al., ICLR 2021): mix-up with other clients' averaged data, to first order around the client's own.

Departs from the paper:
- The gradient term has the coefficient lambda (1 - lambda), the exact one of the Taylor expansion, as in public code.
- Every example of a batch is paired with a mean of its own, sampled again in each batch; one mean for a whole batch has
  the same expectation and more variance.
- A client's own means stay in the pool. Examples that do not fill a group of `mean_size` are not shared.
- `mean_size` is FLea's 10 and `lam` FedDPMS's 0.05; the paper tunes both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ByteSize, Field
from torch import Tensor, nn

from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.pool import (
    POOL,
    Layout,
    Nothing,
    average_inputs,
    average_labels,
    build_view_of_means,
    check_distributions,
    collect,
    count_groups,
    distribute_pool,
    find_stored_pools,
    sample_groups,
)
from fedrpc.methods.fedavg import FedAvg, Global
from fedrpc.methods.method import ClientContext, Cost, Env, Loss, Params, Phase, Round, Shapes, on, refused, register
from fedrpc.methods.tools import PastClient, SharedItems, View
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part


@dataclass(frozen=True)
class Means:
    """Mean inputs and label distributions of groups of examples."""

    x: Tensor = part(Kind.MEAN_SAMPLES)
    y: Tensor = part(Kind.MEAN_SAMPLES)

    def sample(self, rng: np.random.Generator, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Samples means with replacement."""
        index = torch.from_numpy(rng.integers(len(self.x), size=count))
        return self.x[index].to(device), self.y[index].to(device)


COLLECT = Phase("collect", Nothing, Means)
DISTRIBUTE = Phase("distribute", Means, Nothing)


def describe_item(env: Env) -> Layout:
    """A mean input and a label distribution."""
    return Layout({"x": (torch.float32, env.shape), "y": (torch.float32, (env.num_classes,))})


def taylor_mixup_loss(
    model: nn.Module,
    own: tuple[Tensor, Tensor],
    mean: tuple[Tensor, Tensor],
    lam: float,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> Tensor:
    """Mix-up of (1 - lam) own + lam mean; the model never sees the mean, whose effect is taken from a gradient.

    Args:
        own: Inputs and labels.
        mean: The same number of mean inputs and label distributions.
        criterion: The loss of outputs against labels or label distributions, mean over the batch.
    """
    u = ((1 - lam) * own[0]).requires_grad_()
    outputs = model(u)
    loss = criterion(outputs, own[1])
    # Each row is one example's own gradient, divided by the number of examples.
    (slope,) = torch.autograd.grad(loss, u, create_graph=True)
    return (1 - lam) * loss + lam * criterion(outputs, mean[1]) + lam * (1 - lam) * (slope * mean[0]).sum()


class MixParams(Params):
    """What FedMix and NaiveMix have in common."""

    mean_size: int = Field(10, ge=2, description="examples averaged into one mean")
    max_pool: ByteSize = Field(ByteSize(512 << 20), gt=0, description="largest pool in bytes, or like '256MiB'")


X = TypeVar("X", bound=MixParams)


class MeanMixMethod(FedAvg[X]):
    """FedAvg with a pool of means that the local loss mixes in."""

    shares = "averaged data with label distributions"

    def uses_pool(self, params: X) -> bool:
        """Whether the loss uses the pool; otherwise nothing is shared."""
        raise NotImplementedError

    def build_mixed_loss(self, ctx: ClientContext[X], pool: Means) -> Loss:
        """The loss of a batch, given a pool that is not empty."""
        raise NotImplementedError

    async def setup(self, state: Global, rnd: Round[X]) -> Global:
        """Collects the means of all clients and distributes the pool to every client."""
        if self.uses_pool(rnd.params):
            pool = await collect(rnd, COLLECT, describe_item(rnd.env), lambda items: check_distributions(items.y))
            await distribute_pool(rnd, DISTRIBUTE, pool)
        return state

    @on(COLLECT)
    def share_items(self, ctx: ClientContext[X], msg: Nothing) -> Means:
        """Shares the means of random groups of examples."""
        data = ctx.data.train
        groups = sample_groups(data, ctx.params.mean_size, ctx.rng("share"))
        return Means(average_inputs(data, groups, ctx.env.shape), average_labels(data, groups, ctx.env.num_classes))

    @on(DISTRIBUTE)
    def store_pool(self, ctx: ClientContext[X], msg: Means) -> Nothing:
        """Stores the pool."""
        ctx.store.put(POOL, msg)
        return Nothing()

    def build_loss(self, ctx: ClientContext[X], msg: Global) -> Loss:
        """The method's loss, or plain cross-entropy when the client has no pool."""
        pool = ctx.store.get(POOL, Means)
        return cross_entropy if pool is None or not len(pool.x) else self.build_mixed_loss(ctx, pool)

    def collect_shared_items(self, state: Global, clients: Sequence[PastClient]) -> SharedItems | None:
        """The pool, from the first client that has it."""
        pools = find_stored_pools(clients, Means)
        return SharedItems(pools[0].x, pools[0].y) if pools else None

    def build_view(self, env: Env[X], weights: Tensors, device: torch.device) -> View:
        """Means of groups, which depend on no model."""
        return build_view_of_means(env.params.mean_size)

    def cost(self, shapes: Shapes[X]) -> Cost:
        """FedAvg's, plus once every client's means up and the whole pool down to every client."""
        params, cost = shapes.env.params, super().cost(shapes)
        if not self.uses_pool(params):
            return cost
        count = sum(count_groups(n, params.mean_size) for n in shapes.num_examples)
        pool_bytes = describe_item(shapes.env).size_bytes * count
        return cost.add("up", Kind.MEAN_SAMPLES, pool_bytes).add(
            "down", Kind.MEAN_SAMPLES, pool_bytes * shapes.env.num_clients
        )


class FedMixParams(MixParams):
    """Values of FedDPMS and FLea."""

    lam: float = Field(0.05, ge=0, lt=1, description="weight of the averaged data")


@register
class FedMix(MeanMixMethod[FedMixParams]):
    """FedAvg with mix-up to first order."""

    name = "fedmix"
    dp_sgd = refused("the loss contains a gradient, and there are no per-example gradients of a second backward pass")

    def check(self, env: Env[FedMixParams]) -> None:
        """Refuses compiled networks."""
        super().check(env)
        if env.params.lam and env.train.compile != "off":
            raise ConfigError(
                f"fedmix needs train.compile off, got {env.train.compile}: its loss contains a gradient, and compiled "
                "networks have no second backward pass; leave it out, or choose another --method"
            )

    def uses_pool(self, params: FedMixParams) -> bool:
        """Whether the averaged data has any weight."""
        return bool(params.lam)

    def build_mixed_loss(self, ctx: ClientContext[FedMixParams], pool: Means) -> Loss:
        """The loss of a batch."""
        lam, rng = ctx.params.lam, ctx.rng("mixup")

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return taylor_mixup_loss(model, (x, y), pool.sample(rng, len(x), x.device), lam)

        return loss
