"""FedMix (Yoon et al., ICLR 2021): mix-up with other clients' averaged data, to first order around the client's own.

Departs from the paper:
- The gradient term has the coefficient lambda (1 - lambda), the exact one of the Taylor expansion, as in public code.
- Every example of a batch meets a mean of its own, drawn anew; one mean for a whole batch has the same expectation and
  more variance.
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

from fedrpc.methods.blocks.pool import (
    POOL,
    Layout,
    Nothing,
    check_distributions,
    collect,
    found_again,
    grouped,
    hand_out,
    mean_inputs,
    mean_labels,
    num_groups,
    view_of_means,
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

    def draw(self, rng: np.random.Generator, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Means at random, which may repeat."""
        index = torch.from_numpy(rng.integers(len(self.x), size=count))
        return self.x[index].to(device), self.y[index].to(device)


COLLECT = Phase("collect", Nothing, Means)
DISTRIBUTE = Phase("distribute", Means, Nothing)


def layout_of(env: Env) -> Layout:
    """A mean input and a label distribution."""
    return Layout({"x": (torch.float32, env.shape), "y": (torch.float32, (env.num_classes,))})


def taylor_mixup(
    model: nn.Module,
    own: tuple[Tensor, Tensor],
    mean: tuple[Tensor, Tensor],
    lam: float,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> Tensor:
    """Mix-up of (1 - lam) own + lam mean, without ever showing the model the mean: its gradient stands in for it.

    Args:
        own: Inputs and labels.
        mean: As many mean inputs and label distributions.
        criterion: Of outputs and labels or label distributions, mean over the batch.
    """
    u = ((1 - lam) * own[0]).requires_grad_()
    outputs = model(u)
    loss = criterion(outputs, own[1])
    # The mean's gradient has each example's own, divided by their number, in its rows.
    (slope,) = torch.autograd.grad(loss, u, create_graph=True)
    return (1 - lam) * loss + lam * criterion(outputs, mean[1]) + lam * (1 - lam) * (slope * mean[0]).sum()


class MixParams(Params):
    """What both methods that mix means in have."""

    mean_size: int = Field(10, ge=2, description="examples behind a mean")
    max_pool: ByteSize = Field(ByteSize(512 << 20), gt=0, description="bytes of the largest pool, or '256MiB'")


X = TypeVar("X", bound=MixParams)


class MixesMeans(FedAvg[X]):
    """FedAvg with a pool of means, which the local objective mixes in."""

    shares = "averaged data with label distributions"

    def mixes(self, params: X) -> bool:
        """Whether the pool is of any use; nothing is exchanged that is not."""
        raise NotImplementedError

    def mixed(self, ctx: ClientContext[X], pool: Means) -> Loss:
        """The loss of a batch."""
        raise NotImplementedError

    async def setup(self, state: Global, rnd: Round[X]) -> Global:
        """Collects everybody's means and gives all of them to everybody."""
        if self.mixes(rnd.params):
            pool = await collect(rnd, COLLECT, layout_of(rnd.env), lambda items: check_distributions(items.y))
            await hand_out(rnd, DISTRIBUTE, pool)
        return state

    @on(COLLECT)
    def give(self, ctx: ClientContext[X], msg: Nothing) -> Means:
        """Means of random groups."""
        data = ctx.data.train
        groups = grouped(data, ctx.params.mean_size, ctx.rng("share"))
        return Means(mean_inputs(data, groups, ctx.env.shape), mean_labels(data, groups, ctx.env.num_classes))

    @on(DISTRIBUTE)
    def keep(self, ctx: ClientContext[X], msg: Means) -> Nothing:
        """Keeps the pool."""
        ctx.store.put(POOL, msg)
        return Nothing()

    def build_loss(self, ctx: ClientContext[X], msg: Global) -> Loss:
        """The method's loss, or plain cross-entropy where there is nothing to mix with."""
        pool = ctx.store.get(POOL, Means)
        return cross_entropy if pool is None or not len(pool.x) else self.mixed(ctx, pool)

    def shared(self, state: Global, clients: Sequence[PastClient]) -> SharedItems | None:
        """The pool, as any client keeps it."""
        pools = found_again(clients, Means)
        return SharedItems(pools[0].x, pools[0].y) if pools else None

    def view(self, env: Env[X], weights: Tensors, device: torch.device) -> View:
        """Means of groups; there is nothing of a model in them."""
        return view_of_means(env.params.mean_size)

    def cost(self, shapes: Shapes[X]) -> Cost:
        """FedAvg's, and once every client's means up and all means down to every client."""
        params, cost = shapes.env.params, super().cost(shapes)
        if not self.mixes(params):
            return cost
        count = sum(num_groups(n, params.mean_size) for n in shapes.num_examples)
        pool_bytes = layout_of(shapes.env).size_bytes * count
        return cost.add("up", Kind.MEAN_SAMPLES, pool_bytes).add(
            "down", Kind.MEAN_SAMPLES, pool_bytes * shapes.env.num_clients
        )


class FedMixParams(MixParams):
    """Values of FedDPMS and FLea."""

    lam: float = Field(0.05, ge=0, lt=1, description="weight of the averaged data")


@register
class FedMix(MixesMeans[FedMixParams]):
    """FedAvg with mix-up to first order."""

    name = "fedmix"
    dp_sgd = refused("the loss has a gradient in it, and a second backward pass has no gradient of one example")

    def mixes(self, params: FedMixParams) -> bool:
        """Whether the averaged data has any weight."""
        return bool(params.lam)

    def mixed(self, ctx: ClientContext[FedMixParams], pool: Means) -> Loss:
        """The loss of a batch."""
        lam, rng = ctx.params.lam, ctx.rng("mixup")

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return taylor_mixup(model, (x, y), pool.draw(rng, len(x), x.device), lam)

        return loss
