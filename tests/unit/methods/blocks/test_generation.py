from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedrpc.methods.blocks.generation import append_label, diversity_loss, train_generator
from fedrpc.models.state import load


def test_diversity_is_one_for_equal_outputs_and_falls_as_they_spread() -> None:
    noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    outputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    values = [diversity_loss(noise, scale * outputs).item() for scale in (0.0, 0.5, 1.0, 2.0)]
    assert values[0] == 1
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.5


def test_diversity_by_hand() -> None:
    noise, outputs = torch.tensor([[0.0], [2.0]]), torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]])
    # Two of four pairs differ: squared distance 4 of the noise, mean absolute difference 1/2 of the outputs.
    assert diversity_loss(noise, outputs).item() == pytest.approx(math.exp(-(4 * 0.5) / 2), rel=1e-6)


def test_diversity_has_a_finite_gradient() -> None:
    outputs = torch.zeros(3, 2, requires_grad=True)
    diversity_loss(torch.randn(3, 2), outputs).backward()
    assert torch.isfinite(outputs.grad).all()


def test_conditioned_has_the_label_beside_the_noise() -> None:
    got = append_label(torch.full((2, 1), 7.0), torch.tensor([2, 0]), 3)
    assert torch.equal(got, torch.tensor([[7.0, 0, 0, 1], [7.0, 1, 0, 0]]))


def test_training_in_two_parts_is_training_in_one() -> None:
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(2))

    def train(parts: list[int]) -> dict[str, Tensor]:
        generator = nn.Linear(3, 2)
        nn.init.constant_(generator.weight, 0.1)
        nn.init.zeros_(generator.bias)
        moments: dict[str, Tensor] = {}
        weights = dict(generator.state_dict())
        for steps in parts:
            load(generator, weights)
            weights, moments, _ = train_generator(
                generator, moments, lambda: (generator(x) - 1).square().mean(), lr=0.01, steps=steps
            )
        return weights

    whole, halves = train([6]), train([3, 3])
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    assert not torch.equal(whole["weight"], torch.full((2, 3), 0.1))


def test_no_steps_change_nothing() -> None:
    generator = nn.Linear(2, 2)
    weights, moments, loss = train_generator(generator, {}, lambda: torch.zeros(()), lr=0.1, steps=0)
    assert torch.equal(weights["weight"], generator.weight)
    assert moments == {}
    assert loss == 0
