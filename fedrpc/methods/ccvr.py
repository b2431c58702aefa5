"""CCVR (Luo et al., NeurIPS 2021): after FedAvg, the classifier is retrained on features sampled from class Gaussians.

Departs from the paper:
- `diagonal = true` sends only variances, a small part of the bytes. A covariance of d features has d (d + 1) / 2 values
  a class: on zda-mnist, with 1,568 features, two rounds of six clients take 107 times FedAvg's bytes.
- Moments are computed in float64 and travel as float32, a covariance as its upper triangle.
- Features are sampled by eigen-decomposition, so a class with fewer examples than features needs no correction.
- Every class gets the same number of virtual features; a class that no client has gets none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import ByteSize, Field
from torch import Tensor, nn

from fedrpc.config import TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.errors import ConfigError
from fedrpc.methods.fedavg import FedAvg, Global
from fedrpc.methods.method import ClientContext, Cost, Env, Params, Phase, Round, Shapes, on, refused, register
from fedrpc.models import require_stages
from fedrpc.models.state import load, read_tensors
from fedrpc.training.loop import train
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part

_BATCH = 256  # of the extraction: bounds memory and has no other effect


@dataclass(frozen=True)
class Moments:
    """Up: by class, the number, mean and unbiased covariance (or variances) of the features."""

    counts: Tensor = part(Kind.MOMENTS, counts_examples=True)
    means: Tensor = part(Kind.MOMENTS)
    spreads: Tensor = part(Kind.MOMENTS)


DESCRIBE = Phase("describe", Global, Moments)


@dataclass(frozen=True)
class Spread:
    """How the second moments of features are laid out: only squares, or the upper triangle of all products.

    Args:
        features: The number of features.
        diagonal: Only squares.
    """

    features: int
    diagonal: bool

    @property
    def width(self) -> int:
        """The number of values for one class."""
        return self.features if self.diagonal else self.features * (self.features + 1) // 2

    def sum_products(self, centred: Tensor) -> Tensor:
        """The sum of products over rows."""
        if self.diagonal:
            return centred.square().sum(dim=0)
        rows, columns = torch.triu_indices(self.features, self.features)
        return (centred.T @ centred)[rows, columns]

    def sample(self, spread: Tensor, count: int, rng: np.random.Generator) -> Tensor:
        """Samples centred Gaussian rows with this covariance, or with these variances and no covariance."""
        if self.diagonal:
            return torch.from_numpy(rng.standard_normal((count, self.features))) * spread.clamp_min(0).sqrt()
        root = self.compute_root(spread)
        return torch.from_numpy(rng.standard_normal((count, root.shape[1]))) @ root.T

    def compute_root(self, spread: Tensor) -> Tensor:
        """A matrix A with A A' the covariance; its columns are the directions with non-zero variance."""
        covariance = spread.new_zeros(self.features, self.features)
        rows, columns = torch.triu_indices(self.features, self.features)
        covariance[rows, columns] = spread
        values, vectors = torch.linalg.eigh(covariance, UPLO="U")
        # A zero eigenvalue comes out as a tiny number of either sign.
        some = values > values[-1].clamp_min(0) * self.features * torch.finfo(torch.float32).eps
        root: Tensor = vectors[:, some] * values[some].sqrt()
        return root


def compute_moments(features: Tensor, y: Tensor, num_classes: int, spread: Spread) -> Moments:
    """One client's moments; spreads are 0 for a class of one example, and means too for a class of none."""
    counts = torch.bincount(y, minlength=num_classes)
    means = features.new_zeros(num_classes, spread.features)
    spreads = features.new_zeros(num_classes, spread.width)
    for c in counts.nonzero()[:, 0].tolist():
        mine = features[y == c]
        means[c] = mine.mean(dim=0)
        spreads[c] = spread.sum_products(mine - means[c]) / max(len(mine) - 1, 1)
    return Moments(counts, means, spreads)


class PooledMoments:
    """All clients' moments by class, merged one client at a time, in float64.

    Merging a client adds its scatter about its own mean and the scatter between the two means. That is the formula of
    the pooled covariance, without a difference of large numbers.
    """

    def __init__(self, num_classes: int, spread: Spread) -> None:
        self._spread = spread
        self.counts = torch.zeros(num_classes, dtype=torch.int64)
        self.means = torch.zeros(num_classes, spread.features, dtype=torch.float64)
        self._scatters = torch.zeros(num_classes, spread.width, dtype=torch.float64)

    def add(self, moments: Moments) -> None:
        """Merges one client's moments."""
        for c in moments.counts.nonzero()[:, 0].tolist():
            before, count = int(self.counts[c]), int(moments.counts[c])
            moved = moments.means[c].double() - self.means[c]
            self._scatters[c] += (count - 1) * moments.spreads[c].double()
            self._scatters[c] += self._spread.sum_products(moved[None]) * (before * count / (before + count))
            self.means[c] += moved * (count / (before + count))
            self.counts[c] += count

    def compute_spread(self, c: int) -> Tensor:
        """A class's unbiased covariance or variances."""
        return self._scatters[c] / max(int(self.counts[c]) - 1, 1)

    def sample(self, count: int, rng: np.random.Generator) -> Iterator[tuple[int, Tensor]]:
        """Samples virtual features for every class that some client has."""
        for c in self.counts.nonzero()[:, 0].tolist():
            yield c, (self.means[c] + self._spread.sample(self.compute_spread(c), count, rng)).float()


class CCVRParams(Params):
    """Values of published code; the paper tunes the number of virtual features."""

    diagonal: bool = Field(
        False, description="send variances, not covariances, which take most of the bytes where there are many features"
    )
    num_virtual: int = Field(2000, ge=1, description="virtual features of each class")
    lr: float = Field(1e-3, gt=0, description="learning rate of the classifier's SGD")
    epochs: int = Field(10, ge=0, description="epochs over the virtual features")
    batch_size: int = Field(64, ge=1, description="virtual features in a batch")
    max_moments: ByteSize = Field(ByteSize(256 << 20), gt=0, description="largest moments of one client in bytes")


@register
class CCVR(FedAvg[CCVRParams]):
    """FedAvg, with a calibrated classifier at its end."""

    name = "ccvr"
    dp_sgd = refused("means and covariances of the features of each class leave a client without noise")
    shares = "feature means and covariances by class"

    def check(self, env: Env[CCVRParams]) -> None:
        """Refuses networks without features, and moments that are too large to send."""
        size = _count_bytes(env)
        if size > env.params.max_moments:
            raise ConfigError(
                f"the moments of {_build_spread(env).features} features and {env.num_classes} classes take {size} "
                f"bytes a client but params.max_moments is {env.params.max_moments}; set params.diagonal = true, raise "
                "it, or choose a --model with fewer features"
            )

    def describe_caveat(self, params: CCVRParams) -> str:
        """Tells of the setting that sends far less."""
        return "" if params.diagonal else "params.diagonal=true sends variances alone, far fewer bytes"

    async def finalize(self, state: Global, rnd: Round[CCVRParams]) -> Global:
        """Pools the moments of all clients' features under the final model and trains the classifier on samples."""
        spread = _build_spread(rnd.env)
        pooled = PooledMoments(rnd.env.num_classes, spread)

        def check(_: Global, moments: Moments) -> None:
            _check(moments, rnd.env.num_classes, spread)

        async for reply in rnd.ask(DESCRIBE, state, check=check):
            await rnd.compute(pooled.add, reply.body)
        rnd.record(described=int(pooled.counts.sum()))
        return Global(await rnd.compute(self._calibrate, state.weights, pooled, rnd))

    def _calibrate(self, weights: Tensors, pooled: PooledMoments, rnd: Round[CCVRParams]) -> Tensors:
        sampled = list(pooled.sample(rnd.params.num_virtual, rnd.rng("virtual")))
        if not sampled:
            return weights
        x = torch.cat([features for _, features in sampled])
        y = torch.cat([torch.full((len(features),), c) for c, features in sampled])
        model = rnd.model()
        load(model, weights)
        classifier: nn.Module = require_stages(model, self.name).classifier
        params = rnd.params
        config = TrainConfig(optimizer="sgd", lr=params.lr, epochs=params.epochs, batch_size=params.batch_size)
        data = Examples.of(x, y)
        train(classifier, cross_entropy, data, config, lr=params.lr, order=rnd.rng("order"), device=rnd.device)
        # All other tensors stay the same objects.
        return weights | {f"classifier.{name}": value for name, value in read_tensors(classifier).items()}

    @on(DESCRIBE)
    def describe(self, ctx: ClientContext[CCVRParams], msg: Global) -> Moments:
        """The moments of the client's features, in evaluation mode."""
        model = require_stages(ctx.model().eval(), self.name)
        load(model, msg.weights)
        spread = _build_spread(ctx.env)
        features = [torch.empty(0, spread.features, device=ctx.device)]
        with torch.no_grad():
            for x, _ in ctx.data.train.batches(_BATCH):
                ctx.check()
                features.append(model.features(x.to(ctx.device)))
        found = compute_moments(torch.cat(features).cpu().double(), ctx.data.train.y, ctx.env.num_classes, spread)
        return Moments(found.counts.int(), found.means.float(), found.spreads.float())

    def cost(self, shapes: Shapes[CCVRParams]) -> Cost:
        """FedAvg's, plus at the end the model down to every client and its moments up."""
        n = shapes.env.num_clients if shapes.cohorts else 0
        return (
            super()
            .cost(shapes)
            .add("down", Kind.WEIGHTS, n * shapes.weights_bytes)
            .add("up", Kind.MOMENTS, n * _count_bytes(shapes.env))
        )


def _build_spread(env: Env[CCVRParams]) -> Spread:
    return Spread(require_stages(env.model(), "ccvr").classifier.in_features, env.params.diagonal)


def _count_bytes(env: Env[CCVRParams]) -> int:
    spread = _build_spread(env)
    return 4 * env.num_classes * (1 + spread.features + spread.width)


def _check(moments: Moments, num_classes: int, spread: Spread) -> None:
    wanted: dict[str, tuple[Any, ...]] = {
        "counts": (torch.int32, (num_classes,)),
        "means": (torch.float32, (num_classes, spread.features)),
        "spreads": (torch.float32, (num_classes, spread.width)),
    }
    for name, layout in wanted.items():
        value: Tensor = getattr(moments, name)
        if (value.dtype, tuple(value.shape)) != layout:
            raise ValueError(f"'{name}' should be {layout}, got {value.dtype} {tuple(value.shape)}")
    if bool((moments.counts < 0).any()):
        raise ValueError("a class cannot have fewer than 0 examples")
