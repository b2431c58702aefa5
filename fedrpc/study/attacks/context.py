"""The context attack: half of the inputs carry a mark, and a small network learns to detect it in shared items.

The mark stands for a context such as a broken camera (FLea, Xia et al., KDD 2024): a coloured square in a corner of an
image; a saturated stretch of the first channel of a signal. Where an item is made of several inputs of one client, all
of them carry it, as they would with a broken camera. Controls: with shuffled marks the network must guess, on raw
inputs it must detect the mark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrpc.seeds import seed_torch
from fedrpc.study.attacks.decoders import Standardised, build_detector
from fedrpc.study.attacks.evidence import (
    RAW,
    SHARED,
    Effort,
    Evidence,
    Progress,
    Show,
    batches,
    sample_groups,
    show_groups,
)

BATCH, RATE = 32, 2e-3
LEAST_STEPS = 25  # in each epoch, also with few items
MOST_HELDOUT = 1000
REPEATED, REPEATS = 100, 3  # with at most this many items to learn from, the mean over several samples counts


@dataclass(frozen=True)
class Mark:
    """What marked inputs carry: values for each channel in a corner.

    Args:
        values: One for each channel that is marked, the first ones.
        size: How far it reaches along every axis.
    """

    values: tuple[float, ...]
    size: tuple[int, ...]

    @classmethod
    def on(cls, inputs: Tensor) -> Mark:
        """A mark for such inputs: an eighth of each side, of the most extreme colour; on signals one channel alone."""
        flat = inputs.flatten(2) if inputs.dim() > 2 else inputs.unsqueeze(1)
        high, low = flat.amax(dim=(0, 2)), flat.amin(dim=(0, 2))
        size = tuple(max(1, round(side / 8)) for side in inputs.shape[2:] or inputs.shape[1:])
        values = (high[:1], low[1:]) if inputs.dim() == 4 else (high[:1],)
        return cls(tuple(torch.cat(values).tolist()), size)

    def put(self, inputs: Tensor) -> Tensor:
        """Marked copies."""
        marked = inputs.clone()
        target = marked if inputs.dim() > 2 else marked.unsqueeze(1)  # vectors have no channel
        # A step away from the edge, where there is room for it.
        starts = [min(1, whole - side) for whole, side in zip(target.shape[2:], self.size, strict=True)]
        along = (slice(start, start + side) for start, side in zip(starts, self.size, strict=True))
        values = torch.tensor(self.values).view(1, -1, *[1] * len(self.size))
        target[(slice(None), slice(len(self.values)), *along)] = values
        return marked


@dataclass(frozen=True)
class Items:
    """Items as they would be shared, and whether each one's inputs were marked."""

    items: Tensor
    marked: Tensor

    def __len__(self) -> int:
        return len(self.items)

    def take(self, start: int, count: int) -> Items:
        """`count` items from an even position on; half of an even number is marked."""
        return Items(self.items[start : start + count], self.marked[start : start + count])

    def shuffle(self, rng: np.random.Generator) -> Items:
        """The same items with uninformative labels: half of the marked and of the unmarked ones are labelled marked.

        A plain shuffle leaves a chance correlation, which a network that detects the mark well would pick up.
        """
        labels = torch.empty_like(self.marked)
        for mark in (0, 1):
            rows = torch.nonzero(self.marked == mark)[:, 0]
            labels[rows[torch.from_numpy(rng.permutation(len(rows)))]] = torch.arange(len(rows)) % 2
        return Items(self.items, labels)


@dataclass(frozen=True)
class Detected:
    """Percent of held-out items classified correctly, by the number of items learned from.

    Args:
        shared: On items as they would be shared.
        raw: On single inputs as they are.
        shuffled: On all items, with shuffled marks.
    """

    sizes: tuple[int, ...]
    shared: tuple[float, ...]
    raw: tuple[float, ...]
    shuffled: float
    num_heldout: int


def make_items(show: Show, inputs: Tensor, count: int, group_size: int, mark: Mark, rng: np.random.Generator) -> Items:
    """Items of random groups of inputs, every second one marked."""
    groups = sample_groups(count, len(inputs), group_size, rng)
    plain, marked = show_groups(show, inputs, groups[::2]), show_groups(show, mark.put(inputs), groups[1::2])
    items = torch.empty(count, *plain.shape[1:], dtype=plain.dtype)
    items[::2], items[1::2] = plain, marked
    return Items(items, torch.arange(count) % 2)


def accuracy(learned: Items, heldout: Items, *, epochs: int, rng: np.random.Generator, device: torch.device) -> float:
    """Percent of held-out items classified correctly by a network that learned on others."""
    with torch.random.fork_rng(devices=[]):
        seed_torch(rng)
        net = nn.Sequential(
            Standardised(learned.items, by_place=False), build_detector(tuple(learned.items.shape[1:]))
        ).to(device)
    steps = epochs * max(LEAST_STEPS, math.ceil(len(learned) / BATCH))
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for rows in batches(sample_groups(steps * BATCH, len(learned), 1, rng)[:, 0], BATCH):
        optimizer.zero_grad(set_to_none=True)
        logits, true = net(learned.items[rows].to(device)), learned.marked[rows].to(device)
        F.cross_entropy(logits, true).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        predicted = torch.cat([net(part.to(device)).argmax(dim=1) for part in batches(heldout.items, 8 * BATCH)])
    return 100.0 * float((predicted.cpu() == heldout.marked).double().mean())


def select_sizes(sizes: Sequence[int], num_auxiliary: int) -> tuple[int, ...]:
    """The sizes for which there are enough auxiliary inputs, when some are held out."""
    room = num_auxiliary - _num_heldout(num_auxiliary)
    return tuple(size for size in sizes if size <= room)


def _num_heldout(num_auxiliary: int) -> int:
    return min(MOST_HELDOUT, num_auxiliary // 4)


def detect(evidence: Evidence, effort: Effort, progress: Progress = lambda _: None) -> Detected:
    """The attack on items as they would be shared, and both controls."""
    aux = evidence.auxiliary[torch.from_numpy(effort.rng("heldout").permutation(len(evidence.auxiliary)))]
    count, sizes, mark = _num_heldout(len(aux)), select_sizes(effort.sizes, len(aux)), Mark.on(aux)

    def both(show: Show, group_size: int) -> tuple[Items, Items]:
        return (
            make_items(show, aux[count:], max(sizes), group_size, mark, effort.rng("items", "learned")),
            make_items(show, aux[:count], count, group_size, mark, effort.rng("items", "heldout")),
        )

    def curve(what: str, learned: Items, heldout: Items) -> tuple[float, ...]:
        found = []
        for size in sizes:
            progress(f"mark in {what}, {size} learned")
            found.append(_average_accuracy(learned, heldout, size, effort))
        return tuple(found)

    learned, heldout = both(evidence.show, evidence.group_size)
    shared = curve(SHARED, learned, heldout)
    progress("shuffled marks")
    rng = effort.rng("shuffled")
    shuffled = accuracy(learned.shuffle(rng), heldout, epochs=effort.epochs, rng=rng, device=effort.device)
    return Detected(sizes, shared, curve(RAW, *both(lambda groups: groups[:, 0], 1)), shuffled, count)


def _average_accuracy(learned: Items, heldout: Items, size: int, effort: Effort) -> float:
    starts = [draw * size for draw in range(REPEATS if size <= REPEATED else 1) if (draw + 1) * size <= len(learned)]
    found = [
        accuracy(
            learned.take(start, size),
            heldout,
            epochs=effort.epochs,
            rng=effort.rng("detector", start),
            device=effort.device,
        )
        for start in starts
    ]
    return math.fsum(found) / len(found)


def find_least(percent: float, sizes: Sequence[int], accuracies: Sequence[float]) -> int | None:
    """The least number of items that reached this percentage; None when none did."""
    return next((size for size, value in zip(sizes, accuracies, strict=True) if value >= percent), None)
