"""FedBR (Guo et al., ICML 2023): unlabelled averaged data takes the bias out of local classifiers and features.

Departs from the paper:
- Means come from the clients themselves: each sends at most its part of `num_items`, the server keeps that many at
  random, and all clients get them. The published code draws them from clients' data in one place, or from other data.
- The projector stays on its client, which keeps it from round to round; it is never averaged.
- The received model's features are computed for every batch; the published code computes those of the first one alone.
- Of the published code, its additional mix-up of local data and its additional decorrelation penalty are left out.
- Own and averaged data go through the network one after the other, so BatchNorm sees two batches in each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ByteSize, Field
from torch import Tensor, nn

from fedrpc.methods.blocks.mixup import one_hot, soft_cross_entropy
from fedrpc.methods.blocks.pool import (
    POOL,
    Layout,
    Nothing,
    collect,
    found_again,
    grouped,
    hand_out,
    mean_inputs,
    num_groups,
    view_of_means,
)
from fedrpc.methods.blocks.updates import release_update
from fedrpc.methods.fedavg import FedAvg, Global, Update
from fedrpc.methods.method import ClientContext, Cost, Env, Params, Phase, Round, Shapes, on, refused, register
from fedrpc.methods.tools import PastClient, SharedItems, View
from fedrpc.models import require_stages
from fedrpc.models.state import load, read_tensors
from fedrpc.training.loop import optimizer_of
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part

_PROJECTOR = "projector"  # its key in a client's store
_WIDTHS = (256, 256, 512)


@dataclass(frozen=True)
class Pseudo:
    """Mean inputs without labels."""

    x: Tensor = part(Kind.MEAN_SAMPLES)


@dataclass(frozen=True)
class Kept:
    """In a client's store: its projector."""

    weights: Tensors


COLLECT = Phase("collect", Nothing, Pseudo)
DISTRIBUTE = Phase("distribute", Pseudo, Nothing)


def layout_of(env: Env[FedBRParams]) -> Layout:
    """A mean input."""
    return Layout({"x": (torch.float32, env.shape)})


def part_of(env: Env[FedBRParams]) -> int:
    """How many means one client sends at most: everybody's part together is what the server keeps, or a little more."""
    num_items: int = env.params.num_items
    return math.ceil(num_items / env.num_clients)


def projector_for(features: int) -> nn.Module:
    """From features to the space in which they are compared."""
    first, second, last = _WIDTHS
    return nn.Sequential(
        nn.Linear(features, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, last)
    )


def contrast(pseudo: Tensor, received: Tensor, own: Tensor, tau1: float, tau2: float) -> Tensor:
    """Minus the log of the share that similarity to the received model has against similarity to own data, a mean.

    Args:
        pseudo: Projected features of averaged data.
        received: The same under the received model.
        own: Projected features of the client's own data.
    """
    near, far = F.cosine_similarity(pseudo, received), F.cosine_similarity(pseudo, own)
    return F.softplus(tau2 * far - tau1 * near).mean()


class Debiasing:
    """The loss of the batches of one local training, with the projector's own step inside.

    Args:
        received: The received network, which stays as it is.
        pool: Averaged inputs.
        num_classes: Of the run.
        rng: Draws from the pool.
        optimizer: Of the projector.
    """

    def __init__(
        self,
        params: Any,
        received: nn.Module,
        projector: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        pool: Tensor,
        num_classes: int,
        rng: np.random.Generator,
    ) -> None:
        self._params, self._pool, self._num_classes, self._rng = params, pool, num_classes, rng
        self._received = require_stages(received.eval().requires_grad_(False), "fedbr")
        self._projector, self._optimizer = projector, optimizer

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """What the model minimises, after the projector maximised its part of it."""
        parts, params = require_stages(model, "fedbr"), self._params
        pseudo, wanted = self.pseudo(x, y)
        own, theirs = parts.features(x), parts.features(pseudo)
        loss: Tensor = F.cross_entropy(parts.classifier(own), y)
        loss = loss + params.lam * soft_cross_entropy(F.log_softmax(parts.classifier(theirs), dim=1), wanted)
        if params.mu:
            with torch.no_grad():
                received = self._received.features(pseudo)
            self.sharpen(theirs.detach(), received, own.detach())
            loss = loss + params.mu * self.contrast(theirs, received, own)
        return loss

    def pseudo(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """As many averaged inputs as there are own ones, and what the classifier should say of them."""
        index = torch.from_numpy(self._rng.integers(len(self._pool), size=len(x)))
        items = self._pool[index].to(x.device)  # a copy: the stored ones stay as they came
        uniform = torch.full((len(x), self._num_classes), 1 / self._num_classes, device=x.device)
        if not self._params.mixture:
            return items, uniform
        return (items + x) / 2, (uniform + one_hot(y, self._num_classes)) / 2

    def sharpen(self, *features: Tensor) -> None:
        """The max step: the projector learns to tell what the model should bring together."""
        self._projector.requires_grad_(True)
        self._optimizer.zero_grad(set_to_none=True)
        loss: Tensor = -self._params.gamma * self.contrast(*features)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._projector.requires_grad_(False)  # the min step looks through it and leaves it as it is

    def contrast(self, *features: Tensor) -> Tensor:
        """The contrast of projected features."""
        pseudo, received, own = map(self._projector, features)
        return contrast(pseudo, received, own, self._params.tau1, self._params.tau2)


class FedBRParams(Params):
    """The values of the authors' code."""

    mu: float = Field(0.5, ge=0, description="weight of the contrastive term")
    lam: float = Field(1.0, ge=0, description="weight of the classifier's term on averaged data")
    tau1: float = Field(2.0, gt=0, description="scale of the similarity to the received model")
    tau2: float = Field(2.0, gt=0, description="scale of the similarity to own data")
    gamma: float = Field(1.0, gt=0, description="weight of the projector's step")
    mixture: bool = Field(True, description="average the averaged data once more, with own examples")
    num_items: int = Field(32, ge=1, description="means in the pool")
    mean_size: int = Field(10, ge=2, description="examples behind a mean")
    max_pool: ByteSize = Field(ByteSize(512 << 20), gt=0, description="bytes of the largest pool, or '256MiB'")


@register
class FedBR(FedAvg[FedBRParams]):
    """FedAvg with a min-max objective around a small pool of averaged data."""

    name = "fedbr"
    shares = "averaged data without labels"
    dp_sgd = refused("the projector learns from private data without noise, and every example's gradient depends on it")

    def check(self, env: Env[FedBRParams]) -> None:
        """Refuses networks without features."""
        require_stages(env.model(), self.name)

    async def setup(self, state: Global, rnd: Round[FedBRParams]) -> Global:
        """Collects means, keeps some of them and gives these to everybody."""
        if _is_fedavg(rnd.params):
            return state
        most = part_of(rnd.env)

        def check(items: Pseudo) -> None:
            if len(items.x) > most:
                raise ValueError(f"a client sends at most {most} means, got {len(items.x)}")

        pool = await collect(rnd, COLLECT, layout_of(rnd.env), check)
        await hand_out(rnd, DISTRIBUTE, Pseudo(pool.x[: rnd.params.num_items].clone()))
        return state

    @on(COLLECT)
    def give(self, ctx: ClientContext[FedBRParams], msg: Nothing) -> Pseudo:
        """Means of random groups."""
        groups = grouped(ctx.data.train, ctx.params.mean_size, ctx.rng("share"), part_of(ctx.env))
        return Pseudo(mean_inputs(ctx.data.train, groups, ctx.env.shape))

    @on(DISTRIBUTE)
    def keep(self, ctx: ClientContext[FedBRParams], msg: Pseudo) -> Nothing:
        """Keeps the pool."""
        ctx.store.put(POOL, msg)
        return Nothing()

    def fit(self, ctx: ClientContext[FedBRParams], msg: Global) -> Update:
        """Trains model and projector, and keeps the projector; without a pool, plain FedAvg."""
        pool = ctx.store.get(POOL, Pseudo)
        if _is_fedavg(ctx.params) or pool is None or not len(pool.x):
            return super().fit(ctx, msg)
        model, received = ctx.model(), ctx.model()
        load(model, msg.weights)
        load(received, msg.weights)
        projector = self._projector(ctx, require_stages(model, self.name).classifier.in_features)
        loss = Debiasing(
            ctx.params,
            received,
            projector,
            optimizer_of(ctx.env.train, projector, ctx.learning_rate()),
            pool=pool.x,
            num_classes=ctx.env.num_classes,
            rng=ctx.rng("pseudo"),
        )
        report = ctx.train(model, loss)
        ctx.store.put(_PROJECTOR, Kept(read_tensors(projector)))
        return Update(**release_update(ctx, model, report))

    def _projector(self, ctx: ClientContext[FedBRParams], features: int) -> nn.Module:
        projector = ctx.env.build("fedbr-projector", lambda: projector_for(features)).to(ctx.device)
        kept = ctx.store.get(_PROJECTOR, Kept)
        if kept is not None:
            load(projector, kept.weights)
        return projector

    def shared(self, state: Global, clients: Sequence[PastClient]) -> SharedItems | None:
        """The pool, as any client keeps it; what the server did not keep is nowhere."""
        pools = found_again(clients, Pseudo)
        return SharedItems(pools[0].x) if pools else None

    def view(self, env: Env[FedBRParams], weights: Tensors, device: torch.device) -> View:
        """Means of groups; there is nothing of a model in them."""
        return view_of_means(env.params.mean_size, part_of(env))

    def cost(self, shapes: Shapes[FedBRParams]) -> Cost:
        """FedAvg's, and once some means up from every client and the pool down to every client."""
        env, cost = shapes.env, super().cost(shapes)
        if _is_fedavg(env.params):
            return cost
        size, most = layout_of(env).size_bytes, part_of(env)
        sent = sum(num_groups(n, env.params.mean_size, most) for n in shapes.num_examples)
        kept = min(sent, env.params.num_items)
        return cost.add("up", Kind.MEAN_SAMPLES, sent * size).add(
            "down", Kind.MEAN_SAMPLES, kept * size * env.num_clients
        )


def _is_fedavg(params: Any) -> bool:
    return not params.mu and not params.lam
