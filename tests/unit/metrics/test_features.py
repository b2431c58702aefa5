"""Davies-Bouldin scores and distance correlation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import davies_bouldin_score

from fedrpc.metrics.features import davies_bouldin, dcor2, distance_correlation, null_value
from fedrpc.seeds import derive

seeds = st.integers(0, 2**32 - 1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_loops(x: np.ndarray, f: np.ndarray) -> float:
    """Equation 8 written out pair by pair."""

    def centred(points: np.ndarray) -> np.ndarray:
        n = len(points)
        e = np.array([[math.dist(p, q) for q in points] for p in points])
        c = np.eye(n) - np.ones((n, n)) / n
        return c @ e @ c

    a, b = centred(x.reshape(len(x), -1)), centred(f.reshape(len(f), -1))
    n = len(x)
    covariance = [
        sum(u[i][j] * v[i][j] for i in range(n) for j in range(n)) / n**2 for u, v in ((a, b), (a, a), (b, b))
    ]
    return covariance[0] / math.sqrt(covariance[1] * covariance[2])


def test_davies_bouldin_by_hand():
    features, labels = torch.tensor([[0.0], [2.0], [10.0], [12.0]]), torch.tensor([0, 0, 1, 1])
    assert davies_bouldin(features, labels) == pytest.approx(0.2)


@given(seeds)
def test_davies_bouldin_equals_its_definition_and_scikit_learns(seed):
    features = normal(30, 4, seed=seed % 1000)
    labels = torch.arange(30) % 5 * 3  # class numbers need not be consecutive
    points, classes = features.double().numpy(), labels.numpy()
    names = np.unique(classes)
    centres = [points[classes == c].mean(0) for c in names]
    s = [np.linalg.norm(points[classes == c] - m, axis=1).mean() for c, m in zip(names, centres, strict=True)]
    worst = [max((s[i] + s[j]) / np.linalg.norm(centres[i] - centres[j]) for j in range(5) if j != i) for i in range(5)]
    assert davies_bouldin(features, labels) == pytest.approx(np.mean(worst))
    assert davies_bouldin(features, labels) == pytest.approx(davies_bouldin_score(points, classes))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_davies_bouldin_does_not_depend_on_scale_or_offset(scale):
    features, labels = normal(20, 3), torch.arange(20) % 2
    assert davies_bouldin(scale * features.double(), labels) == pytest.approx(davies_bouldin(features, labels))
    assert davies_bouldin(features.double() + 100, labels) == pytest.approx(davies_bouldin(features, labels))


def test_davies_bouldin_has_no_value_without_two_centres():
    same = torch.tensor([[-0.1], [0.3], [0.3], [-0.1]])
    assert davies_bouldin(same, torch.tensor([0, 0, 1, 1])) is None
    third = torch.cat([same, torch.tensor([[9.0], [11.0]])])
    assert davies_bouldin(third, torch.tensor([0, 0, 1, 1, 2, 2])) is None
    assert davies_bouldin(torch.ones(4, 2), torch.tensor([0, 0, 1, 1])) is None
    assert davies_bouldin(normal(4, 2), torch.zeros(4, dtype=torch.int64)) is None


def test_davies_bouldin_of_single_points_is_perfect():
    assert davies_bouldin(normal(3, 2), torch.arange(3)) == 0


def test_davies_bouldin_refuses_wrong_inputs():
    with pytest.raises(ValueError, match="finite"):
        davies_bouldin(torch.tensor([[math.nan], [1.0]]), torch.arange(2))
    with pytest.raises(ValueError, match="4 features but 3 labels"):
        davies_bouldin(normal(4, 2), torch.arange(3))


@given(seeds, st.integers(2, 9))
def test_dcor2_equals_pairs_written_out(seed, n):
    x, f = normal(n, 2, 3, seed=seed % 997), normal(n, 4, seed=seed % 991 + 1000)
    assert float(dcor2(x, f)) == pytest.approx(by_loops(x.double().numpy(), f.double().numpy()), abs=1e-6)


@given(seeds)
def test_dcor2_is_symmetric_and_in_range(seed):
    x, f = normal(8, 3, seed=seed % 997), normal(8, 5, seed=seed % 991 + 1000)
    assert float(dcor2(x, f)) == pytest.approx(float(dcor2(f, x)), abs=1e-6)
    assert 0 <= float(dcor2(x, f)) <= 1
    assert float(dcor2(x, x)) == pytest.approx(1, abs=1e-6)


def test_similarity_transforms_have_correlation_one():
    x = normal(32, 6).double()
    rotation, _ = torch.linalg.qr(normal(6, 6, seed=1).double())
    assert float(dcor2(x, 3.5 * x @ rotation + 7)) == pytest.approx(1, abs=1e-12)


def test_other_linear_maps_do_not():
    x = normal(64, 10)
    stretched = x * torch.tensor([10.0] + [0.1] * 9)
    assert float(dcor2(x, stretched)) < 0.6


def test_independent_pairs_show_the_bias():
    # Independent N(0, I_10) pairs at n = 32 are far from 0: .548 and .740 over 300 draws.
    values = [distance_correlation(normal(32, 10, seed=s), normal(32, 10, seed=500 + s)) for s in range(30)]
    assert np.mean([v.dcor2 for v in values]) == pytest.approx(0.548, abs=0.015)
    assert np.mean([v.dcor for v in values]) == pytest.approx(0.740, abs=0.01)
    assert all(v.dcor == pytest.approx(math.sqrt(v.dcor2)) for v in values)


def test_the_null_value_is_that_of_independent_pairs():
    # Of pairs that are fully dependent, each shuffled 20 times: shuffling alone must make them independent.
    nulls = [null_value(normal(32, 10, seed=s), 2 * normal(32, 10, seed=s), derive(s, "null")) for s in range(10)]
    assert np.mean([null.dcor2 for null in nulls]) == pytest.approx(0.548, abs=0.03)
    assert np.mean([null.dcor for null in nulls]) == pytest.approx(0.740, abs=0.02)


def test_the_null_value_follows_its_generator():
    x, f = normal(8, 3), normal(8, 3, seed=1)
    null = null_value(x, f, derive(0, "null"))
    assert null == null_value(x, f, derive(0, "null"))
    assert null != null_value(x, f, derive(1, "null"))
    once = null_value(x, f, derive(0, "null"), repeats=1)
    assert once.dcor == pytest.approx(math.sqrt(once.dcor2))
    with pytest.raises(ValueError, match="at least one shuffle"):
        null_value(x, f, derive(0, "null"), repeats=0)


@pytest.mark.parametrize("f", [torch.full((1, 3), 0.1), torch.full((5, 3), 0.1)])
def test_constant_features_give_zero_with_a_zero_gradient(f):
    f = f.requires_grad_()
    value = dcor2(normal(len(f), 4), f)
    value.backward()
    assert value == 0
    assert f.grad is not None
    assert not f.grad.any()


def test_equal_inputs_give_zero_with_a_zero_gradient():
    f = normal(5, 3).requires_grad_()
    value = dcor2(torch.full((5, 4), 0.1), f)
    value.backward()
    assert value == 0
    assert f.grad is not None
    assert f.grad.isfinite().all()
    assert not f.grad.any()


def test_gradients_are_finite_with_coincident_samples():
    x, f = normal(6, 3), normal(6, 4)
    f[3] = f[1]
    x[2] = x[0]
    f = f.requires_grad_()
    dcor2(x, f).backward()
    assert f.grad.isfinite().all()
    assert f.grad.abs().sum() > 0


def test_gradients_are_right():
    x, f = normal(5, 3).double(), normal(5, 2, seed=1).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: dcor2(x, v), (f,))


def test_minimizing_it_hides_the_input():
    x = normal(32, 4)
    f = (x + 0.1 * normal(32, 4, seed=3)).requires_grad_()
    start = distance_correlation(x, f).dcor2
    optimizer = torch.optim.Adam([f], lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        dcor2(x, f).backward()
        optimizer.step()
    assert distance_correlation(x, f).dcor2 < start / 2


def test_a_far_offset_costs_no_precision():
    x, f = normal(16, 5), (normal(16, 5, seed=1) * 2**10).round() / 2**10
    assert float(dcor2(x, f + 1000)) == pytest.approx(float(dcor2(x, f)), abs=1e-6)  # float32 holds the sums exactly
    assert float(dcor2(x, f.double() + 2**20)) == pytest.approx(float(dcor2(x, f)), abs=1e-6)


def test_shapes_and_dtypes():
    x = torch.randint(256, (6, 1, 4, 4), dtype=torch.uint8)
    assert dcor2(x, normal(6, 2, 3)).dtype == torch.float32
    assert 0 < float(dcor2(normal(6, 2), x)) < 1
    assert float(dcor2(normal(6), normal(6))) == pytest.approx(1, abs=1e-6)
    with pytest.raises(ValueError, match="paired samples, got 3 and 4"):
        dcor2(normal(3, 1), normal(4, 1))
    with pytest.raises(ValueError, match="paired samples"):
        dcor2(normal(0, 1), normal(0, 1))
