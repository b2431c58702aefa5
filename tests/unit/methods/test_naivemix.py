from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrpc.errors import ConfigError
from fedrpc.methods.fedmix import Means
from fedrpc.methods.naivemix import NaiveMix
from fedrpc.methods.runtime import ClientContext
from fedrpc.training.losses import Loss
from tests.fakes import InMemoryFederation, problem_of, run_in_memory

MEANS_OF_THREE = {"mean_size": 3}


class Seen(nn.Module):
    """Remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.x: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.x.append(x.detach())
        return torch.tensor([[0.0, 1.0, 2.0]]).expand(len(x), -1)


def build_loss(pool: Means, a: float = 2.0) -> Loss:
    ctx = SimpleNamespace(
        params=SimpleNamespace(a=a), rng=lambda _: np.random.default_rng(5), env=SimpleNamespace(num_classes=3)
    )
    return NaiveMix().build_mixed_loss(cast(ClientContext, ctx), pool)


def test_one_weight_for_a_batch_and_a_new_one_for_the_next() -> None:
    loss, model = build_loss(Means(torch.zeros(4, 2), torch.full((4, 3), 1 / 3))), Seen()
    for _ in range(200):
        loss(model, torch.ones(8, 2), torch.zeros(8, dtype=torch.int64))
    weights = [x.unique().tolist() for x in model.x]
    assert all(len(values) == 1 for values in weights)
    sampled = np.array(weights)[:, 0]
    assert len(set(sampled)) == 200
    assert sampled.mean() == pytest.approx(0.5, abs=0.05)
    assert sampled.var() == pytest.approx(1 / 20, abs=0.015)  # of Beta(2, 2)


def test_inputs_and_labels_are_mixed_alike() -> None:
    y_mean = torch.tensor([[0.2, 0.3, 0.5]])
    loss, model = build_loss(Means(torch.zeros(1, 2), y_mean)), Seen()
    y = torch.tensor([0, 2])
    value = loss(model, torch.ones(2, 2), y)
    weight = float(model.x[0][0, 0])
    wanted = weight * F.one_hot(y, 3) + (1 - weight) * y_mean
    assert torch.allclose(wanted.sum(dim=1), torch.ones(2))
    log_p = F.log_softmax(torch.tensor([0.0, 1.0, 2.0]), dim=0)
    assert float(value) == pytest.approx(float(-(wanted * log_p).sum(dim=1).mean()), rel=1e-6)


def test_examples_are_paired_with_different_means() -> None:
    pool = Means(torch.arange(50.0)[:, None].repeat(1, 2), torch.full((50, 3), 1 / 3))
    model = Seen()
    build_loss(pool)(model, torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64))
    assert len(model.x[0][:, 0].unique()) > 1


def test_without_a_pool_it_is_fedavg_bit_for_bit() -> None:
    ours = run_in_memory(problem_of("naivemix", params={"mean_size": 1000}))
    assert ours.sha256 == run_in_memory(problem_of("fedavg")).sha256
    assert ours.measured() == ours.predicted()


def test_bytes_are_fedmixs_and_the_model_is_not() -> None:
    ours = run_in_memory(problem_of("naivemix", params=MEANS_OF_THREE))
    fedmix = run_in_memory(problem_of("fedmix", params=MEANS_OF_THREE))
    assert ours.measured() == ours.predicted() == fedmix.measured()
    assert ours.sha256 != fedmix.sha256


def test_a_restarted_client_still_has_the_pool(tmp_path: Path) -> None:
    with InMemoryFederation(problem_of("naivemix", params=MEANS_OF_THREE), tmp_path) as federation:

        def restart(state: Any) -> Any:
            federation.clients.close()
            return state

        restarted = asyncio.run(federation.play(2, restart))
    assert restarted.sha256 == run_in_memory(problem_of("naivemix", params=MEANS_OF_THREE)).sha256


def test_a_must_be_above_zero() -> None:
    with pytest.raises(ConfigError):
        problem_of("naivemix", params={"a": 0})
