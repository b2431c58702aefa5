"""FedDPMS's private means between neighbours: how many members, and how far, one replaced record moves them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fedrpc.data.examples import Examples
from fedrpc.methods.feddpms.client import share_private_means
from fedrpc.methods.feddpms.latent_means import choose_members
from fedrpc.methods.feddpms.messages import FedDpmsParams
from fedrpc.methods.feddpms.privacy import bound_latents, compute_sensitivity
from fedrpc.seeds import derive

LATENT, CLASSES, SIZE, M = 4, 3, 24, 3
LABELS = st.lists(st.integers(0, CLASSES - 1), min_size=SIZE, max_size=SIZE).map(torch.tensor)
POSITIONS, SEEDS = st.integers(0, SIZE - 1), st.integers(0, 2**32)


def share_means(z: Tensor, y: Tensor, *, seed: int = 0, code: bool = False, **params: Any) -> dict[int, Tensor]:
    """The means of a client whose examples have these latent vectors, without noise, by class."""
    setting = {"mode": "private", "alpha": 1, "sigma": 0.0, "n": CLASSES, "m": M} | params
    client: Any = SimpleNamespace(
        params=FedDpmsParams(**setting),
        env=SimpleNamespace(num_classes=CLASSES),
        data=SimpleNamespace(train=Examples.of(z, y)),
        device=torch.device("cpu"),
        rng=lambda purpose: derive(seed, purpose),
        release=lambda part, value, mechanism: value,
    )
    model: Any = SimpleNamespace(latent=z.shape[1], features=lambda x: x, code=code)
    latents, labels = share_private_means(client, model).means.select_rows()
    return dict(zip(labels.tolist(), latents, strict=True))


def relabel(y: Tensor, position: int, label: int) -> Tensor:
    changed = y.clone()
    changed[position] = label
    return changed


@given(LABELS, POSITIONS, st.integers(0, CLASSES - 1), SEEDS)
def test_another_label_changes_one_member_of_the_class_it_leaves_and_of_the_one_it_joins(y, position, label, seed):
    numbers = torch.from_numpy(derive(seed, "means").permutation(SIZE))
    other = relabel(y, position, label)
    touched = 0
    for c in range(CLASSES):
        if min(int((y == c).sum()), int((other == c).sum())) < M:
            continue  # such a class is not shared
        one, two = ({*choose_members(labels, c, M, numbers).tolist()} for labels in (y, other))
        assert len(one) == len(two) == M
        assert all(int(y[i]) == c for i in one)
        assert len(one - two) <= 1, (one, two)
        assert one == two or c in (int(y[position]), label)
        touched += one != two
    assert touched <= 2


def test_every_example_of_a_class_is_as_likely_a_member():
    y, counts = torch.tensor([0, 1] * 5), torch.zeros(10)
    for seed in range(1000):
        counts[choose_members(y, 1, 2, torch.from_numpy(derive(seed, "means").permutation(10)))] += 1
    assert counts[::2].tolist() == [0] * 5
    assert all(abs(count - 400) < 6 * math.sqrt(240) for count in counts[1::2].tolist())


@given(LABELS, POSITIONS, st.integers(0, CLASSES - 1), SEEDS, st.sampled_from([0.5, 1.0, 1.6]), st.integers(1, CLASSES))
def test_no_neighbour_moves_a_mean_beyond_the_sensitivity_or_more_than_two(y, position, label, seed, clip, n):
    """Corners of the cube are as far apart as latent vectors can be."""
    z = torch.from_numpy(derive(seed, "corners").integers(0, 2, (SIZE, LATENT))).float()
    other = z.clone()
    other[position] = 1 - z[position]
    before = share_means(z, y, seed=seed, clip=clip, n=n)
    after = share_means(other, relabel(y, position, label), seed=seed, clip=clip, n=n)
    assume(before.keys() == after.keys())
    moved = [float((before[c] - after[c]).norm()) for c in before]
    assert max(moved, default=0) <= compute_sensitivity(LATENT, M, clip) * (1 + 1e-6)
    assert sum(distance > 0 for distance in moved) <= min(2, n)


@pytest.mark.parametrize("clip", [0.3, 1.0, math.sqrt(LATENT / 2)])
def test_a_replaced_record_can_move_a_mean_by_all_of_the_sensitivity(clip):
    """The first half of the coordinates against the second: no wider angle is possible without negative values."""
    y, z = torch.zeros(M, dtype=torch.int64), torch.ones(M, LATENT)
    other = z.clone()
    z[0, : LATENT // 2], other[0, LATENT // 2 :] = 0, 0
    moved = (share_means(z, y, clip=clip)[0] - share_means(other, y, clip=clip)[0]).norm()
    assert float(moved) == pytest.approx(math.sqrt(2) * clip / M, rel=1e-5)
    assert float(moved) == pytest.approx(compute_sensitivity(LATENT, M, clip), rel=1e-5)


@pytest.mark.parametrize("clip", [0.3, 1.0, 5.0])
def test_without_bounds_on_values_a_record_can_move_a_mean_by_twice_the_clip(clip):
    y, z = torch.zeros(M, dtype=torch.int64), torch.full((M, LATENT), 100.0)
    other = z.clone()
    other[0] = -z[0]
    moved = (share_means(z, y, clip=clip, code=True)[0] - share_means(other, y, clip=clip, code=True)[0]).norm()
    assert float(moved) == pytest.approx(2 * clip / M, rel=1e-5)
    assert float(moved) == pytest.approx(compute_sensitivity(LATENT, M, clip, unit=False), rel=1e-5)


def test_what_a_model_computes_is_bounded_whatever_it_is():
    """A model that overflows on some record must not be able to say so."""
    nan, inf = math.nan, math.inf
    z = torch.tensor([[nan, 0.6], [inf, 0.0], [-inf, -2.0], [3.0, 3.0]])
    wanted = torch.tensor([[0.0, 0.6], [0.8, 0.0], [0.0, 0.0], [0.8 / math.sqrt(2)] * 2])
    assert torch.allclose(bound_latents(z, 0.8), wanted)
