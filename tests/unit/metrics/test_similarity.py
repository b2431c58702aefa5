"""SSIM: hand values, an independent implementation, and scikit-image's where it is installed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedrpc.metrics.similarity import ssim


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(a: np.ndarray, b: np.ndarray, data_range: float) -> float:
    """One channel, window by window, as the paper writes it."""
    axis = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    window = np.outer(axis, axis) / axis.sum() ** 2
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    values = []
    for top in range(a.shape[0] - 10):
        for left in range(a.shape[1] - 10):
            p, q = (image[top : top + 11, left : left + 11] for image in (a, b))
            mp, mq = (window * p).sum(), (window * q).sum()
            vp, vq = (window * (p - mp) ** 2).sum(), (window * (q - mq) ** 2).sum()
            cov = (window * (p - mp) * (q - mq)).sum()
            values.append((2 * mp * mq + c1) * (2 * cov + c2) / ((mp**2 + mq**2 + c1) * (vp + vq + c2)))
    return float(np.mean(values))


def test_it_equals_the_definition() -> None:
    a, b = images(3, 2, 16, 14), images(3, 2, 16, 14, seed=1)
    expected = [np.mean([by_hand(a[i, c].numpy(), b[i, c].numpy(), 2.0) for c in range(2)]) for i in range(3)]
    assert ssim(a, b, 2.0).tolist() == pytest.approx(expected, abs=1e-10)


def test_it_equals_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics", reason="scikit-image is not installed")
    a, b = images(1, 1, 32, 28)[0, 0], images(1, 1, 32, 28, seed=1)[0, 0]
    settings = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1.0}
    expected = metrics.structural_similarity(a.numpy(), b.numpy(), **settings)
    assert float(ssim(a[None, None], b[None, None], 1.0)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (2, 3, 128), (2, 1, 5, 4), (2, 1, 1)])
def test_equal_samples_give_1(shape: tuple[int, ...]) -> None:
    x = images(*shape)
    assert ssim(x, x, 1.0).tolist() == pytest.approx([1.0, 1.0])


def test_constants_differ_only_in_luminance() -> None:
    a, b = torch.full((1, 1, 20, 20), 0.2), torch.full((1, 1, 20, 20), 0.6)
    assert float(ssim(a, b, 1.0)) == pytest.approx((2 * 0.12 + 1e-4) / (0.04 + 0.36 + 1e-4), rel=1e-6)


def test_it_is_symmetric_falls_with_noise_and_is_negative_for_an_inverted_image() -> None:
    x = images(4, 1, 24, 24)
    noise = images(4, 1, 24, 24, seed=3) - 0.5
    near, far = x + 0.1 * noise, x + 0.6 * noise
    assert torch.allclose(ssim(x, near, 1.0), ssim(near, x, 1.0))
    assert bool((ssim(x, near, 1.0) > ssim(x, far, 1.0)).all())
    assert bool((ssim(x, 1 - x, 1.0) < 0).all())


def test_unrelated_signals_give_almost_0() -> None:
    a = torch.randn(20, 1, 256, generator=torch.Generator().manual_seed(0))
    b = torch.randn(20, 1, 256, generator=torch.Generator().manual_seed(1))
    assert abs(float(ssim(a, b, 6.0).mean())) < 0.15


def test_it_depends_on_the_data_range() -> None:
    a, b = images(2, 1, 16, 16), images(2, 1, 16, 16, seed=1)
    assert torch.allclose(ssim(a, b, 1.0), ssim(255 * a, 255 * b, 255.0))
    assert not math.isclose(float(ssim(a, b, 1.0)[0]), float(ssim(a, b, 100.0)[0]))


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pairs of signals or images, got \(1, 5\) and \(1, 5\)"):
        ssim(torch.zeros(1, 5), torch.zeros(1, 5), 1.0)
    with pytest.raises(ValueError, match="pairs of signals or images"):
        ssim(torch.zeros(1, 1, 5), torch.zeros(2, 1, 5), 1.0)
    with pytest.raises(ValueError, match=r"above 0, got 0\.0"):
        ssim(torch.zeros(1, 1, 5), torch.zeros(1, 1, 5), 0.0)
