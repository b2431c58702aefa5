"""FedData (an upper bound, as in FLea, Xia et al., KDD 2024): FedAvg where every client shares raw data with all.

Departs from the paper:
- A client samples what it shares without replacement; the published code samples with replacement.
- A client removes its own items from the pool that it trains on, because it has them already.
- `transport = "uint8"` quantises each input to bytes between its least and its largest value, a fourth of the size; the
  error is at most a 510th of that range. The paper sends float32, which is the default.
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
from fedrpc.methods.blocks.pool import (
    POOL,
    Layout,
    Nothing,
    check_labels,
    collect,
    count_shared,
    distribute_pool,
    find_stored_pools,
)
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


def describe_item(env: Env[FedDataParams]) -> Layout:
    """An input, its label and, for inputs in bytes, its bounds."""
    label = (torch.int64, ())
    if env.params.transport == "uint8":
        return Layout({"x": (torch.uint8, env.shape), "y": label, "bounds": (torch.float32, (2,))})
    return Layout({"x": (torch.float32, env.shape), "y": label})


def pack(x: Tensor, y: Tensor) -> Samples:
    """Quantises float inputs to bytes."""
    flat = x.flatten(1)
    low, high = flat.amin(dim=1, keepdim=True), flat.amax(dim=1, keepdim=True)
    step = ((high - low) / _LEVELS).clamp_min(torch.finfo(x.dtype).tiny)  # a constant input has no range
    levels = ((flat - low) / step).round_().clamp_(0, _LEVELS).to(torch.uint8)
    return Samples(levels.view(x.shape), y, torch.cat([low, high], dim=1))


def unpack(x: Tensor, bounds: Tensor | None) -> Tensor:
    """Converts inputs back to floats."""
    if bounds is None:
        return x
    low, high = (bound.view(-1, *[1] * (x.dim() - 1)) for bound in bounds.unbind(dim=1))
    return low + x.float() * ((high - low) / _LEVELS)


def remove_own(pool: Samples, own: Samples) -> Samples:
    """The pool less one copy of each own item, found by its bytes: the pool does not say whose an item is."""
    left = Counter(_build_keys(own))
    keep = []
    for row, key in enumerate(_build_keys(pool)):
        if left[key]:
            left[key] -= 1
        else:
            keep.append(row)
    return Samples(pool.x[keep], pool.y[keep], None if pool.bounds is None else pool.bounds[keep])


def _build_keys(items: Samples) -> list[tuple[int, bytes]]:
    return [(y, x.numpy().tobytes()) for y, x in zip(items.y.tolist(), items.x, strict=True)]


def _check(items: Samples, num_classes: int) -> None:
    check_labels(items.y, num_classes)
    if items.bounds is not None and bool((items.bounds[:, 0] > items.bounds[:, 1]).any()):
        raise ValueError("an input's least value cannot be above its largest")


class FedDataParams(Params):
    """FLea's value."""

    alpha: float = Field(0.1, ge=0, le=1, description="share of a client's examples that it adds to the pool")
    transport: Literal["float32", "uint8"] = Field("float32", description="dtype of inputs on the wire")
    max_pool: ByteSize = Field(ByteSize(512 << 20), gt=0, description="largest pool in bytes, or like '256MiB'")


@register
class FedData(FedAvg[FedDataParams]):
    """FedAvg on each client's own data and a pool of all clients' data."""

    name = "feddata"
    shares = "training examples with labels"
    shares_raw_data = True
    dp_sgd = refused("raw data leaves the clients, and each trains on records that are not its own to account for")

    async def setup(self, state: Global, rnd: Round[FedDataParams]) -> Global:
        """Collects the items of all clients and distributes the pool to every client."""
        if rnd.params.alpha:
            check = partial(_check, num_classes=rnd.env.num_classes)
            pool = await collect(rnd, COLLECT, describe_item(rnd.env), check)
            await distribute_pool(rnd, DISTRIBUTE, pool)
        return state

    @on(COLLECT)
    def share_items(self, ctx: ClientContext[FedDataParams], msg: Nothing) -> Samples:
        """Shares a random part of the client's examples, with labels."""
        data = ctx.data.train
        x, y = data.batch(_sample_positions(len(data), ctx.params.alpha, ctx.rng("share")))
        own = pack(x, y) if ctx.params.transport == "uint8" else Samples(x, y)
        ctx.store.put(_SENT, own)
        return own

    @on(DISTRIBUTE)
    def store_pool(self, ctx: ClientContext[FedDataParams], msg: Samples) -> Nothing:
        """Stores the other clients' items."""
        own = ctx.store.get(_SENT, Samples)
        ctx.store.put(POOL, msg if own is None else remove_own(msg, own))
        ctx.store.delete(_SENT)
        return Nothing()

    def fit(self, ctx: ClientContext[FedDataParams], msg: Global) -> Update:
        """Trains on own and pooled data; the update is weighted by the client's own examples alone."""
        data, pool = ctx.data.train, ctx.store.get(POOL, Samples)
        if pool is not None:
            data = data + _build_examples(pool)
        model = ctx.model()
        load(model, msg.weights)
        report = ctx.train(model, self.build_loss(ctx, msg), data=data)
        report = replace(report, num_examples=len(ctx.data.train))
        return Update(**release_update(ctx, model, report))

    def collect_shared_items(self, state: Global, clients: Sequence[PastClient]) -> SharedItems | None:
        """The pool as floats. A client stores it without its own items, so these come from a second client."""
        pools = find_stored_pools(clients, Samples, at_most=2)
        if not pools:
            return None
        if len(pools) > 1:
            pools[1] = remove_own(pools[1], pools[0])
        return SharedItems(
            torch.cat([unpack(pool.x, pool.bounds) for pool in pools]), torch.cat([pool.y for pool in pools])
        )

    def build_view(self, env: Env[FedDataParams], weights: Tensors, device: torch.device) -> View:
        """Inputs as they travel: unchanged, or after quantisation."""

        def show(groups: Tensor) -> Tensor:
            x = groups[:, 0]
            if env.params.transport == "float32":
                return x
            sent = pack(x, torch.zeros(len(x)))
            return unpack(sent.x, sent.bounds)

        def sources(client: PastClient) -> np.ndarray:
            return _sample_positions(len(client.data.train), env.params.alpha, client.setup_rng("share"))[:, None]

        return View(show, sources)

    def cost(self, shapes: Shapes[FedDataParams]) -> Cost:
        """FedAvg's, plus once every client's items up and the whole pool down to every client."""
        env = shapes.env
        pool_bytes = describe_item(env).size_bytes * sum(count_shared(env.params.alpha, n) for n in shapes.num_examples)
        return (
            super()
            .cost(shapes)
            .add("up", Kind.SAMPLES, pool_bytes)
            .add("down", Kind.SAMPLES, pool_bytes * env.num_clients)
        )


def _sample_positions(num_examples: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(num_examples)[: count_shared(alpha, num_examples)]


def _build_examples(pool: Samples) -> Examples:
    def fetch(index: torch.Tensor) -> Tensor:
        return unpack(pool.x[index], None if pool.bounds is None else pool.bounds[index])

    return Examples(pool.y, lambda index: fetch(torch.from_numpy(index)))
