"""Mechanisms: what they add, what they promise, and what they never promise."""

from __future__ import annotations

import pytest
import torch

from fedrpc.privacy.mechanisms import Coverage, Gaussian, no_guarantee, public


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_noise_has_the_promised_size_and_no_direction() -> None:
    value = torch.full((400, 50), 3.0)
    noisy = Gaussian(2.0, 0.5, covers="").apply(value, stream())
    difference = noisy - value
    assert abs(float(difference.mean())) < 4 * 2.0 / value.numel() ** 0.5
    assert float(difference.std()) == pytest.approx(2.0, rel=0.02)
    covariance = torch.cov(difference.T)
    assert torch.allclose(covariance, 4.0 * torch.eye(50), atol=4 * 4.0 * (2 / 400) ** 0.5)
    assert noisy.dtype == value.dtype
    assert torch.equal(noisy, Gaussian(2.0, 0.5, covers="").apply(value, stream()))
    assert not torch.equal(noisy, Gaussian(2.0, 0.5, covers="").apply(value, stream(1)))


def test_the_promise_is_noise_over_sensitivity_for_each_draw() -> None:
    found = Gaussian(2.0, 0.5, draws=7, covers="given the received model", parameters={"m": 100}).guarantee
    assert found.history == ((4.0, 1.0, 7),)
    assert found.adjacency == "replace-one"
    assert found.covers == "record-level, given the received model"
    assert found.parameters == {"std": 2.0, "sensitivity": 0.5, "draws": 7, "m": 100}


def test_without_noise_there_is_no_guarantee() -> None:
    mechanism = Gaussian(0.0, 0.5, covers="anything")
    assert mechanism.guarantee.coverage is Coverage.NONE
    assert mechanism.guarantee.history == ()
    value = torch.randn(3)
    assert torch.equal(mechanism.apply(value, stream()), value)


@pytest.mark.parametrize(("std", "sensitivity", "draws"), [(-1, 1, 1), (1, 0, 1), (1, 1, 0), (float("nan"), 1, 1)])
def test_invalid_noise_sensitivity_or_draws_are_refused(std: float, sensitivity: float, draws: int) -> None:
    with pytest.raises(ValueError, match="expected noise"):
        Gaussian(std, sensitivity, draws=draws, covers="")


def test_a_mechanism_covers_one_release() -> None:
    mechanism = Gaussian(1.0, 1.0, covers="")
    mechanism.apply(torch.zeros(2), stream())
    with pytest.raises(ValueError, match="covers one release"):
        mechanism.apply(torch.zeros(2), stream())


def test_only_tensors_take_noise() -> None:
    with pytest.raises(TypeError, match="takes a tensor, got float"):
        Gaussian(1.0, 1.0, covers="").apply(1.0, stream())


def test_declarations_change_nothing() -> None:
    value = {"w": torch.ones(2)}
    for declared, word in ((no_guarantee("a filter"), "no guarantee: a filter"), (public("n"), "public: n")):
        assert declared.apply(value, stream()) is value
        assert declared.guarantee.covers == word
        assert declared.guarantee.history == ()
