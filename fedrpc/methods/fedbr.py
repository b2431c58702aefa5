"""FedBR (Guo et al., ICML 2023): unlabelled averaged data takes the bias out of local classifiers and features.

Departs from the paper:
- Means come from the clients themselves: each sends at most its share of `num_items`, the server keeps `num_items` of
  them at random, and all clients get these. The published code computes them from all data in one place.
- The projector has the run's optimizer; `projector = "sgd"` is the authors', with the run's learning rate unless
  `projector_lr` says another. BatchNorm is the network's: `--set norm=group` is theirs.
- The projector stays on its client from round to round; it is never averaged.
- The received model's features are computed for every batch; the published code computes only those of the first one.
- Of the published code, its additional mix-up of local data and its additional decorrelation penalty are left out.
- Own and averaged data go through the network one after the other, so BatchNorm sees two batches in each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ByteSize, Field
from torch import Tensor, nn

from fedrpc.config import TrainConfig
from fedrpc.methods.blocks.mixup import one_hot, soft_cross_entropy
from fedrpc.methods.blocks.pool import (
    POOL,
    Layout,
    Nothing,
    average_inputs,
    build_view_of_means,
    collect,
    count_groups,
    distribute_pool,
    find_stored_pools,
    sample_groups,
)
from fedrpc.methods.blocks.updates import release_update
from fedrpc.methods.fedavg import FedAvg, Global, Update
from fedrpc.methods.method import ClientContext, Cost, Env, Params, Phase, Round, Shapes, on, refused, register
from fedrpc.methods.tools import PastClient, SharedItems, View
from fedrpc.models import require_stages
from fedrpc.models.state import load, read_tensors
from fedrpc.training.loop import build_optimizer
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part

_PROJECTOR = "projector"  # its key in a client's store
_WIDTHS = (256, 256, 512)


@dataclass(frozen=True)
class MeanInputs:
    """Mean inputs without labels."""

    x: Tensor = part(Kind.MEAN_SAMPLES)


@dataclass(frozen=True)
class StoredProjector:
    """In a client's store: its projector."""

    weights: Tensors


COLLECT = Phase("collect", Nothing, MeanInputs)
DISTRIBUTE = Phase("distribute", MeanInputs, Nothing)


def describe_item(env: Env[FedBRParams]) -> Layout:
    """A mean input."""
    return Layout({"x": (torch.float32, env.shape)})


def compute_client_limit(env: Env[FedBRParams]) -> int:
    """The largest number of means that a client sends: all clients together send at least what the server keeps."""
    num_items: int = env.params.num_items
    return math.ceil(num_items / env.num_clients)


def build_projector(features: int) -> nn.Module:
    """A network from features to the space in which they are compared."""
    first, second, last = _WIDTHS
    return nn.Sequential(
        nn.Linear(features, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, last)
    )


def contrastive_loss(pseudo: Tensor, received: Tensor, own: Tensor, tau1: float, tau2: float) -> Tensor:
    """-log(e^near / (e^near + e^far)) of the similarities to the received model and to own data, mean over the batch.

    Args:
        pseudo: Projected features of averaged data.
        received: The same under the received model.
        own: Projected features of the client's own data.
    """
    near, far = F.cosine_similarity(pseudo, received), F.cosine_similarity(pseudo, own)
    return F.softplus(tau2 * far - tau1 * near).mean()


class DebiasedLoss:
    """The loss of one local training; each call also takes a step of the projector.

    Args:
        received: The received network, which is frozen.
        optimizer: The projector's.
        pool: Averaged inputs.
        rng: Samples the pool.
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
        """The loss that the model minimises, after the projector's step to maximise its term."""
        parts, params = require_stages(model, "fedbr"), self._params
        pseudo, wanted = self.sample_pseudo(x, y)
        own, theirs = parts.features(x), parts.features(pseudo)
        loss: Tensor = F.cross_entropy(parts.classifier(own), y)
        loss = loss + params.lam * soft_cross_entropy(F.log_softmax(parts.classifier(theirs), dim=1), wanted)
        if params.mu:
            with torch.no_grad():
                received = self._received.features(pseudo)
            self.train_projector(theirs.detach(), received, own.detach())
            loss = loss + params.mu * self.contrastive_loss(theirs, received, own)
        return loss

    def sample_pseudo(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """As many averaged inputs as the batch has examples, and their target distributions."""
        index = torch.from_numpy(self._rng.integers(len(self._pool), size=len(x)))
        items = self._pool[index].to(x.device)  # a copy: the stored ones stay unchanged
        uniform = torch.full((len(x), self._num_classes), 1 / self._num_classes, device=x.device)
        if not self._params.mixture:
            return items, uniform
        return (items + x) / 2, (uniform + one_hot(y, self._num_classes)) / 2

    def train_projector(self, *features: Tensor) -> None:
        """The max step: the projector learns to separate what the model should bring together."""
        self._projector.requires_grad_(True)
        self._optimizer.zero_grad(set_to_none=True)
        loss: Tensor = -self._params.gamma * self.contrastive_loss(*features)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._projector.requires_grad_(False)  # the min step does not change it

    def contrastive_loss(self, *features: Tensor) -> Tensor:
        """The contrastive loss of projected features."""
        pseudo, received, own = map(self._projector, features)
        return contrastive_loss(pseudo, received, own, self._params.tau1, self._params.tau2)


class FedBRParams(Params):
    """The values of the authors' code."""

    mu: float = Field(0.5, ge=0, description="weight of the contrastive term")
    lam: float = Field(1.0, ge=0, description="weight of the classifier's term on averaged data")
    tau1: float = Field(2.0, gt=0, description="scale of the similarity to the received model")
    tau2: float = Field(2.0, gt=0, description="scale of the similarity to own data")
    gamma: float = Field(1.0, gt=0, description="weight of the projector's step")
    projector: Literal["run", "sgd"] = Field("run", description="the projector's optimizer: the run's, or plain SGD")
    projector_lr: float | None = Field(None, gt=0, description="its learning rate; the clients' when left out")
    mixture: bool = Field(True, description="average the averaged data once more, with the client's examples")
    num_items: int = Field(32, ge=1, description="means in the pool")
    mean_size: int = Field(10, ge=2, description="examples averaged into one mean")
    max_pool: ByteSize = Field(ByteSize(512 << 20), gt=0, description="largest pool in bytes, or like '256MiB'")


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
        """Collects means, keeps some of them and distributes these to every client."""
        if _is_fedavg(rnd.params):
            return state
        limit = compute_client_limit(rnd.env)

        def check(items: MeanInputs) -> None:
            if len(items.x) > limit:
                raise ValueError(f"a client sends at most {limit} means, got {len(items.x)}")

        pool = await collect(rnd, COLLECT, describe_item(rnd.env), check)
        await distribute_pool(rnd, DISTRIBUTE, MeanInputs(pool.x[: rnd.params.num_items].clone()))
        return state

    @on(COLLECT)
    def share_items(self, ctx: ClientContext[FedBRParams], msg: Nothing) -> MeanInputs:
        """Shares the means of random groups of examples."""
        groups = sample_groups(ctx.data.train, ctx.params.mean_size, ctx.rng("share"), compute_client_limit(ctx.env))
        return MeanInputs(average_inputs(ctx.data.train, groups, ctx.env.shape))

    @on(DISTRIBUTE)
    def store_pool(self, ctx: ClientContext[FedBRParams], msg: MeanInputs) -> Nothing:
        """Stores the pool."""
        ctx.store.put(POOL, msg)
        return Nothing()

    def fit(self, ctx: ClientContext[FedBRParams], msg: Global) -> Update:
        """Trains model and projector, and stores the projector; without a pool, plain FedAvg."""
        pool = ctx.store.get(POOL, MeanInputs)
        if _is_fedavg(ctx.params) or pool is None or not len(pool.x):
            return super().fit(ctx, msg)
        model, received = ctx.model(), ctx.model()
        load(model, msg.weights)
        load(received, msg.weights)
        projector = self._load_projector(ctx, require_stages(model, self.name).classifier.in_features)
        loss = DebiasedLoss(
            ctx.params,
            received,
            projector,
            _build_projector_optimizer(ctx, projector),
            pool=pool.x,
            num_classes=ctx.env.num_classes,
            rng=ctx.rng("pseudo"),
        )
        report = ctx.train(model, loss)
        ctx.store.put(_PROJECTOR, StoredProjector(read_tensors(projector)))
        return Update(**release_update(ctx, model, report))

    def _load_projector(self, ctx: ClientContext[FedBRParams], features: int) -> nn.Module:
        projector = ctx.env.build("fedbr-projector", lambda: build_projector(features)).to(ctx.device)
        kept = ctx.store.get(_PROJECTOR, StoredProjector)
        if kept is not None:
            load(projector, kept.weights)
        return projector

    def collect_shared_items(self, state: Global, clients: Sequence[PastClient]) -> SharedItems | None:
        """The pool, from the first client that has it; means outside the pool were not kept anywhere."""
        pools = find_stored_pools(clients, MeanInputs)
        return SharedItems(pools[0].x) if pools else None

    def build_view(self, env: Env[FedBRParams], weights: Tensors, device: torch.device) -> View:
        """Means of groups, which depend on no model."""
        return build_view_of_means(env.params.mean_size, compute_client_limit(env))

    def cost(self, shapes: Shapes[FedBRParams]) -> Cost:
        """FedAvg's, plus once some means up from every client and the pool down to every client."""
        env, cost = shapes.env, super().cost(shapes)
        if _is_fedavg(env.params):
            return cost
        size, limit = describe_item(env).size_bytes, compute_client_limit(env)
        sent = sum(count_groups(n, env.params.mean_size, limit) for n in shapes.num_examples)
        kept = min(sent, env.params.num_items)
        return cost.add("up", Kind.MEAN_SAMPLES, sent * size).add(
            "down", Kind.MEAN_SAMPLES, kept * size * env.num_clients
        )


def _build_projector_optimizer(ctx: ClientContext[FedBRParams], projector: nn.Module) -> torch.optim.Optimizer:
    params, config = ctx.params, ctx.env.train
    if params.projector == "sgd":
        config = TrainConfig(optimizer="sgd")
    return build_optimizer(config, projector, params.projector_lr or ctx.learning_rate())


def _is_fedavg(params: Any) -> bool:
    return not params.mu and not params.lam
