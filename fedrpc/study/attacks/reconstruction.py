"""The reconstruction attack: a decoder learns on auxiliary items whose inputs are known, then meets shared ones.

Departs from the paper (FLea, Xia et al., KDD 2024), always in favour of the attacker:
- The paper trains its linear decoder on all of CIFAR-10 by SGD at a rate of 1e-3; with a tenth of the data that is far
  from converged, so Adam with a falling rate is used here. The state that does best on a tenth of the auxiliary data is
  kept. Items are standardised, and what is learned is the difference to the best guess without looking.
- Beside the linear decoder there is one with ReLUs and shortcuts.
- An item made of several inputs counts as rebuilt when it is close to any one of them, in learning and in judging.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedrpc.metrics.similarity import ssim
from fedrpc.seeds import seed_torch
from fedrpc.study.attacks.decoders import Shape, Standardised
from fedrpc.study.attacks.evidence import batches

BATCH, RATE = 16, 5e-3
PATIENCE, PROGRESS = 3, 0.995  # it gives up after so many epochs in which the error falls by less than this factor
DONE = 1e-4  # of the spread squared; there is nothing left to learn
_LOOKS = 10  # of the search for the best guess; one is enough where an item has one input


@dataclass(frozen=True)
class Pairs:
    """Items, and the inputs behind each.

    Args:
        items: One a row.
        inputs: In the data's own range, one a row.
        groups: For each item the rows of its inputs, (n, group_size).
    """

    items: Tensor
    inputs: Tensor
    groups: Tensor

    def __len__(self) -> int:
        return len(self.items)

    def members(self, rows: Tensor) -> Tensor:
        """The inputs behind some items, (n, group_size, *shape)."""
        return self.inputs[self.groups[rows]]

    def batches(self, size: int = BATCH) -> Iterator[Tensor]:
        """All rows in order."""
        return batches(torch.arange(len(self)), size)


@dataclass(frozen=True)
class Scale:
    """What is known of the data's values: (least, largest) where there is such a thing, and how far they reach."""

    bounds: tuple[float, float] | None
    data_range: float


@dataclass(frozen=True)
class Judged:
    """How well items were rebuilt, item by item.

    Args:
        rebuilt: In the data's own range.
        nearest: For each item the member that it is held against.
        mse: The mean squared error to it.
        ssim: The structural similarity to it; None for data that is neither image nor signal.
    """

    rebuilt: Tensor
    nearest: Tensor
    mse: Tensor
    ssim: Tensor | None


class Attacker:
    """A decoder with all that is around it; turns items into inputs in the data's own range.

    Args:
        decoder: On its device.
        guess: What it takes for the input without looking.
        spread: The unit of what it says.
    """

    def __init__(self, decoder: nn.Module, guess: Tensor, spread: float, device: torch.device) -> None:
        self.decoder, self.guess, self.spread, self._device = decoder, guess, spread, device

    def deviations(self, items: Tensor) -> Tensor:
        """What the decoder says of some items: differences to the guess, in units of the spread."""
        out: Tensor = self.decoder(items.to(self._device))
        return out

    def rebuild(self, items: Tensor) -> Tensor:
        """The inputs that it takes to be behind some items."""
        with torch.no_grad():
            return self.guess + self.spread * self.deviations(items).cpu()


def best_guess(pairs: Pairs) -> Tensor:
    """The one input that is nearest to items' members on average: the mean, where an item has one input.

    Where it has several, whichever member is nearest counts, so the mean of those is nearer, and so on.
    """
    guess = pairs.inputs.mean(dim=0)
    for _ in range(_LOOKS if pairs.groups.shape[1] > 1 else 0):
        nearest = [_nearest(guess.expand(len(rows), *guess.shape), pairs.members(rows))[1] for rows in pairs.batches()]
        guess = torch.cat(nearest).mean(dim=0)
    return guess


def train(
    make: Callable[[Shape, Shape], nn.Module],
    pairs: Pairs,
    *,
    epochs: int,
    rng: np.random.Generator,
    device: torch.device,
) -> Attacker:
    """An attacker who learned on pairs.

    Args:
        make: The decoder for an item's shape and an input's.
        rng: Draws its first weights, what it is kept by, and the order.
    """
    guess = best_guess(pairs)
    spread = float((pairs.inputs - guess).square().mean().sqrt()) or 1.0
    with torch.random.fork_rng(devices=[]):
        seed_torch(rng)
        decoder = make(tuple(pairs.items.shape[1:]), tuple(pairs.inputs.shape[1:]))
    # Both ends are differences to a mean of each place, so that a decoder need not know where it is.
    decoder = nn.Sequential(Standardised(pairs.items, by_place=True), decoder).to(device)
    attacker = Attacker(decoder, guess, spread, device)
    order = torch.from_numpy(rng.permutation(len(pairs)))
    kept, learned = order[: max(1, len(order) // 10)], order[max(1, len(order) // 10) :]
    optimizer = torch.optim.Adam(decoder.parameters(), lr=RATE)
    steps = max(1, epochs * math.ceil(len(learned) / BATCH))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best, state = _error(attacker, pairs, kept), copy.deepcopy(decoder.state_dict())
    idle = 0
    for _ in range(epochs):
        for rows in batches(learned[torch.from_numpy(rng.permutation(len(learned)))], BATCH):
            optimizer.zero_grad(set_to_none=True)
            _losses(attacker, pairs, rows).mean().backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        error = _error(attacker, pairs, kept)
        idle = 0 if error < PROGRESS * best else idle + 1
        if error < best:
            best, state = error, copy.deepcopy(decoder.state_dict())
        if idle == PATIENCE or best < DONE:
            break
    decoder.load_state_dict(state)
    return attacker


def judge(attacker: Attacker, pairs: Pairs, scale: Scale) -> Judged:
    """What the attacker makes of items, held against the nearest of each one's inputs."""
    rebuilt = torch.cat([attacker.rebuild(pairs.items[rows]) for rows in pairs.batches()])
    return judge_inputs(rebuilt, pairs, scale)


def judge_inputs(rebuilt: Tensor, pairs: Pairs, scale: Scale) -> Judged:
    """Rebuilt inputs, clipped to what values there can be, held against the nearest of each item's inputs."""
    rebuilt = rebuilt.clamp(*scale.bounds) if scale.bounds else rebuilt
    found = [_nearest(rebuilt[rows], pairs.members(rows)) for rows in pairs.batches()]
    errors, nearest = torch.cat([error for error, _ in found]), torch.cat([member for _, member in found])
    alike = ssim(rebuilt, nearest, scale.data_range) if rebuilt.dim() in (3, 4) else None
    return Judged(rebuilt, nearest, errors, alike)


def _nearest(rebuilt: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """For each item the squared error to its nearest member, and that member."""
    errors = (rebuilt.unsqueeze(1) - members).square().flatten(2).mean(dim=2)
    error, which = errors.min(dim=1)
    return error, members[torch.arange(len(members)), which]


def _losses(attacker: Attacker, pairs: Pairs, rows: Tensor) -> Tensor:
    said = attacker.deviations(pairs.items[rows])
    wanted = ((pairs.members(rows) - attacker.guess) / attacker.spread).to(said.device)
    return _nearest(said, wanted)[0]


def _error(attacker: Attacker, pairs: Pairs, rows: Tensor) -> float:
    with torch.no_grad():
        return float(torch.cat([_losses(attacker, pairs, part) for part in batches(rows, BATCH)]).mean())
