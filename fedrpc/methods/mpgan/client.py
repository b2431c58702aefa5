"""MP-GAN on a client: the discriminator that it trains, from step to step, and batches of its real images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedrpc.methods.method import ClientContext
from fedrpc.methods.mpgan.game import Canvas
from fedrpc.methods.mpgan.gan import build_adam, pack, unpack
from fedrpc.methods.mpgan.messages import DISCRIMINATOR, StoredDiscriminator


@dataclass(frozen=True)
class CachedDiscriminator:
    """A discriminator and its Adam in memory, with their packed values.

    Building them from the store costs as much as half a small step.
    """

    network: nn.Module
    optimizer: torch.optim.Adam
    values: Tensor


def load_discriminator(ctx: ClientContext[Any], build: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Adam]:
    """The client's discriminator and its Adam, as the store has them; the cached ones where they are equal."""
    stored = ctx.store.get(DISCRIMINATOR, StoredDiscriminator)
    # Taken out of the cache: they change from here on, and are right again only once the step is over.
    cached: CachedDiscriminator | None = ctx.cache.pop(DISCRIMINATOR, None)
    if stored and cached and torch.equal(cached.values, stored.values):
        return cached.network, cached.optimizer
    discriminator = build().to(ctx.device).train()
    optimizer = build_adam(discriminator, ctx.params.lr)
    if stored:
        unpack(discriminator, optimizer, stored.values)
    return discriminator, optimizer


def save_discriminator(ctx: ClientContext[Any], discriminator: nn.Module, optimizer: torch.optim.Adam) -> None:
    """Puts the discriminator and its Adam into the store and the cache."""
    values = pack(discriminator, optimizer)
    ctx.cache[DISCRIMINATOR] = CachedDiscriminator(discriminator, optimizer, values)
    ctx.store.put(DISCRIMINATOR, StoredDiscriminator(values, ctx.params.find_first_step(ctx.step)))


def require_shared(ctx: ClientContext[Any], first_step: int) -> None:
    """Abstains unless the store has the shared discriminator of the cohort that began at a step.

    A store that was lost or went back to an earlier state would give everybody another one.
    """
    stored = ctx.store.get(DISCRIMINATOR, StoredDiscriminator)
    if stored is None or stored.first_step != first_step:
        ctx.abstain(f"it has no discriminator of the cohort that began at step {first_step}")


def sample_real(ctx: ClientContext[Any], count: int) -> tuple[Tensor, Tensor]:
    """A batch of the client's own images with labels; a client with fewer examples repeats some."""
    data = ctx.data.train
    index = ctx.rng("real").choice(len(data), count, replace=len(data) < count)
    x, y = data.batch(index)
    return Canvas(ctx.env).to_images(x).to(ctx.device), y.to(ctx.device)
