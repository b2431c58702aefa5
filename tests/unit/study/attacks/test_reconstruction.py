"""Decoders, trained and evaluated: raw inputs are rebuilt, noise reveals nothing, and means hide their members."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedrpc.seeds import derive
from fedrpc.study.attacks.decoders import build_linear_decoder, build_residual_decoder
from fedrpc.study.attacks.evidence import NOISE, RAW, SHARED, UNTRAINED
from fedrpc.study.attacks.rebuilding import NUM_STEPS, SAME, find_visible_channels, rebuild
from fedrpc.study.attacks.reconstruction import (
    Attacker,
    Pairs,
    Scale,
    evaluate_attacker,
    evaluate_inputs,
    find_best_guess,
    train,
)
from tests.unit.study.attacks.toys import EFFORT, blind, evidence, images, means, signals, single

CPU = torch.device("cpu")
UNIT = Scale((0.0, 1.0), 1.0)


def pairs(items: Tensor, inputs: Tensor, group_size: int = 1) -> Pairs:
    return Pairs(items, inputs, torch.arange(len(items) * group_size).view(len(items), group_size))


def attacker(make, known: Pairs, epochs: int = 6) -> Attacker:
    return train(make, known, epochs=epochs, rng=derive(0, "test"), device=CPU)


def variance(inputs: Tensor) -> float:
    return float((inputs - inputs.mean(dim=0)).square().mean())


@pytest.mark.parametrize("make", [build_linear_decoder, build_residual_decoder])
def test_raw_inputs_are_rebuilt(make) -> None:
    known, hidden = images(160), images(40, seed=1)
    evaluated = evaluate_attacker(attacker(make, pairs(known, known)), pairs(hidden, hidden), UNIT)
    assert float(evaluated.mse.mean()) < 0.02 * variance(known)
    assert evaluated.ssim is not None
    assert float(evaluated.ssim.mean()) > 0.95


@pytest.mark.parametrize("make", [build_linear_decoder, build_residual_decoder])
@pytest.mark.parametrize("item", [(4, 8, 8), (20,)])
def test_noise_leaves_the_whole_variance(make, item: tuple[int, ...]) -> None:
    known, hidden = images(200), images(200, seed=1)
    noise = torch.randn(400, *item, generator=torch.Generator().manual_seed(0))
    evaluated = evaluate_attacker(attacker(make, pairs(noise[:200], known)), pairs(noise[200:], hidden), UNIT)
    assert float(evaluated.mse.mean()) == pytest.approx(variance(hidden), rel=0.05)


def test_the_residual_decoder_inverts_what_no_linear_one_can() -> None:
    # The middle grey is folded to black: a linear map cannot tell dark from light.
    known, hidden = images(200), images(40, seed=1)
    folded = [torch.cat([(x - 0.2).abs(), (x - 0.1).abs()], dim=1) for x in (known, hidden)]
    linear, other = (
        evaluate_attacker(attacker(make, pairs(folded[0], known), epochs=12), pairs(folded[1], hidden), UNIT)
        for make in (build_linear_decoder, build_residual_decoder)
    )
    assert float(other.mse.mean()) < 0.5 * float(linear.mse.mean())


def test_the_same_stream_gives_the_same_attacker() -> None:
    known = images(60)
    one, two = (attacker(build_residual_decoder, pairs(known, known), epochs=2).rebuild(known[:5]) for _ in range(2))
    assert torch.equal(one, two)


def test_half_precision_items_are_taken_as_they_travel() -> None:
    known, hidden = images(200), images(20, seed=1)
    evaluated = evaluate_attacker(
        attacker(build_linear_decoder, pairs(known.half(), known)), pairs(hidden.half(), hidden), UNIT
    )
    assert float(evaluated.mse.mean()) < 0.02 * variance(known)


def test_an_item_of_several_inputs_is_compared_with_the_nearest() -> None:
    inputs = torch.tensor([0.0, 1.0, 0.4, 0.5]).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    rebuilt = torch.tensor([0.9, 0.1]).view(2, 1, 1, 1).expand(2, 1, 2, 2)
    evaluated = evaluate_inputs(rebuilt, pairs(torch.zeros(2, 1), inputs, group_size=2), UNIT)
    assert evaluated.mse.tolist() == pytest.approx([0.01, 0.09])
    assert evaluated.nearest[:, 0, 0, 0].tolist() == pytest.approx([1.0, 0.4])


def test_rebuilt_inputs_are_clipped_to_the_bounds() -> None:
    evaluated = evaluate_inputs(torch.full((1, 1, 4), 7.0), pairs(torch.zeros(1, 1), torch.ones(1, 1, 4)), UNIT)
    assert evaluated.mse.tolist() == [0.0]


def test_the_best_guess_is_the_mean_or_nearer_to_a_member() -> None:
    inputs = images(60)
    assert torch.equal(find_best_guess(pairs(inputs, inputs)), inputs.mean(dim=0))
    grouped = pairs(torch.zeros(12, 1), inputs, group_size=5)
    guesses = [find_best_guess(grouped), inputs.mean(dim=0)]
    better, mean = (evaluate_inputs(x.expand(12, *x.shape), grouped, UNIT).mse.mean() for x in guesses)
    assert better <= mean


# The whole attack with its controls


def test_raw_data_is_rebuilt_and_every_control_is_run() -> None:
    steps: list[str] = []
    found = rebuild(evidence(single, untrained=blind), EFFORT, steps.append)
    assert [(row.what, row.decoder) for row in found.rows] == [
        (what, decoder) for what in (SHARED, RAW, NOISE, UNTRAINED) for decoder in ("linear", "non-linear")
    ]
    assert len(steps) == NUM_STEPS
    assert found.best(SHARED).unexplained < 0.02
    assert found.best(RAW).unexplained < 0.02
    assert found.best(NOISE).unexplained == pytest.approx(1, abs=0.05)
    assert found.best(UNTRAINED).unexplained == pytest.approx(1, abs=0.05)
    assert found.guess.unexplained == 1
    assert found.num_evaluated == 16
    assert set(found.shown) == {"original", "linear", "non-linear"}
    assert torch.equal(found.shown["original"], evidence().originals[:9])


def test_items_without_information_reveal_nothing() -> None:
    found = rebuild(evidence(blind), EFFORT)
    assert found.best(SHARED).unexplained == pytest.approx(1, abs=0.05)
    assert found.best(RAW).unexplained < 0.02
    assert found.channels == (0,)  # nothing reaches an item: all channels are judged


def test_means_hide_their_members_in_part() -> None:
    steps: list[str] = []
    found = rebuild(evidence(means, group_size=4, num_items=12), EFFORT, steps.append)
    assert found.best(RAW).unexplained < 0.02 < found.best(SHARED).unexplained < 0.95
    assert found.best(NOISE).unexplained == pytest.approx(1, abs=0.1)
    assert found.best(UNTRAINED).note == SAME
    assert found.best(UNTRAINED).mse == found.best(SHARED).mse
    assert len(steps) == NUM_STEPS


def test_only_channels_that_reach_the_items_are_evaluated() -> None:
    waves = signals(200)
    found = rebuild(evidence(lambda groups: groups[:, 0, 1:2], inputs=waves, bounds=None), EFFORT)
    assert found.channels == (1,)
    assert found.shown["original"].shape == (9, 1, 32)
    assert found.best(SHARED).unexplained < 0.05
    assert found.data_range == pytest.approx(2.0, abs=0.05)
    assert find_visible_channels(means, images(8, channels=3), 4) == (0, 1, 2)
