"""FedDPMS's noisy class means of latent vectors: choosing classes, matching clients, and sampling noisy copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrpc.methods.phases import ClientId
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import part

NONE = -1  # the class of an empty row


@dataclass(frozen=True)
class NoisyMeans:
    """Noisy latent means with their classes, a row each; a row with class `NONE` is empty."""

    latents: Tensor = part(Kind.LATENT_MEANS)
    labels: Tensor = part(Kind.CLASS_ABUNDANCE)

    def select_rows(self) -> tuple[Tensor, Tensor]:
        """The rows that are not empty."""
        some = self.labels != NONE
        return self.latents[some], self.labels[some]

    def check(self, count: int, latent: int, classes: Tensor) -> None:
        """Raises ValueError unless there are `count` rows, all empty or of one of the classes."""
        wanted = {"latents": (torch.float32, (count, latent)), "labels": (torch.int64, (count,))}
        for name, layout in wanted.items():
            value: Tensor = getattr(self, name)
            if (value.dtype, tuple(value.shape)) != layout:
                raise ValueError(f"'{name}' should be {layout}, got {value.dtype} {tuple(value.shape)}")
        if not {*self.labels.tolist()} <= {NONE, *classes.tolist()}:
            raise ValueError("a row has a label that is not among the named classes")


def build_empty_rows(n: int, alpha: int, latent: int) -> tuple[Tensor, Tensor]:
    """Empty rows for `n` classes: latent vectors and labels, by class and copy."""
    return torch.zeros(n, alpha, latent), torch.full((n, alpha), NONE)


def rank_abundant_classes(counts: Sequence[int], n: int, least: int = 1) -> list[int]:
    """The n classes with the most examples, ties by id; `NONE` in place of one with fewer than `least`."""
    order = sorted(range(len(counts)), key=lambda c: (-counts[c], c))[:n]
    return [c if counts[c] >= least else NONE for c in order]


def rank_scarce_classes(counts: Sequence[int], n: int) -> list[int]:
    """The n classes with the fewest examples, ties by id."""
    return sorted(range(len(counts)), key=lambda c: (counts[c], c))[:n]


def match_client(wanted: Sequence[int], offered: Mapping[ClientId, Sequence[int]], client: ClientId) -> ClientId | None:
    """The other client that offers most of the wanted classes, ties by id; None if no client offers any."""
    common = {other: len({*wanted} & {*classes} - {NONE}) for other, classes in offered.items() if other != client}
    best = max(sorted(common), key=lambda other: common[other], default=None)
    return best if best is not None and common[best] else None


def choose_members(labels: Tensor, c: int, m: int, numbers: Tensor) -> Tensor:
    """The positions of the m examples of a class that have the smallest numbers.

    A number belongs to a position, whatever is there. So a record that is replaced changes at most one member of its
    class; if the new record is of another class, at most one of that class, too.

    Args:
        labels: The class of every example.
        numbers: The number of every example, all different, and independent of the examples.
    """
    mine = (labels == c).nonzero()[:, 0]
    return mine[numbers[mine].argsort()[:m]]


def sample_passing_copies(
    mean: Tensor,
    std: float,
    noise: torch.Generator,
    passes: Callable[[Tensor], Tensor],
    *,
    quota: int,
    tries: int,
) -> tuple[Tensor, int]:
    """Samples noisy copies of a latent vector until `quota` of them pass a test, or the tries are used up.

    Args:
        std: The standard deviation of the noise on every coordinate.
        noise: The generator of the noise.
        passes: Whether each row passes.
        quota: The number of copies wanted, and sampled in each try.

    Returns:
        The copies that passed, and the number of copies tested for them.
    """
    kept, seen = mean.new_empty(0, len(mean)), 0
    for _ in range(tries if quota else 0):
        copies = mean + std * torch.randn(quota, len(mean), generator=noise)
        passed = passes(copies).nonzero()[:, 0]
        missing = quota - len(kept)
        kept = torch.cat([kept, copies[passed[:missing]]])
        if len(passed) >= missing:
            return kept, seen + int(passed[missing - 1]) + 1
        seen += quota
    return kept, seen
