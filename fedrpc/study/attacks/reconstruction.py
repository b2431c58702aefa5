"""The reconstruction attack: a decoder learns on auxiliary items whose inputs are known, then meets shared ones.

Departs from the paper (FLea, Xia et al., KDD 2024), always in favour of the attacker:
- The paper trains its linear decoder on all of CIFAR-10 by SGD at a rate of 1e-3; with a tenth of the data that is far
  from converged, so Adam with a falling rate is used here. The state that does best on a tenth of the auxiliary data is
  kept. Items are standardised, and what is learned is the difference to the best blind guess.
- Beside the linear decoder there is one with ReLUs and shortcuts.
- An item made of several inputs counts as rebuilt when it is close to any one of them, in training and evaluation.
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
PATIENCE, PROGRESS = 3, 0.995  # stops after this many epochs in which the error falls by less than this factor
DONE = 1e-4  # stops at this share of the squared spread: there is nothing left to learn
_SEARCH_STEPS = 10  # of the search for the best guess, where an item has several inputs


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
    """The bounds of the data's values, if it has any, and their range."""

    bounds: tuple[float, float] | None
    data_range: float


@dataclass(frozen=True)
class Reconstructions:
    """How well items were rebuilt, item by item.

    Args:
        rebuilt: In the data's own range.
        nearest: For each item the member that it is compared with.
        mse: The mean squared error to it.
        ssim: The structural similarity to it; None for data that is neither image nor signal.
    """

    rebuilt: Tensor
    nearest: Tensor
    mse: Tensor
    ssim: Tensor | None


class Attacker:
    """A trained decoder with its scaling; turns items into inputs in the data's own range.

    Args:
        decoder: On its device.
        guess: The best blind guess of the input.
        spread: The unit of the decoder's output.
    """

    def __init__(self, decoder: nn.Module, guess: Tensor, spread: float, device: torch.device) -> None:
        self.decoder, self.guess, self.spread, self._device = decoder, guess, spread, device

    def deviations(self, items: Tensor) -> Tensor:
        """The decoder's output for some items: differences to the guess, in units of the spread."""
        out: Tensor = self.decoder(items.to(self._device))
        return out

    def rebuild(self, items: Tensor) -> Tensor:
        """Its reconstruction of the inputs behind some items."""
        with torch.no_grad():
            return self.guess + self.spread * self.deviations(items).cpu()


def find_best_guess(pairs: Pairs) -> Tensor:
    """The one input that is nearest to items' members on average: the mean, where items have one input.

    Where they have several, the nearest member counts: the mean of the nearest is taken again and again.
    """
    guess = pairs.inputs.mean(dim=0)
    for _ in range(_SEARCH_STEPS if pairs.groups.shape[1] > 1 else 0):
        nearest = [
            _find_nearest(guess.expand(len(rows), *guess.shape), pairs.members(rows))[1] for rows in pairs.batches()
        ]
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
    """Trains an attacker on pairs.

    Args:
        make: The decoder for an item's shape and an input's.
        rng: Samples the initial weights, the validation rows, and the order.
    """
    guess = find_best_guess(pairs)
    spread = float((pairs.inputs - guess).square().mean().sqrt()) or 1.0
    with torch.random.fork_rng(devices=[]):
        seed_torch(rng)
        decoder = make(tuple(pairs.items.shape[1:]), tuple(pairs.inputs.shape[1:]))
    # Input and output are differences to the mean at each place, so that a decoder need not know the place.
    decoder = nn.Sequential(Standardised(pairs.items, by_place=True), decoder).to(device)
    attacker = Attacker(decoder, guess, spread, device)
    order = torch.from_numpy(rng.permutation(len(pairs)))
    kept, learned = order[: max(1, len(order) // 10)], order[max(1, len(order) // 10) :]
    optimizer = torch.optim.Adam(decoder.parameters(), lr=RATE)
    steps = max(1, epochs * math.ceil(len(learned) / BATCH))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best, state = _compute_error(attacker, pairs, kept), copy.deepcopy(decoder.state_dict())
    idle = 0
    for _ in range(epochs):
        for rows in batches(learned[torch.from_numpy(rng.permutation(len(learned)))], BATCH):
            optimizer.zero_grad(set_to_none=True)
            _compute_losses(attacker, pairs, rows).mean().backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        error = _compute_error(attacker, pairs, kept)
        idle = 0 if error < PROGRESS * best else idle + 1
        if error < best:
            best, state = error, copy.deepcopy(decoder.state_dict())
        if idle == PATIENCE or best < DONE:
            break
    decoder.load_state_dict(state)
    return attacker


def evaluate_attacker(attacker: Attacker, pairs: Pairs, scale: Scale) -> Reconstructions:
    """Rebuilds items and compares each with the nearest of its inputs."""
    rebuilt = torch.cat([attacker.rebuild(pairs.items[rows]) for rows in pairs.batches()])
    return evaluate_inputs(rebuilt, pairs, scale)


def evaluate_inputs(rebuilt: Tensor, pairs: Pairs, scale: Scale) -> Reconstructions:
    """Clips rebuilt inputs to the data's bounds and compares each with the nearest of its item's inputs."""
    rebuilt = rebuilt.clamp(*scale.bounds) if scale.bounds else rebuilt
    found = [_find_nearest(rebuilt[rows], pairs.members(rows)) for rows in pairs.batches()]
    errors, nearest = torch.cat([error for error, _ in found]), torch.cat([member for _, member in found])
    alike = ssim(rebuilt, nearest, scale.data_range) if rebuilt.dim() in (3, 4) else None
    return Reconstructions(rebuilt, nearest, errors, alike)


def _find_nearest(rebuilt: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """For each item the squared error to its nearest member, and that member."""
    errors = (rebuilt.unsqueeze(1) - members).square().flatten(2).mean(dim=2)
    error, which = errors.min(dim=1)
    return error, members[torch.arange(len(members)), which]


def _compute_losses(attacker: Attacker, pairs: Pairs, rows: Tensor) -> Tensor:
    output = attacker.deviations(pairs.items[rows])
    wanted = ((pairs.members(rows) - attacker.guess) / attacker.spread).to(output.device)
    return _find_nearest(output, wanted)[0]


def _compute_error(attacker: Attacker, pairs: Pairs, rows: Tensor) -> float:
    with torch.no_grad():
        return float(torch.cat([_compute_losses(attacker, pairs, part) for part in batches(rows, BATCH)]).mean())
