"""Measures of features: how well classes separate, and how much of the input the features still reveal."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Squared distances below this share of the largest squared norm are rounding, not distance.
COINCIDENT = 1e-12
# Centres closer than this, where the features have unit spread, are one centre but for rounding.
SAME_CENTRE = 1e-9


class DistanceCorrelation(NamedTuple):
    """Both forms of distance correlation: FLea's equation 8 is `dcor2`, its plots show `dcor`."""

    dcor2: float
    dcor: float


def dcor2(x: Tensor, f: Tensor) -> Tensor:
    """The squared distance correlation of paired samples, in [0, 1] and differentiable.

    The plug-in estimate is biased upward, more so for small batches: compare only at equal batch sizes. A batch
    of one, or one whose `x` or `f` are all equal, gives 0.

    Args:
        x: Samples along the first axis, of any shape.
        f: The same number of samples.
    """
    if len(x) != len(f) or len(x) == 0:
        raise ValueError(f"distance correlation needs paired samples, got {len(x)} and {len(f)}")
    a, b = _centre_distances(x), _centre_distances(f)
    norm = (a * a).mean() * (b * b).mean()
    known = norm > 0
    # The inner choice keeps a division by zero, whose gradient is NaN, out of the graph.
    ratio = (a * b).mean() / torch.where(known, norm, torch.ones_like(norm)).sqrt()
    value = torch.where(known, ratio, torch.zeros_like(ratio)).clamp(0.0, 1.0)
    return value.to(f.dtype) if f.is_floating_point() else value


def distance_correlation(x: Tensor, f: Tensor) -> DistanceCorrelation:
    """Both forms, for a report; take a batch of fixed size (256) with the model in evaluation mode."""
    with torch.no_grad():
        value = float(dcor2(x.double(), f.double()))
    return DistanceCorrelation(value, math.sqrt(value))


def null_value(x: Tensor, f: Tensor, rng: np.random.Generator, *, repeats: int = 20) -> DistanceCorrelation:
    """What `distance_correlation` gives for unrelated pairs at this batch size: its mean over shuffled pairs.

    Args:
        x: As in `dcor2`.
        f: As in `dcor2`.
        rng: Shuffles the pairs.
        repeats: How many shuffles.
    """
    if repeats < 1:
        raise ValueError(f"the null value needs at least one shuffle, got {repeats}")
    orders = [torch.from_numpy(rng.permutation(len(f))) for _ in range(repeats)]
    values = [distance_correlation(x, f[order.to(f.device)]) for order in orders]
    return DistanceCorrelation(*(math.fsum(column) / repeats for column in zip(*values, strict=True)))


def davies_bouldin(features: Tensor, labels: Tensor) -> float | None:
    """The Davies-Bouldin score of penultimate features under their true classes; lower separates better.

    Returns:
        The score, or None where it has no value: fewer than two classes, or two classes with one centre.
    """
    points, classes = _scale(features), labels.cpu().numpy()
    if len(points) != len(classes):
        raise ValueError(f"{len(points)} features but {len(classes)} labels")
    present = np.unique(classes)
    if len(present) < 2:
        return None
    centres = np.stack([points[classes == label].mean(axis=0) for label in present])
    # scikit-learn calls coincident centres infinitely far apart, which would reward the worst features.
    if _coincide(centres):
        return None
    if len(present) == len(points):
        return 0.0  # every class is a point; scikit-learn refuses this case
    from sklearn.metrics import davies_bouldin_score  # slow to import, and few processes need it

    return float(davies_bouldin_score(points, classes))


def _centre_distances(samples: Tensor) -> Tensor:
    """Euclidean distances of all pairs, minus the means of their rows and columns, plus the mean of all."""
    distances = _measure_distances(samples.flatten(1) if samples.ndim > 1 else samples.unsqueeze(1))
    rows = distances.mean(dim=0, keepdim=True)
    return distances - rows - rows.T + rows.mean()


def _measure_distances(points: Tensor) -> Tensor:
    # The product form cancels badly in float32. Shifting to the first point makes equal points exactly 0.
    points = points.double()
    points = points - points[:1].detach()
    product = points @ points.T
    norms = product.diagonal()
    squares = norms[:, None] + norms[None, :] - 2 * product
    apart = squares > COINCIDENT * norms.max()
    # The root has an infinite gradient at 0, as on the diagonal: coincident pairs get 0 and no gradient.
    roots = torch.where(apart, squares, torch.ones_like(squares)).sqrt()
    return torch.where(apart, roots, torch.zeros_like(roots))


def _scale(features: Tensor) -> NDArray[np.float64]:
    """Centred features of unit spread: the score is free of scale, but scikit-learn's tolerances are not."""
    points: NDArray[np.float64] = features.detach().flatten(1).double().cpu().numpy()
    if not np.isfinite(points).all():
        raise ValueError("features must be finite, got NaN or infinity")
    points = points - points.mean(axis=0)
    spread = float(np.sqrt((points**2).sum(axis=1).mean()))
    return points / spread if spread > 0 else points


def _coincide(centres: NDArray[np.float64]) -> bool:
    distances = _measure_distances(torch.from_numpy(centres)).numpy()
    return bool((distances[~np.eye(len(centres), dtype=np.bool_)] < SAME_CENTRE).any())
