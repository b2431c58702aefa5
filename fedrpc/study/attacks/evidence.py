"""What the attacks on one run are given: shared items with their originals, auxiliary inputs, and the effort."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedrpc.seeds import derive

Show = Callable[[Tensor], Tensor]  # groups of inputs, (n, group_size, *shape), to n items
Progress = Callable[[str], None]  # called with the name of each step as it begins

# The kinds of items that are attacked: what was shared, and the controls.
SHARED, RAW, NOISE, UNTRAINED = "shared items", "raw inputs", "noise", "untrained"
SIZES = (10, 30, 100, 300, 1000, 3000)  # how many items a detector learns from
LEAST_AUX = 60  # auxiliary inputs without which there is no study
_SHOWN_AT_A_TIME = 256


@dataclass(frozen=True)
class Evidence:
    """Shared items and what the attacker knows; all inputs are normalised, as the network takes them.

    Args:
        items: Shared items whose inputs are known.
        originals: The inputs behind them.
        groups: For each item the rows of its inputs in `originals`.
        auxiliary: Inputs of the same distribution that the attacker has, none of which is behind an item.
        show: Turns groups of inputs into items, with the model that every party knows.
        untrained: The same with the network's initial weights.
        own_values: Turns inputs into the data's own range.
        bounds: The least and the largest value in that range, if it has any.
    """

    items: Tensor
    originals: Tensor
    groups: Tensor
    auxiliary: Tensor
    show: Show
    untrained: Show
    own_values: Callable[[Tensor], Tensor]
    bounds: tuple[float, float] | None = None

    @property
    def group_size(self) -> int:
        """Inputs behind one item."""
        return int(self.groups.shape[1])


@dataclass(frozen=True)
class Effort:
    """How hard the attacker tries."""

    epochs: int = 5
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sizes: Sequence[int] = SIZES

    def rng(self, *path: str | int) -> np.random.Generator:
        """The random stream of one step."""
        return derive(self.seed, "attack", *path)


def batches(rows: Tensor, size: int) -> Iterator[Tensor]:
    """Consecutive slices, the last one shorter."""
    return (rows[start : start + size] for start in range(0, len(rows), size))


def sample_groups(count: int, num_inputs: int, size: int, rng: np.random.Generator) -> Tensor:
    """Samples groups of inputs, no input twice in a group; groups of one use every input once before any again."""
    if size == 1:
        rounds = [rng.permutation(num_inputs) for _ in range(-(-count // num_inputs))]
        return torch.from_numpy(np.concatenate(rounds)[:count, None])
    return torch.from_numpy(np.stack([rng.choice(num_inputs, size, replace=False) for _ in range(count)]))


def show_groups(show: Show, inputs: Tensor, groups: Tensor) -> Tensor:
    """The items of some groups."""
    return torch.cat([show(inputs[part]) for part in batches(groups, _SHOWN_AT_A_TIME)])
