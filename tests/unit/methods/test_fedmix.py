from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrpc.client.store import ClientStore, Transaction
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.pool import POOL, Nothing
from fedrpc.methods.fedmix import FedMix, Means, taylor_mixup_loss
from fedrpc.methods.runtime import ClientContext
from tests.fakes import InMemoryFederation, problem_of, run_in_memory

MEANS_OF_THREE = {"lam": 0.1, "mean_size": 3}


def make_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_batch(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    x, x_mean = (torch.randn(6, 4, generator=make_generator(s), dtype=torch.float64) for s in (seed, seed + 1))
    y = torch.tensor([0, 1, 2, 2, 1, 0])
    y_mean = torch.rand(6, 3, generator=make_generator(seed + 2), dtype=torch.float64)
    return (x, y), (x_mean, y_mean / y_mean.sum(dim=1, keepdim=True))


def mix_exactly(model: nn.Module, own: Any, mean: Any, lam: float, criterion: Any = F.cross_entropy) -> Tensor:
    """What FedMix approximates."""
    outputs = model((1 - lam) * own[0] + lam * mean[0])
    return (1 - lam) * criterion(outputs, own[1]) + lam * criterion(outputs, mean[1])


def linear_loss(outputs: Tensor, wanted: Tensor) -> Tensor:
    """A criterion that is linear in the outputs."""
    if not wanted.is_floating_point():
        wanted = F.one_hot(wanted, 3).double()
    return -(outputs * wanted).sum(dim=1).mean()


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def test_lambda_zero_is_cross_entropy(network: nn.Module) -> None:
    own, mean = make_batch(1)
    assert torch.equal(taylor_mixup_loss(network, own, mean, 0.0), F.cross_entropy(network(own[0]), own[1]))


def test_halving_lambda_quarters_the_error(network: nn.Module) -> None:
    own, mean = make_batch(1)
    errors = [
        abs((taylor_mixup_loss(network, own, mean, lam) - mix_exactly(network, own, mean, lam)).item())
        for lam in (0.02, 0.01, 0.005)
    ]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.03)


@pytest.mark.parametrize("lam", [0.05, 0.3])
def test_the_error_is_exact_for_an_affine_model_and_a_linear_loss(lam: float) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 3).double()
    own, mean = make_batch(2)
    error = taylor_mixup_loss(model, own, mean, lam, linear_loss) - mix_exactly(model, own, mean, lam, linear_loss)
    u = ((1 - lam) * own[0]).requires_grad_()
    (slope,) = torch.autograd.grad(linear_loss(model(u), mean[1]), u)
    assert error.item() == pytest.approx(-(lam**2) * float((slope * mean[0]).sum()), rel=1e-12)


def test_the_gradient_term_trains_the_model(network: nn.Module) -> None:
    own, (x_mean, y_mean) = make_batch(3)
    grads = []
    for scale in (0.0, 1.0):
        network.zero_grad()
        taylor_mixup_loss(network, own, (scale * x_mean, y_mean), 0.2).backward()
        grads.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    assert not torch.allclose(grads[0], grads[1], rtol=1e-3)


def test_batchnorm_and_relu_can_be_differentiated_twice() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()).train()
    x, x_mean = torch.randn(4, 1, 6, 6), torch.randn(4, 1, 6, 6)
    wanted = torch.full((4, 12), 1 / 12)
    taylor_mixup_loss(model, (x, torch.tensor([0, 1, 2, 3])), (x_mean, wanted), 0.1).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_lambda_zero_is_fedavg_bit_for_bit_and_shares_nothing() -> None:
    ours, fedavg = run_in_memory(problem_of("fedmix", params={"lam": 0.0})), run_in_memory(problem_of("fedavg"))
    assert ours.sha256 == fedavg.sha256
    assert ours.measured() == fedavg.measured()
    assert ours.predicted() == fedavg.predicted()


def test_without_a_full_group_it_is_fedavg() -> None:
    ours = run_in_memory(problem_of("fedmix", params={"mean_size": 1000}))
    assert ours.sha256 == run_in_memory(problem_of("fedavg")).sha256
    assert ours.measured() == ours.predicted()


def test_measured_bytes_equal_the_formula() -> None:
    played = run_in_memory(problem_of("fedmix", fraction=0.5, params=MEANS_OF_THREE))
    assert played.measured() == played.predicted()
    count = sum(len(played.problem.load_client_data(client).train) // 3 for client in range(4))
    assert played.measured()["up"]["mean_samples"] == count * (4 * 784 + 4 * 10)
    assert played.measured()["down"]["mean_samples"] == 4 * count * (4 * 784 + 4 * 10)


def test_every_client_has_the_same_pool_of_means_and_distributions(tmp_path: Path) -> None:
    problem = problem_of("fedmix", params=MEANS_OF_THREE)
    played = run_in_memory(problem, folder=tmp_path)
    assert played.sha256 != run_in_memory(problem_of("fedavg")).sha256
    found = []
    for client in range(4):
        store = ClientStore(tmp_path / str(client))
        pool = Transaction(store).get(POOL, Means)
        assert pool is not None
        found.append(pool)
        store.close()
    assert all(torch.equal(pool.x, found[0].x) and torch.equal(pool.y, found[0].y) for pool in found)
    assert torch.allclose(found[0].y.sum(dim=1), torch.ones(len(found[0].y)))
    assert set((found[0].y * 3).round().unique().tolist()) <= {0.0, 1.0, 2.0, 3.0}


def test_sampling_does_not_change_the_pool() -> None:
    pool = Means(torch.arange(6.0).reshape(3, 2), torch.eye(3))
    x, y = pool.sample(np.random.default_rng(0), 20, torch.device("cpu"))
    assert x.shape == (20, 2)
    assert torch.equal(x[:, 0] // 2, y.argmax(dim=1).float())  # each with its own labels
    x.zero_()
    assert pool.x.sum() == 15


@pytest.mark.parametrize(
    "lie",
    [
        lambda m: Means(m.x, m.y * 2),
        lambda m: Means(m.x, 1 - 10 * m.y),
        lambda m: Means(m.x, m.y[:, :-1]),
        lambda m: Means(m.x.flatten(1), m.y),
    ],
    ids=["sum", "negative", "classes", "shape"],
)
def test_an_invalid_answer_affects_no_other_client(lie: Any) -> None:
    class Liar(FedMix):
        name = "liar"

        def share_items(self, ctx: ClientContext, msg: Nothing) -> Means:
            given = super().share_items(ctx, msg)
            return lie(given) if ctx.client == 2 else given

    played = run_in_memory(problem_of(Liar, params=MEANS_OF_THREE), rounds=1)
    counts = [len(played.problem.load_client_data(client).train) // 3 for client in range(4)]
    honest = sum(counts) - counts[2]
    assert played.measured()["down"]["mean_samples"] == 4 * honest * (4 * 784 + 4 * 10)


def test_a_restarted_client_still_has_the_pool(tmp_path: Path) -> None:
    with InMemoryFederation(problem_of("fedmix", params=MEANS_OF_THREE), tmp_path) as federation:

        def restart(state: Any) -> Any:
            federation.clients.close()
            return state

        restarted = asyncio.run(federation.play(2, restart))
    assert restarted.sha256 == run_in_memory(problem_of("fedmix", params=MEANS_OF_THREE)).sha256


def test_means_leave_without_a_guarantee(tmp_path: Path) -> None:
    run_in_memory(problem_of("fedmix", params=MEANS_OF_THREE), rounds=1, folder=tmp_path)
    store = ClientStore(tmp_path / "0")
    rows = [json.loads(row) for row in store.read_privacy_rows(0)]
    store.close()
    [released] = [row for row in rows if row["kind"] == "mean_samples"]
    assert released["covers"].startswith("no guarantee")
    assert released["parts"] == ["x", "y"]
    assert not FedMix.dp_sgd.is_allowed


@pytest.mark.parametrize("params", [{"mean_size": 1}, {"lam": 1.0}, {"lam": -0.1}])
def test_invalid_parameters_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        problem_of("fedmix", params=params)


def test_a_compiled_network_is_refused_unless_nothing_is_mixed() -> None:
    """Its loss contains a gradient, of which a compiled network has no second backward pass."""
    with pytest.raises(ConfigError, match=r"fedmix needs train\.compile off, got on: .* leave it out"):
        problem_of("fedmix", train={"compile": "on"})
    problem_of("fedmix", train={"compile": "on"}, params={"lam": 0.0})
    problem_of("naivemix", train={"compile": "on"})
