"""Noisy class means of latent vectors (FedDPMS): which classes, whose, how noisy, and which of them are usable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrpc.methods.phases import ClientId
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import part

NONE = -1  # stands for no class, where a message has room for more than there is


@dataclass(frozen=True)
class NoisyMeans:
    """Noisy latent means with their classes, a row each; a row without a class is empty."""

    latents: Tensor = part(Kind.LATENT_MEANS)
    labels: Tensor = part(Kind.CLASS_ABUNDANCE)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Those that are not empty."""
        some = self.labels != NONE
        return self.latents[some], self.labels[some]

    def check(self, count: int, latent: int, classes: Tensor) -> None:
        """Raises ValueError unless these are so many rows, of some of the classes."""
        wanted = {"latents": (torch.float32, (count, latent)), "labels": (torch.int64, (count,))}
        for name, layout in wanted.items():
            value: Tensor = getattr(self, name)
            if (value.dtype, tuple(value.shape)) != layout:
                raise ValueError(f"'{name}' should be {layout}, got {value.dtype} {tuple(value.shape)}")
        if not {*self.labels.tolist()} <= {NONE, *classes.tolist()}:
            raise ValueError("a row has a label that is none of the classes named")


def room(n: int, alpha: int, latent: int) -> tuple[Tensor, Tensor]:
    """Empty rows for all classes: latent vectors and labels, each by class and number."""
    return torch.zeros(n, alpha, latent), torch.full((n, alpha), NONE)


def abundant(counts: Sequence[int], n: int, least: int = 1) -> list[int]:
    """The n classes with most examples, ties by id; `NONE` in place of one with fewer than `least`."""
    order = sorted(range(len(counts)), key=lambda c: (-counts[c], c))[:n]
    return [c if counts[c] >= least else NONE for c in order]


def scarce(counts: Sequence[int], n: int) -> list[int]:
    """The n classes with fewest examples, ties by id."""
    return sorted(range(len(counts)), key=lambda c: (counts[c], c))[:n]


def matched(wanted: Sequence[int], offered: Mapping[ClientId, Sequence[int]], client: ClientId) -> ClientId | None:
    """Who offers most of the classes that a client lacks: ties by id, never itself, nobody if there is none of them."""
    common = {other: len({*wanted} & {*classes} - {NONE}) for other, classes in offered.items() if other != client}
    best = max(sorted(common), key=lambda other: common[other], default=None)
    return best if best is not None and common[best] else None


def usable(
    mean: Tensor,
    std: float,
    noise: torch.Generator,
    passes: Callable[[Tensor], Tensor],
    *,
    quota: int,
    tries: int,
) -> tuple[Tensor, int]:
    """Noisy copies of a latent vector that pass a test: as many as the quota, or fewer when the tries are up.

    Args:
        std: Of the noise on every coordinate of every copy.
        noise: Its stream.
        passes: Says of each row whether it passes.
        quota: How many are wanted; a try draws so many at once.

    Returns:
        The copies, and how many were looked at for them.
    """
    kept, seen = mean.new_empty(0, len(mean)), 0
    for _ in range(tries if quota else 0):
        drawn = mean + std * torch.randn(quota, len(mean), generator=noise)
        passed = passes(drawn).nonzero()[:, 0]
        missing = quota - len(kept)
        kept = torch.cat([kept, drawn[passed[:missing]]])
        if len(passed) >= missing:
            return kept, seen + int(passed[missing - 1]) + 1
        seen += quota
    return kept, seen
