"""FedData (an upper bound, as in FLea, Xia et al., KDD 2024): FedAvg where every client shares raw data with all.

Departs from the paper:
- A client draws what it shares without replacement; the published code draws with replacement.
- A client leaves its own items out of the pool that it trains on, for it has them already.
- `transport = "uint8"` packs each input into bytes between its least and its largest value, a fourth of the size; what
  comes out differs by at most a 510th of that range. The paper sends float32, which is the default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from pydantic import ByteSize, Field
from torch import Tensor

from fedrpc.data.examples import Examples
from fedrpc.methods.blocks.pool import POOL, Layout, Nothing, check_labels, collect, found_again, hand_out, share
from fedrpc.methods.blocks.updates import release_update
from fedrpc.methods.fedavg import FedAvg, Global, Update
from fedrpc.methods.method import ClientContext, Cost, Env, Params, Phase, Round, Shapes, on, refused, register
from fedrpc.methods.tools import PastClient, SharedItems, View
from fedrpc.models.state import load
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part

_LEVELS = 255
_SENT = "sent"  # a client's own items, until it has the pool


@dataclass(frozen=True)
class Samples:
    """Inputs and labels, and for inputs in bytes the least and the largest value of each."""

    x: Tensor = part(Kind.SAMPLES)
    y: Tensor = part(Kind.SAMPLES)
    bounds: Tensor | None = part(Kind.SAMPLES, default=None)


COLLECT = Phase("collect", Nothing, Samples)
DISTRIBUTE = Phase("distribute", Samples, Nothing)


def layout_of(env: Env[FedDataParams]) -> Layout:
    """An input, its label and perhaps its bounds."""
    label = (torch.int64, ())
    if env.params.transport == "uint8":
        return Layout({"x": (torch.uint8, env.shape), "y": label, "bounds": (torch.float32, (2,))})
    return Layout({"x": (torch.float32, env.shape), "y": label})


def packed(x: Tensor, y: Tensor) -> Samples:
    """Float inputs in bytes."""
    flat = x.flatten(1)
    low, high = flat.amin(dim=1, keepdim=True), flat.amax(dim=1, keepdim=True)
    step = ((high - low) / _LEVELS).clamp_min(torch.finfo(x.dtype).tiny)  # a constant input has no range
    levels = ((flat - low) / step).round_().clamp_(0, _LEVELS).to(torch.uint8)
    return Samples(levels.view(x.shape), y, torch.cat([low, high], dim=1))


def unpacked(x: Tensor, bounds: Tensor | None) -> Tensor:
    """Inputs as floats again."""
    if bounds is None:
        return x
    low, high = (bound.view(-1, *[1] * (x.dim() - 1)) for bound in bounds.unbind(dim=1))
    return low + x.float() * ((high - low) / _LEVELS)


def without(pool: Samples, own: Samples) -> Samples:
    """The pool less one copy of each own item, told by its bytes: the pool need not say whose an item is."""
    left = Counter(_bytes_of(own))
    keep = []
    for row, key in enumerate(_bytes_of(pool)):
        if left[key]:
            left[key] -= 1
        else:
            keep.append(row)
    return Samples(pool.x[keep], pool.y[keep], None if pool.bounds is None else pool.bounds[keep])


def _bytes_of(items: Samples) -> list[tuple[int, bytes]]:
    return [(y, x.numpy().tobytes()) for y, x in zip(items.y.tolist(), items.x, strict=True)]


def _check(items: Samples, num_classes: int) -> None:
    check_labels(items.y, num_classes)
    if items.bounds is not None and bool((items.bounds[:, 0] > items.bounds[:, 1]).any()):
        raise ValueError("an input's least value can not be above its largest")


class FedDataParams(Params):
    """FLea's value."""

    alpha: float = Field(0.1, ge=0, le=1, description="share of a client's examples that it gives to the pool")
    transport: Literal["float32", "uint8"] = Field("float32", description="dtype of inputs on the wire")
    max_pool: ByteSize = Field(ByteSize(512 << 20), gt=0, description="bytes of the largest pool, or '256MiB'")


@register
class FedData(FedAvg[FedDataParams]):
    """FedAvg on each client's own data and a pool of everybody's."""

    name = "feddata"
    shares = "training examples with labels"
    shares_raw_data = True
    dp_sgd = refused("raw data leaves the clients, and each trains on records that are not its own to account for")

    async def setup(self, state: Global, rnd: Round[FedDataParams]) -> Global:
        """Collects everybody's part and gives all of it to everybody."""
        if rnd.params.alpha:
            check = partial(_check, num_classes=rnd.env.num_classes)
            pool = await collect(rnd, COLLECT, layout_of(rnd.env), check)
            await hand_out(rnd, DISTRIBUTE, pool)
        return state

    @on(COLLECT)
    def give(self, ctx: ClientContext[FedDataParams], msg: Nothing) -> Samples:
        """A random part of the client's examples, with labels."""
        data = ctx.data.train
        x, y = data.batch(_drawn(len(data), ctx.params.alpha, ctx.rng("share")))
        own = packed(x, y) if ctx.params.transport == "uint8" else Samples(x, y)
        ctx.store.put(_SENT, own)
        return own

    @on(DISTRIBUTE)
    def keep(self, ctx: ClientContext[FedDataParams], msg: Samples) -> Nothing:
        """Keeps what is other clients'."""
        own = ctx.store.get(_SENT, Samples)
        ctx.store.put(POOL, msg if own is None else without(msg, own))
        ctx.store.delete(_SENT)
        return Nothing()

    def fit(self, ctx: ClientContext[FedDataParams], msg: Global) -> Update:
        """Trains on own and pooled data; the model counts by the client's own examples alone."""
        data, pool = ctx.data.train, ctx.store.get(POOL, Samples)
        if pool is not None:
            data = data + _examples(pool)
        model = ctx.model()
        load(model, msg.weights)
        report = ctx.train(model, self.build_loss(ctx, msg), data=data)
        report = replace(report, num_examples=len(ctx.data.train))
        return Update(**release_update(ctx, model, report))

    def shared(self, state: Global, clients: Sequence[PastClient]) -> SharedItems | None:
        """The pool, unpacked. Every client left its own items out of what it kept, so another one's has these."""
        pools = found_again(clients, Samples, at_most=2)
        if not pools:
            return None
        if len(pools) > 1:
            pools[1] = without(pools[1], pools[0])
        return SharedItems(
            torch.cat([unpacked(pool.x, pool.bounds) for pool in pools]), torch.cat([pool.y for pool in pools])
        )

    def view(self, env: Env[FedDataParams], weights: Tensors, device: torch.device) -> View:
        """Inputs as they are, or as bytes leave them."""

        def show(groups: Tensor) -> Tensor:
            x = groups[:, 0]
            if env.params.transport == "float32":
                return x
            sent = packed(x, torch.zeros(len(x)))
            return unpacked(sent.x, sent.bounds)

        def sources(client: PastClient) -> np.ndarray:
            return _drawn(len(client.data.train), env.params.alpha, client.setup_rng("share"))[:, None]

        return View(show, sources)

    def cost(self, shapes: Shapes[FedDataParams]) -> Cost:
        """FedAvg's, and once every client's part up and all parts down to every client."""
        env = shapes.env
        pool_bytes = layout_of(env).size_bytes * sum(share(env.params.alpha, n) for n in shapes.num_examples)
        return (
            super()
            .cost(shapes)
            .add("up", Kind.SAMPLES, pool_bytes)
            .add("down", Kind.SAMPLES, pool_bytes * env.num_clients)
        )


def _drawn(num_examples: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(num_examples)[: share(alpha, num_examples)]


def _examples(pool: Samples) -> Examples:
    def fetch(index: torch.Tensor) -> Tensor:
        return unpacked(pool.x[index], None if pool.bounds is None else pool.bounds[index])

    return Examples(pool.y, lambda index: fetch(torch.from_numpy(index)))
