"""The reconstruction attack on a run: both decoders on what was shared and on each control.

Controls: raw inputs as items must be rebuilt, noise must reveal nothing, and the same network before any training
shows how much its architecture alone reveals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedrpc.study.attacks import reconstruction
from fedrpc.study.attacks.decoders import build_linear_decoder, build_residual_decoder
from fedrpc.study.attacks.evidence import (
    NOISE,
    RAW,
    SHARED,
    UNTRAINED,
    Effort,
    Evidence,
    Progress,
    Show,
    sample_groups,
    show_groups,
)
from fedrpc.study.attacks.reconstruction import Pairs, Reconstructions, Scale

DECODERS = {"linear": build_linear_decoder, "non-linear": build_residual_decoder}
NUM_STEPS = 4 * len(DECODERS)  # that progress is called for
SHOWN = 9  # items in the picture
SAME = "as shared: no network in it"
_PROBED = 32  # inputs that visible channels are detected with

Case = tuple[Pairs, Pairs]  # what the attacker trains on, and what it attacks


@dataclass(frozen=True)
class Row:
    """What one decoder made of one kind of items: means over what was evaluated.

    Args:
        unexplained: The error as a share of that of the best blind guess.
        ssim: None for data that is neither image nor signal.
    """

    what: str
    decoder: str
    mse: float
    unexplained: float
    ssim: float | None
    note: str = ""


@dataclass(frozen=True)
class Rebuilt:
    """The results of the reconstruction attack.

    Args:
        guess: The error of the best blind guess.
        channels: Those of the inputs that reach the items; only they are evaluated.
        shown: Some originals and each decoder's reconstructions of them, in the data's own range.
        shown_mse: The error of each of these, by decoder.
    """

    rows: tuple[Row, ...]
    guess: Row
    channels: tuple[int, ...]
    num_evaluated: int
    data_range: float
    shown: Mapping[str, Tensor]
    shown_mse: Mapping[str, list[float]]

    def best(self, what: str) -> Row:
        """The row of the better decoder."""
        return min((row for row in self.rows if row.what == what), key=lambda row: row.mse)


def rebuild(evidence: Evidence, effort: Effort, progress: Progress = lambda _: None) -> Rebuilt:
    """Trains and evaluates all decoders on all cases."""
    aux, size = evidence.auxiliary, evidence.group_size
    channels = find_visible_channels(evidence.show, aux[:_PROBED], size)

    def own(inputs: Tensor) -> Tensor:
        values = evidence.own_values(inputs)
        return values[:, list(channels)] if inputs.dim() > 2 else values

    known, hidden = own(aux), own(evidence.originals)
    groups = sample_groups(len(aux), len(aux), size, effort.rng("groups"))
    seen = Pairs(show_groups(evidence.show, aux, groups), known, groups)
    met = Pairs(evidence.items, hidden, evidence.groups)
    cases: dict[str, Callable[[], Case]] = {  # built one at a time, since each can be large
        SHARED: lambda: (seen, met),
        RAW: lambda: (Pairs(aux, known, _group_alone(aux)), Pairs(evidence.originals, hidden, _group_alone(hidden))),
        NOISE: lambda: (
            _make_noise(seen, effort.rng("noise", "seen")),
            _make_noise(met, effort.rng("noise", "met")),
        ),
        UNTRAINED: lambda: (
            replace(seen, items=show_groups(evidence.untrained, aux, groups)),
            replace(met, items=show_groups(evidence.untrained, evidence.originals, evidence.groups)),
        ),
    }
    low, high = evidence.bounds or (float(known.min()), float(known.max()))
    scale = Scale(evidence.bounds, high - low if high > low else 1.0)
    return _attack_cases(cases, scale, channels, effort, progress)


def find_visible_channels(show: Show, inputs: Tensor, group_size: int) -> tuple[int, ...]:
    """The channels that reach the items: exchanging their values changes an item. All channels, where none does."""
    if inputs.dim() < 3:
        return (0,)

    def items(x: Tensor) -> Tensor:
        return show(x.unsqueeze(1).expand(-1, group_size, *x.shape[1:]))

    plain = items(inputs)

    def reaches(channel: int) -> bool:
        other = inputs.clone()
        other[:, channel] = inputs[:, channel].roll(1, dims=0)
        return not torch.equal(items(other), plain)

    every = tuple(range(inputs.shape[1]))
    return tuple(filter(reaches, every)) or every


def _attack_cases(
    cases: Mapping[str, Callable[[], Case]], scale: Scale, channels: tuple[int, ...], effort: Effort, progress: Progress
) -> Rebuilt:
    rows: list[Row] = []
    kept: dict[str, Reconstructions] = {}
    seen, met = cases[SHARED]()
    for what, make in cases.items():
        learned, hidden = make()
        if what == UNTRAINED and torch.equal(learned.items, seen.items):
            rows += [_repeat_row(row, progress) for row in rows if row.what == SHARED]
            continue
        reference = _evaluate_guess(learned, hidden, scale).mse
        for name, decoder in DECODERS.items():
            progress(f"{name} decoder, {what}")
            rng = effort.rng("decoder", name)
            attacker = reconstruction.train(decoder, learned, epochs=effort.epochs, rng=rng, device=effort.device)
            evaluated = reconstruction.evaluate_attacker(attacker, hidden, scale)
            rows.append(_make_row(what, name, evaluated, reference))
            if what == SHARED:
                kept[name] = evaluated
    # For an item with several inputs, the one nearest to the better decoder's reconstruction is shown.
    better = min(kept.values(), key=lambda each: float(each.mse.mean()))
    pictures = {"original": better.nearest[:SHOWN]} | {
        name: evaluated.rebuilt[:SHOWN] for name, evaluated in kept.items()
    }
    errors = {name: evaluated.mse[:SHOWN].tolist() for name, evaluated in kept.items()}
    guess = _evaluate_guess(seen, met, scale)
    return Rebuilt(tuple(rows), guess, channels, len(met), scale.data_range, pictures, errors)


def _repeat_row(row: Row, progress: Progress) -> Row:
    progress(f"{row.decoder} decoder, {UNTRAINED}")
    return replace(row, what=UNTRAINED, note=SAME)


def _evaluate_guess(learned: Pairs, hidden: Pairs, scale: Scale) -> Row:
    guess = reconstruction.find_best_guess(learned)
    evaluated = reconstruction.evaluate_inputs(guess.expand(len(hidden), *guess.shape), hidden, scale)
    return _make_row("blind guess", "none", evaluated, float(evaluated.mse.mean()))


def _make_row(what: str, decoder: str, evaluated: Reconstructions, reference: float) -> Row:
    mse = float(evaluated.mse.mean())
    alike = None if evaluated.ssim is None else float(evaluated.ssim.mean())
    return Row(what, decoder, mse, mse / reference if reference else math.nan, alike)


def _group_alone(inputs: Tensor) -> Tensor:
    return torch.arange(len(inputs)).unsqueeze(1)


def _make_noise(pairs: Pairs, rng: np.random.Generator) -> Pairs:
    noise = rng.standard_normal(tuple(pairs.items.shape), dtype=np.float32)
    return replace(pairs, items=torch.from_numpy(noise))
