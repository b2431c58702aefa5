"""The reconstruction attack on a run: both decoders on what was shared and on each control.

Controls: raw inputs as items must come back, noise must give nothing away, and the same network before any training
says what its architecture alone gives away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedrpc.study.attacks import reconstruction
from fedrpc.study.attacks.decoders import linear_decoder, residual_decoder
from fedrpc.study.attacks.evidence import (
    NOISE,
    RAW,
    SHARED,
    UNTRAINED,
    Effort,
    Evidence,
    Show,
    Tell,
    drawn_groups,
    shown,
)
from fedrpc.study.attacks.reconstruction import Judged, Pairs, Scale

DECODERS = {"linear": linear_decoder, "non-linear": residual_decoder}
NUM_STEPS = 4 * len(DECODERS)  # that are told of
SHOWN = 9  # items in the picture
SAME = "as shared: no network in it"
_PROBED = 32  # inputs behind the question which channels are visible

Case = tuple[Pairs, Pairs]  # what the attacker learns on, and what it meets


@dataclass(frozen=True)
class Row:
    """What one decoder made of one kind of items: means over what was judged.

    Args:
        unexplained: The error as a share of that of the best guess without looking.
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
    """What came of it.

    Args:
        guess: What comes of guessing without looking at the item.
        channels: Those of the inputs that reach the items; only they are judged.
        shown: Some originals and what each decoder made of their items, in the data's own range.
        shown_mse: The error of each of these, by decoder.
    """

    rows: tuple[Row, ...]
    guess: Row
    channels: tuple[int, ...]
    num_judged: int
    data_range: float
    shown: Mapping[str, Tensor]
    shown_mse: Mapping[str, list[float]]

    def best(self, what: str) -> Row:
        """The row of the better decoder."""
        return min((row for row in self.rows if row.what == what), key=lambda row: row.mse)


def rebuild(evidence: Evidence, effort: Effort, tell: Tell = lambda _: None) -> Rebuilt:
    """Trains and judges them all."""
    aux, size = evidence.auxiliary, evidence.group_size
    channels = visible_channels(evidence.show, aux[:_PROBED], size)

    def own(inputs: Tensor) -> Tensor:
        values = evidence.own_values(inputs)
        return values[:, list(channels)] if inputs.dim() > 2 else values

    known, hidden = own(aux), own(evidence.originals)
    groups = drawn_groups(len(aux), len(aux), size, effort.rng("groups"))
    seen = Pairs(shown(evidence.show, aux, groups), known, groups)
    met = Pairs(evidence.items, hidden, evidence.groups)
    cases: dict[str, Callable[[], Case]] = {  # made one after the other, for each can be large
        SHARED: lambda: (seen, met),
        RAW: lambda: (Pairs(aux, known, _alone(aux)), Pairs(evidence.originals, hidden, _alone(hidden))),
        NOISE: lambda: (_noisy(seen, effort.rng("noise", "seen")), _noisy(met, effort.rng("noise", "met"))),
        UNTRAINED: lambda: (
            replace(seen, items=shown(evidence.untrained, aux, groups)),
            replace(met, items=shown(evidence.untrained, evidence.originals, evidence.groups)),
        ),
    }
    low, high = evidence.bounds or (float(known.min()), float(known.max()))
    scale = Scale(evidence.bounds, high - low if high > low else 1.0)
    return _attacked(cases, scale, channels, effort, tell)


def visible_channels(show: Show, inputs: Tensor, group_size: int) -> tuple[int, ...]:
    """The channels that reach the items: values of another input in them change something. All, where none does."""
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


def _attacked(
    cases: Mapping[str, Callable[[], Case]], scale: Scale, channels: tuple[int, ...], effort: Effort, tell: Tell
) -> Rebuilt:
    rows: list[Row] = []
    kept: dict[str, Judged] = {}
    seen, met = cases[SHARED]()
    for what, make in cases.items():
        learned, hidden = make()
        if what == UNTRAINED and torch.equal(learned.items, seen.items):
            rows += [_told_again(row, tell) for row in rows if row.what == SHARED]
            continue
        reference = _guess(learned, hidden, scale).mse
        for name, decoder in DECODERS.items():
            tell(f"{name} decoder, {what}")
            rng = effort.rng("decoder", name)
            attacker = reconstruction.train(decoder, learned, epochs=effort.epochs, rng=rng, device=effort.device)
            judged = reconstruction.judge(attacker, hidden, scale)
            rows.append(_row(what, name, judged, reference))
            if what == SHARED:
                kept[name] = judged
    # Of an item with several inputs, the one that the better decoder came nearest to is shown.
    better = min(kept.values(), key=lambda judged: float(judged.mse.mean()))
    pictures = {"original": better.nearest[:SHOWN]} | {name: judged.rebuilt[:SHOWN] for name, judged in kept.items()}
    errors = {name: judged.mse[:SHOWN].tolist() for name, judged in kept.items()}
    guess = _guess(seen, met, scale)
    return Rebuilt(tuple(rows), guess, channels, len(met), scale.data_range, pictures, errors)


def _told_again(row: Row, tell: Tell) -> Row:
    tell(f"{row.decoder} decoder, {UNTRAINED}")
    return replace(row, what=UNTRAINED, note=SAME)


def _guess(learned: Pairs, hidden: Pairs, scale: Scale) -> Row:
    guess = reconstruction.best_guess(learned)
    judged = reconstruction.judge_inputs(guess.expand(len(hidden), *guess.shape), hidden, scale)
    return _row("blind guess", "none", judged, float(judged.mse.mean()))


def _row(what: str, decoder: str, judged: Judged, reference: float) -> Row:
    mse = float(judged.mse.mean())
    alike = None if judged.ssim is None else float(judged.ssim.mean())
    return Row(what, decoder, mse, mse / reference if reference else math.nan, alike)


def _alone(inputs: Tensor) -> Tensor:
    return torch.arange(len(inputs)).unsqueeze(1)


def _noisy(pairs: Pairs, rng: np.random.Generator) -> Pairs:
    noise = rng.standard_normal(tuple(pairs.items.shape), dtype=np.float32)
    return replace(pairs, items=torch.from_numpy(noise))
