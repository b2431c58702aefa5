"""An attack on a DP-SGD client: what a canary's presence can be told by must stay within what the ledger charges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta
from torch import Tensor, nn

from fedrpc.config import PrivacyConfig, TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.privacy.accountant import compute_epsilon
from fedrpc.privacy.mechanisms import History, Trainings
from fedrpc.seeds import derive, make_torch_generator
from fedrpc.training.dpsgd import DpSgd

DELTA = 1e-5
TRIALS = 250
CONFIDENCE = 0.95


def score(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss whose gradient is the input itself, so that the canary's is as large as the bound lets it be."""
    return -(model(x).squeeze(1)).mean()


def release(seed: int, noise: float, *, canary: bool, batch: int) -> tuple[float, History]:
    """How far a training moved along the canary, and what the ledger charges for it."""
    x = torch.zeros(8, 2)
    x[0, 0] = 100.0 if canary else 0.0
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    privacy = PrivacyConfig(dp_sgd={"noise_multiplier": noise, "max_grad_norm": 1.0})
    streams = {name: make_torch_generator(derive(seed, name)) for name in ("noise", "sampling")}
    trainer = DpSgd(privacy, Trainings(), num_rounds=1, afford=lambda *_: None, **streams)
    config = TrainConfig(epochs=2, batch_size=batch, lr=1.0)
    data = Examples.of(x, torch.zeros(8, dtype=torch.int64))
    report = trainer(model, score, data, config, lr=1.0, order=derive(seed, "order"), device=torch.device("cpu"))
    assert report.covered is not None
    return float(model.weight[0, 0].detach()), report.covered.guarantee.history


def excluded(without: np.ndarray, with_: np.ndarray, threshold: float) -> float:
    """The epsilon that is ruled out, at the confidence, by how often each side is above a threshold."""
    size, tail = len(with_), (1 - CONFIDENCE) / 2
    false, true = int((without > threshold).sum()), int((with_ > threshold).sum())
    high = float(beta.ppf(1 - tail, false + 1, size - false)) if false < size else 1.0
    low = float(beta.ppf(tail, true, size - true + 1)) if true else 0.0
    return max(0.0, math.log(max(low - DELTA, 1e-12) / high))


def lower_bound(without: np.ndarray, with_: np.ndarray) -> float:
    """A lower bound on epsilon: the threshold is chosen on one half of the trials and judged on the other."""
    half = len(with_) // 2
    thresholds = np.concatenate([without[:half], with_[:half]])
    chosen = max(thresholds, key=lambda threshold: excluded(without[:half], with_[:half], float(threshold)))
    return excluded(without[half:], with_[half:], float(chosen))


def measured(noise: float, batch: int) -> tuple[float, History]:
    history: History = ()
    sides = []
    for canary in (False, True):
        moved = []
        for trial in range(TRIALS):
            value, history = release(1000 * canary + trial, noise, canary=canary, batch=batch)
            moved.append(value)
        sides.append(np.array(moved))
    return lower_bound(*sides), history


@pytest.mark.parametrize("batch", [8, 4])
def test_a_canary_attack_finds_no_more_than_the_charged_epsilon(batch: int) -> None:
    found, history = measured(noise=0.8, batch=batch)
    assert 0.2 < found <= compute_epsilon(history, DELTA)


def test_the_attack_would_find_noise_that_was_never_added() -> None:
    """Trained with a tenth of the noise that a ledger claims: the bound is above the claim."""
    found, history = measured(noise=0.3, batch=8)
    claimed = tuple((10 * noise, rate, steps) for noise, rate, steps in history)
    assert found > compute_epsilon(claimed, DELTA)
