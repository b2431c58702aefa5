"""A pool of items that clients share once, before the first round, and that each client stores from then on.

Every tensor of a pool's message has one row for each item. A client that did not receive the pool trains without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedrpc.data.examples import Examples
from fedrpc.errors import ConfigError, QuorumError
from fedrpc.methods.blocks.mixup import one_hot
from fedrpc.methods.phases import Phase
from fedrpc.methods.runtime import Round
from fedrpc.methods.tools import PastClient, View
from fedrpc.wire.message import Tensors

Items = TypeVar("Items")

POOL = "pool"  # its key in a client's store


@dataclass(frozen=True)
class Nothing:
    """A message without content."""


@dataclass(frozen=True)
class Layout:
    """The layout of one item.

    Args:
        rows: For each tensor of the message, the dtype and shape of one row; other tensors must be None.
    """

    rows: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

    @property
    def size_bytes(self) -> int:
        """The size of one item on the wire."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.rows.values())

    def check(self, items: Any) -> None:
        """Raises ValueError unless all tensors have this layout and the same number of rows."""
        got: Mapping[str, Tensor] = {name: value for name, value in vars(items).items() if value is not None}
        if set(got) != set(self.rows):
            raise ValueError(f"items should have {', '.join(self.rows)}, got {', '.join(got)}")
        for name, (dtype, shape) in self.rows.items():
            if got[name].dtype != dtype or not got[name].dim() or got[name].shape[1:] != shape:
                raise ValueError(f"'{name}' should be rows of {dtype} {shape}, got {got[name].dtype} {got[name].shape}")
        counts = {name: len(value) for name, value in got.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"an item is a row of each tensor, got {counts}")


def check_labels(y: Tensor, num_classes: int) -> None:
    """Raises ValueError when a label is out of range."""
    if bool(((y < 0) | (y >= num_classes)).any()):
        raise ValueError(f"labels should be from 0 to {num_classes - 1}")


def check_distributions(y: Tensor) -> None:
    """Raises ValueError unless every row is a probability distribution."""
    if bool((y < 0).any()) or not torch.allclose(y.sum(dim=1), torch.ones(len(y)), atol=1e-4):
        raise ValueError("label distributions should be 0 or more and sum to 1")


async def collect(rnd: Round, phase: Phase[Nothing, Items], layout: Layout, check: Callable[[Items], None]) -> Items:
    """Asks all clients for items and joins them, in an order that does not reveal whose they are.

    A pool of more than `params.max_pool` bytes is refused before its memory is allocated.

    Args:
        check: Raises ValueError when a client's items are wrong otherwise; the client then counts as missing.
    """

    def check_answer(_: Nothing, items: Items) -> None:
        layout.check(items)
        check(items)

    gathered: dict[str, list[Tensor]] = {name: [] for name in layout.rows}
    size_bytes, max_bytes = 0, rnd.params.max_pool
    async for reply in rnd.ask(phase, Nothing(), check=check_answer):
        size_bytes += sum(getattr(reply.body, name).nbytes for name in gathered)
        if size_bytes > max_bytes:
            raise ConfigError(
                f"the pool takes more than {max_bytes} bytes (an item takes {layout.size_bytes}); raise "
                "params.max_pool or let every client share less"
            )
        for name, rows in gathered.items():
            rows.append(getattr(reply.body, name).clone())
    return phase.up(**await rnd.compute(_shuffle, gathered, rnd.rng("pool")))


def _shuffle(gathered: Mapping[str, list[Tensor]], rng: np.random.Generator) -> Tensors:
    if not all(gathered.values()):
        raise QuorumError("no client shared anything, so there is no pool")
    order = torch.from_numpy(rng.permutation(sum(map(len, next(iter(gathered.values()))))))
    return {name: torch.cat(rows)[order] for name, rows in gathered.items()}


async def distribute_pool(rnd: Round, phase: Phase[Items, Nothing], pool: Items) -> None:
    """Sends the pool to every client, and records its size and how many clients did not receive it."""
    async for _ in rnd.ask(phase, pool):
        pass
    tensors = [value for value in vars(pool).values() if value is not None]
    rnd.record(
        pool_items=len(tensors[0]), pool_bytes=sum(value.nbytes for value in tensors), without_pool=len(rnd.missing)
    )


def find_stored_pools(clients: Sequence[PastClient], cls: type[Items], at_most: int = 1) -> list[Items]:
    """The pools in the stores of the first clients that have one, after the run."""
    found: list[Items] = []
    for client in clients:
        if len(found) == at_most:
            break
        pool = client.store.get(POOL, cls)
        if pool is not None:
            found.append(pool)
    return found


def count_shared(alpha: float, num_examples: int) -> int:
    """The number of examples that a client shares: alpha as it was written (0.29 of 100 is 29), rounded down."""
    return int(Fraction(repr(alpha)) * num_examples)


def count_groups(num_examples: int, size: int, at_most: int | None = None) -> int:
    """The number of whole groups; a remainder is not shared, because its mean would hide too few examples."""
    whole = num_examples // size
    return whole if at_most is None else min(whole, at_most)


def sample_groups(data: Examples, size: int, rng: np.random.Generator, at_most: int | None = None) -> np.ndarray:
    """Samples disjoint groups of positions, a row each."""
    count = count_groups(len(data), size, at_most)
    return rng.permutation(len(data))[: count * size].reshape(count, size)


def average_inputs(data: Examples, groups: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """The mean input of each group, one group at a time."""
    means = [data.batch(group)[0].mean(dim=0) for group in groups]
    return torch.stack(means) if means else torch.empty(0, *shape)


def average_labels(data: Examples, groups: np.ndarray, num_classes: int) -> Tensor:
    """The label distribution of each group."""
    return one_hot(data.y[torch.from_numpy(groups)], num_classes).mean(dim=1)


def build_view_of_means(size: int, at_most: int | None = None) -> View:
    """How examples become means of random groups, sampled in set-up from the stream `share`."""

    def sources(client: PastClient) -> np.ndarray:
        return sample_groups(client.data.train, size, client.setup_rng("share"), at_most)

    # One by one, as in `average_inputs`, so that sums are rounded alike.
    return View(lambda groups: torch.stack([group.mean(dim=0) for group in groups]), sources, size)
