"""The paper's claimed epsilons against audited ones, and when they hold."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import brentq

from fedrpc.methods.feddpms.privacy import (
    FILTERED,
    NAMED,
    UNBOUNDED,
    bound_latents,
    build_mechanism,
    build_privacy_record,
    clip_norms,
    compute_epsilons,
    compute_sensitivity,
    list_noise_readings,
)
from fedrpc.privacy.accountant import compute_epsilon
from fedrpc.privacy.gaussian import compute_classic_epsilon, solve_epsilon
from tests.fakes import problem_of

FMNIST = {"latent": 32, "alpha": 50, "n": 3, "m": 100, "sigma": 3.0}
CIFAR10 = {"latent": 128, "alpha": 200, "n": 3, "m": 100, "sigma": 4.0}
# As printed: (delta 1e-5, delta 0.01) of the claim, one draw, the draws of one class, all draws.
AUDIT = [
    (FMNIST, "sigma/m", 0.03, ("1.61", "1.04"), ("9.30", "5.52"), ("144.9", "119.0"), ("364.2", "319.4")),
    (FMNIST, "sigma/sqrt(m)", 0.3, (".161", ".104"), (".680", ".242"), ("6.13", "3.42"), ("11.95", "7.36")),
    (FMNIST, "sigma", 3.0, (".016", ".010"), (".055", "0"), (".466", ".145"), (".849", ".322")),
    (CIFAR10, "sigma/m", 0.04, ("1.21", ".777"), ("15.5", "9.86"), ("969.6", "892.1"), ("2694.5", "2560.2")),
    (CIFAR10, "sigma/sqrt(m)", 0.4, (".121", ".078"), ("1.06", ".427"), ("24.4", "16.5"), ("52.8", "39.3")),
    (CIFAR10, "sigma", 4.0, (".012", ".008"), (".086", ".003"), ("1.56", ".682"), ("2.88", "1.42")),
]
COLUMNS = ("claimed", "one_draw", "class_draws", "all_draws")


def find_epsilon(setting: dict, reading: str, delta: float, column: str, **changes: float) -> float:
    rows = compute_epsilons(**(setting | changes))
    return next(row[column] for row in rows if (row["reading"], row["delta"]) == (reading, delta))


def parse_printed(text: str) -> tuple[float, float]:
    """A printed value and its tolerance: 1 %, or half of its last digit."""
    digits = len(text.partition(".")[2])
    return float(text), max(0.01 * float(text), 0.5 * 10.0**-digits)


@pytest.mark.parametrize(("setting", "reading", "std", "claimed", "one_draw", "class_draws", "all_draws"), AUDIT)
def test_the_table_of_the_audit(setting, reading, std, claimed, one_draw, class_draws, all_draws):
    assert list_noise_readings(setting["sigma"], setting["m"])[reading] == pytest.approx(std)
    for column, texts in zip(COLUMNS, (claimed, one_draw, class_draws, all_draws), strict=True):
        for delta, text in zip((1e-5, 0.01), texts, strict=True):
            wanted, off = parse_printed(text)
            assert find_epsilon(setting, reading, delta, column) == pytest.approx(wanted, abs=off), (
                column,
                delta,
            )


def test_the_papers_example_needs_more_noise_than_it_says():
    """For m = 100, epsilon = 0.5 and delta = 0.01 the classic bound asks for 6.215; 3.9 is a logarithm to base 10."""
    needed = brentq(lambda sigma: compute_classic_epsilon(sigma, 0.01) - 0.5, 1, 20)
    assert needed == pytest.approx(6.215, abs=5e-4)
    assert math.sqrt(2 * math.log10(80)) / 0.5 == pytest.approx(3.902, abs=5e-4)
    assert solve_epsilon(1 / 3.9, 0.01) == pytest.approx(0.373, abs=5e-4), "one coordinate, exactly: true by luck"


@pytest.mark.parametrize(("setting", "needed"), [(FMNIST, 1.49), (CIFAR10, 5.97)])
def test_the_noise_for_an_epsilon_of_one(setting, needed):
    found = brentq(lambda s: find_epsilon(setting, "sigma", 1e-5, "class_draws", sigma=s) - 1, 0.5, 20)
    assert found == pytest.approx(needed, rel=0.01)


@pytest.mark.parametrize(
    "change", [{"alpha": 51}, {"latent": 33}, {"sigma": 2.9}, {"m": 99}], ids=lambda change: next(iter(change))
)
def test_epsilon_grows_with_draws_and_length_and_falls_with_noise_and_size(change):
    assert find_epsilon(FMNIST, "sigma", 1e-5, "class_draws", **change) > find_epsilon(
        FMNIST, "sigma", 1e-5, "class_draws"
    )


def test_nothing_shared_costs_nothing_and_no_noise_costs_everything():
    assert find_epsilon(FMNIST, "sigma", 1e-5, "class_draws", alpha=0) == 0
    assert find_epsilon(FMNIST, "sigma", 1e-5, "one_draw", sigma=0.0) == math.inf


def test_sensitivity_is_the_diagonal_or_the_width_of_the_balls_positive_part_over_m():
    assert compute_sensitivity(32, 100) == pytest.approx(math.sqrt(32) / 100)
    assert compute_sensitivity(32, 100, clip=1.0) == pytest.approx(math.sqrt(2) / 100)
    assert compute_sensitivity(32, 100, clip=50.0) == compute_sensitivity(32, 100), "the cube is smaller than the ball"


@pytest.mark.parametrize("clip", [None, 0.7, 1.5])
def test_no_replaced_record_moves_a_mean_beyond_the_sensitivity(clip):
    generator = torch.Generator().manual_seed(0)
    # Corners are as far apart as vectors in the cube can be.
    z = (torch.rand(2000, 2, 5, 6, generator=generator) < 0.5).double()
    z[:, 1, 1:] = z[:, 0, 1:]
    if clip:
        z = clip_norms(z.reshape(-1, 6), clip).reshape(z.shape)
    moved = (z[:, 0].mean(dim=1) - z[:, 1].mean(dim=1)).norm(dim=1)
    assert 0.5 * compute_sensitivity(6, 5, clip) < moved.max() <= compute_sensitivity(6, 5, clip) * (1 + 1e-9)


def test_vectors_without_bounds_are_twice_the_clip_apart_or_infinitely_far():
    assert compute_sensitivity(32, 100, unit=False) == math.inf
    assert compute_sensitivity(32, 100, clip=1.5, unit=False) == pytest.approx(3 / 100)
    far = bound_latents(torch.tensor([[9.0, 0.0], [-9.0, 0.0]]), 1.5, unit=False)
    assert (far[0] - far[1]).norm().item() / 100 == pytest.approx(compute_sensitivity(2, 100, 1.5, unit=False))


@pytest.mark.parametrize("unit", [True, False])
def test_latent_vectors_that_no_network_should_give_are_bounded_too(unit):
    bad = torch.tensor([[math.nan, 1.0], [math.inf, -math.inf], [3e38, 3e38], [-3e38, 1.0], [0.1, 0.2]])
    found = bound_latents(bad, 0.5, unit=unit)
    assert torch.isfinite(found).all()
    assert (found.norm(dim=1) <= 0.5 * (1 + 1e-6)).all()


def test_the_records_of_latents_without_bounds_promise_nothing():
    env = problem_of("feddpms", build=None, model="dpms", params={"vae": "code", "preliminary": 1}).env
    record = build_privacy_record(env)
    assert record["holds"] == UNBOUNDED
    assert all(row[column] == math.inf for row in record["rows"] for column in ("one_draw", "class_draws", "all_draws"))
    private = problem_of(
        "feddpms", build=None, model="dpms", params={"vae": "code", "mode": "private", "m": 5, "preliminary": 1}
    )
    assert build_privacy_record(private.env)["rows"] == compute_epsilons(
        latent=32, alpha=50, n=3, m=5, sigma=3.0, clip=math.sqrt(32) / 2, unit=False
    )


def test_clipping_keeps_directions_and_short_vectors():
    z = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    assert torch.allclose(clip_norms(z, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


def test_the_mechanism_is_charged_the_audited_epsilon():
    found = build_mechanism(latent=32, alpha=50, m=100, sigma=3.0, clip=math.sqrt(32) / 2).guarantee
    assert compute_epsilon(found.history, 1e-5) == pytest.approx(
        find_epsilon(FMNIST, "sigma", 1e-5, "class_draws", clip=math.sqrt(32) / 2), rel=1e-9
    )
    assert found.adjacency == "replace-one, same label"
    assert "same label" in found.covers
    assert "conditional on the received model" in found.covers
    assert found.parameters["m"] == 100


def test_a_smaller_clip_costs_less():
    costs = [
        compute_epsilon(build_mechanism(latent=32, alpha=50, m=100, sigma=3.0, clip=c).guarantee.history, 1e-5)
        for c in (1.0, 2.0)
    ]
    assert costs[0] < costs[1] < find_epsilon(FMNIST, "sigma", 1e-5, "class_draws")


@pytest.mark.parametrize(
    "mechanism",
    [FILTERED, NAMED, build_mechanism(latent=4, alpha=5, m=10, sigma=0.0, clip=1.0)],
    ids=["filter", "ids", "zero"],
)
def test_a_mechanism_without_a_guarantee_has_no_history(mechanism):
    assert mechanism.guarantee.covers.startswith("no guarantee: ")
    assert mechanism.guarantee.history == ()
