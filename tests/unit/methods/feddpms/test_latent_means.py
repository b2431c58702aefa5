"""Which classes, whose means, how noisy, and which of them are usable."""

from __future__ import annotations

import pytest
import torch

from fedrpc.methods.feddpms.latent_means import (
    NONE,
    NoisyMeans,
    build_empty_rows,
    match_client,
    rank_abundant_classes,
    rank_scarce_classes,
    sample_passing_copies,
)


def make_noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pass_all(z: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(z), dtype=torch.bool)


def pass_none(z: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(z), dtype=torch.bool)


# ScarceClasses


def test_abundant_classes_come_first_with_ties_by_id():
    assert rank_abundant_classes([5, 9, 9, 0, 1], 3) == [1, 2, 0]


def test_a_class_with_too_few_examples_leaves_its_place_empty():
    assert rank_abundant_classes([5, 0, 0], 3) == [0, NONE, NONE]
    assert rank_abundant_classes([100, 99, 250], 3, least=100) == [2, 0, NONE]
    assert rank_abundant_classes([3, 2], 2, least=4) == [NONE, NONE]


def test_scarce_classes_are_those_with_fewest_with_ties_by_id():
    assert rank_scarce_classes([5, 0, 9, 0, 1], 3) == [1, 3, 4]
    assert rank_scarce_classes([0] * 10, 3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("wanted", "offered", "client", "partner"),
    [
        ([0, 1, 2], {4: [2, 3, 4], 5: [0, 1, 9]}, 0, 5),
        ([0, 1, 2], {5: [0, 1, 9], 4: [1, 2, 3]}, 0, 4),
        ([0, 1, 2], {5: [7, 8, 9]}, 0, None),
        ([0, 1, 2], {0: [0, 1, 2], 1: [2]}, 0, 1),
        ([0, 1, 2], {0: [0, 1, 2]}, 0, None),
        ([0], {}, 0, None),
        ([0, NONE, NONE], {1: [5, NONE, NONE]}, 0, None),
    ],
    ids=["more", "tie", "pass_none-in-common", "not-oneself", "only-oneself", "nobody", "empty-places"],
)
def test_matching(wanted, offered, client, partner):
    assert match_client(wanted, offered, client) == partner


# Noise


def test_without_noise_every_copy_is_the_mean():
    mean = torch.rand(6, generator=make_noise(1))
    copies, seen = sample_passing_copies(mean, 0.0, make_noise(), pass_all, quota=5, tries=1)
    assert torch.equal(copies, mean.expand(5, 6))
    assert seen == 5


def test_noise_has_mean_zero_and_covariance_s_squared():
    mean, std, count = torch.tensor([0.2, 0.9, 0.5]), 3.0, 40_000
    moved = sample_passing_copies(mean, std, make_noise(), pass_all, quota=count, tries=1)[0] - mean
    # Five standard errors of a mean, and of a variance or covariance.
    assert moved.mean(dim=0).abs().max() < 5 * std / count**0.5
    assert (torch.cov(moved.T) - std**2 * torch.eye(3)).abs().max() < 5 * std**2 * (2 / count) ** 0.5


# The filter


def test_passing_copies_are_kept_until_the_quota_is_met():
    copies, seen = sample_passing_copies(torch.zeros(2), 1.0, make_noise(), lambda z: z[:, 0] > 0, quota=30, tries=50)
    assert copies.shape == (30, 2)
    assert (copies[:, 0] > 0).all()
    assert 40 < seen < 90, "half of the draws pass"


def test_copies_are_counted_up_to_the_last_one_needed():
    calls = iter([torch.tensor([False, True, False, False]), torch.tensor([True, False, True, True])])
    copies, seen = sample_passing_copies(torch.zeros(1), 1.0, make_noise(), lambda _: next(calls), quota=4, tries=9)
    assert (len(copies), seen) == (4, 8)
    calls = iter([torch.tensor([True, True, False]), torch.tensor([True, True, True])])
    assert sample_passing_copies(torch.zeros(1), 1.0, make_noise(), lambda _: next(calls), quota=3, tries=9)[1] == 4


def test_the_loop_ends_when_nothing_ever_passes():
    calls = []
    copies, seen = sample_passing_copies(
        torch.zeros(2), 1.0, make_noise(), lambda z: calls.append(len(z)) or pass_none(z), quota=7, tries=5
    )
    assert copies.shape == (0, 2)
    assert calls == [7] * 5
    assert seen == 35


def test_a_quota_of_zero_samples_nothing():
    copies, seen = sample_passing_copies(torch.zeros(2), 1.0, make_noise(), pass_all, quota=0, tries=5)
    assert (len(copies), seen) == (0, 0)


# The message


def make_means() -> NoisyMeans:
    latents, labels = build_empty_rows(2, 3, 4)
    labels[0, :2] = 7
    latents[0, :2] = 1.0
    return NoisyMeans(latents.flatten(0, 1), labels.flatten())


def test_empty_rows_are_left_out():
    latents, labels = make_means().select_rows()
    assert labels.tolist() == [7, 7]
    assert torch.equal(latents, torch.ones(2, 4))


def test_valid_rows_pass():
    make_means().check(6, 4, torch.tensor([7, NONE]))


@pytest.mark.parametrize(
    ("count", "latent", "classes", "wrong"),
    [(5, 4, [7, 1], "latents"), (6, 3, [7, 1], "latents"), (6, 4, [1, 2], "not among the named classes")],
)
def test_invalid_rows_are_refused(count, latent, classes, wrong):
    with pytest.raises(ValueError, match=wrong):
        make_means().check(count, latent, torch.tensor(classes))
