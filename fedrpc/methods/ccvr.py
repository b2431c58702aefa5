"""CCVR (Luo et al., NeurIPS 2021): after FedAvg, the classifier is trained anew on features drawn from class Gaussians.

Departs from the paper:
- `diagonal = true` sends variances alone, which is a small part of the bytes.
- Moments are computed in float64 and travel as float32, a covariance as its upper triangle.
- Features are drawn by eigen-decomposition, so a class with fewer examples than features needs no correction.
- Every class gets as many virtual features; a class that nobody has gets none.
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

_BATCH = 256  # of the extraction: bounds its memory, changes nothing else


@dataclass(frozen=True)
class Moments:
    """Up: by class, the number, mean and unbiased covariance (or variances) of the features."""

    counts: Tensor = part(Kind.MOMENTS)
    means: Tensor = part(Kind.MOMENTS)
    spreads: Tensor = part(Kind.MOMENTS)


DESCRIBE = Phase("describe", Global, Moments)


@dataclass(frozen=True)
class Spread:
    """How the products of features by pairs are laid out: all squares, or the upper triangle of all pairs.

    Args:
        features: How many there are.
        diagonal: Squares alone.
    """

    features: int
    diagonal: bool

    @property
    def width(self) -> int:
        """Values for one class."""
        return self.features if self.diagonal else self.features * (self.features + 1) // 2

    def of(self, centred: Tensor) -> Tensor:
        """The sum of products over rows."""
        if self.diagonal:
            return centred.square().sum(dim=0)
        rows, columns = torch.triu_indices(self.features, self.features)
        return (centred.T @ centred)[rows, columns]

    def draw(self, spread: Tensor, count: int, rng: np.random.Generator) -> Tensor:
        """Centred Gaussian rows with this covariance, or with these variances and no covariance."""
        if self.diagonal:
            return torch.from_numpy(rng.standard_normal((count, self.features))) * spread.clamp_min(0).sqrt()
        root = self.root(spread)
        return torch.from_numpy(rng.standard_normal((count, root.shape[1]))) @ root.T

    def root(self, spread: Tensor) -> Tensor:
        """A matrix A with A A' the covariance, its columns the directions in which there is any."""
        covariance = spread.new_zeros(self.features, self.features)
        rows, columns = torch.triu_indices(self.features, self.features)
        covariance[rows, columns] = spread
        values, vectors = torch.linalg.eigh(covariance, UPLO="U")
        # What rounding leaves of a zero eigenvalue may have either sign.
        some = values > values[-1].clamp_min(0) * self.features * torch.finfo(torch.float32).eps
        root: Tensor = vectors[:, some] * values[some].sqrt()
        return root


def moments_of(features: Tensor, y: Tensor, num_classes: int, spread: Spread) -> Moments:
    """One client's moments; a class of one example has no spread, a class of none has no mean either."""
    counts = torch.bincount(y, minlength=num_classes)
    means = features.new_zeros(num_classes, spread.features)
    spreads = features.new_zeros(num_classes, spread.width)
    for c in counts.nonzero()[:, 0].tolist():
        mine = features[y == c]
        means[c] = mine.mean(dim=0)
        spreads[c] = spread.of(mine - means[c]) / max(len(mine) - 1, 1)
    return Moments(counts, means, spreads)


class Pooled:
    """Everybody's moments by class, merged one client at a time, in float64.

    Merging a client adds its scatter about its own mean and that of the two means about each other, which is the pooled
    covariance's formula without the difference of large numbers in it.
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
            self._scatters[c] += self._spread.of(moved[None]) * (before * count / (before + count))
            self.means[c] += moved * (count / (before + count))
            self.counts[c] += count

    def spread(self, c: int) -> Tensor:
        """A class's unbiased covariance or variances."""
        return self._scatters[c] / max(int(self.counts[c]) - 1, 1)

    def draw(self, count: int, rng: np.random.Generator) -> Iterator[tuple[int, Tensor]]:
        """Virtual features for every class that somebody has."""
        for c in self.counts.nonzero()[:, 0].tolist():
            yield c, (self.means[c] + self._spread.draw(self.spread(c), count, rng)).float()


class CCVRParams(Params):
    """Values of public code; the paper tunes the number of virtual features."""

    diagonal: bool = Field(False, description="send variances, not covariances")
    num_virtual: int = Field(2000, ge=1, description="virtual features of each class")
    lr: float = Field(1e-3, gt=0, description="of the classifier's SGD")
    epochs: int = Field(10, ge=0, description="over the virtual features")
    batch_size: int = Field(64, ge=1)
    max_moments: ByteSize = Field(ByteSize(256 << 20), gt=0, description="bytes of one client's moments at most")


@register
class CCVR(FedAvg[CCVRParams]):
    """FedAvg, and at its end a calibrated classifier."""

    name = "ccvr"
    dp_sgd = refused("means and covariances of the features of each class leave a client without noise")
    shares = "feature means and covariances by class"

    def check(self, env: Env[CCVRParams]) -> None:
        """Refuses networks without features, and moments that are too large to send."""
        size = _size_bytes(env)
        if size > env.params.max_moments:
            raise ConfigError(
                f"the moments of {_spread_of(env).features} features and {env.num_classes} classes take {size} bytes "
                f"a client but params.max_moments is {env.params.max_moments}; set params.diagonal = true, raise it, "
                "or choose a --model with fewer features"
            )

    async def finalize(self, state: Global, rnd: Round[CCVRParams]) -> Global:
        """Pools the moments of everybody's features under the final model and trains the classifier on draws."""
        spread = _spread_of(rnd.env)
        pooled = Pooled(rnd.env.num_classes, spread)

        def check(_: Global, moments: Moments) -> None:
            _check(moments, rnd.env.num_classes, spread)

        async for reply in rnd.ask(DESCRIBE, state, check=check):
            await rnd.compute(pooled.add, reply.body)
        rnd.record(described=int(pooled.counts.sum()))
        return Global(await rnd.compute(self._calibrated, state.weights, pooled, rnd))

    def _calibrated(self, weights: Tensors, pooled: Pooled, rnd: Round[CCVRParams]) -> Tensors:
        drawn = list(pooled.draw(rnd.params.num_virtual, rnd.rng("virtual")))
        if not drawn:
            return weights
        x = torch.cat([features for _, features in drawn])
        y = torch.cat([torch.full((len(features),), c) for c, features in drawn])
        model = rnd.model()
        load(model, weights)
        classifier: nn.Module = require_stages(model, self.name).classifier
        params = rnd.params
        config = TrainConfig(optimizer="sgd", lr=params.lr, epochs=params.epochs, batch_size=params.batch_size)
        data = Examples.of(x, y)
        train(classifier, cross_entropy, data, config, lr=params.lr, order=rnd.rng("order"), device=rnd.device)
        # Everything else stays the very tensors that it was.
        return weights | {f"classifier.{name}": value for name, value in read_tensors(classifier).items()}

    @on(DESCRIBE)
    def describe(self, ctx: ClientContext[CCVRParams], msg: Global) -> Moments:
        """The moments of the client's features, in evaluation mode."""
        model = require_stages(ctx.model().eval(), self.name)
        load(model, msg.weights)
        spread = _spread_of(ctx.env)
        features = [torch.empty(0, spread.features, dtype=torch.float64)]
        with torch.no_grad():
            for x, _ in ctx.data.train.batches(_BATCH):
                ctx.check()
                features.append(model.features(x.to(ctx.device)).cpu().double())
        found = moments_of(torch.cat(features), ctx.data.train.y, ctx.env.num_classes, spread)
        return Moments(found.counts.int(), found.means.float(), found.spreads.float())

    def cost(self, shapes: Shapes[CCVRParams]) -> Cost:
        """FedAvg's, and at the end the model down to every client and its moments up."""
        n = shapes.env.num_clients if shapes.cohorts else 0
        return (
            super()
            .cost(shapes)
            .add("down", Kind.WEIGHTS, n * shapes.weights_bytes)
            .add("up", Kind.MOMENTS, n * _size_bytes(shapes.env))
        )


def _spread_of(env: Env[CCVRParams]) -> Spread:
    return Spread(require_stages(env.model(), "ccvr").classifier.in_features, env.params.diagonal)


def _size_bytes(env: Env[CCVRParams]) -> int:
    spread = _spread_of(env)
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
        raise ValueError("a class can not have fewer than 0 examples")
