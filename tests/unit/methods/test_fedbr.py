from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedrpc.client.store import ClientStore, Transaction
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.mixup import soft_cross_entropy
from fedrpc.methods.blocks.pool import POOL, Nothing
from fedrpc.methods.fedbr import DebiasedLoss, FedBR, MeanInputs, StoredProjector, build_projector, contrastive_loss
from fedrpc.methods.runtime import ClientContext
from fedrpc.models.base import Model
from fedrpc.models.state import read_tensors
from tests.fakes import InMemoryFederation, mlp, problem_of, run_in_memory, tiny

SMALL = {"mean_size": 3, "num_items": 6}
PARAMS = SimpleNamespace(mu=0.5, lam=1.0, tau1=2.0, tau2=2.0, gamma=1.0, mixture=True)


def build_network() -> Model:
    torch.manual_seed(0)
    return Model([nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.ReLU())], nn.Linear(6, 4))


def build_loss(**params: Any) -> tuple[DebiasedLoss, Model, nn.Module]:
    torch.manual_seed(1)
    projector = build_projector(6)
    pool = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(2))
    loss = DebiasedLoss(
        SimpleNamespace(**(vars(PARAMS) | params)),
        build_network(),
        projector,
        torch.optim.SGD(projector.parameters(), lr=0.1),
        pool=pool,
        num_classes=4,
        rng=np.random.default_rng(0),
    )
    return loss, build_network(), projector


def make_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 1, 2, 3, 0, 1])


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_uniform_target_has_its_least_loss_at_a_uniform_prediction() -> None:
    wanted = torch.full((3, 4), 0.25)
    even = soft_cross_entropy(torch.full((3, 4), 0.25).log(), wanted)
    assert even.item() == pytest.approx(math.log(4), rel=1e-6)
    for seed in range(5):
        logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        assert soft_cross_entropy(logits.log_softmax(dim=1), wanted) > even


def test_equal_features_have_a_contrastive_loss_of_log_two() -> None:
    features = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert contrastive_loss(features, features, features, 2.0, 2.0).item() == pytest.approx(math.log(2), rel=1e-6)


def test_contrastive_loss_matches_values_computed_by_hand() -> None:
    right, up = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    near = contrastive_loss(right, right, up, 2.0, 5.0)  # similarity 1 to the received, 0 to own
    assert near.item() == pytest.approx(-math.log(math.exp(2) / (math.exp(2) + 1)), rel=1e-6)
    assert torch.isfinite(
        contrastive_loss(right * 0, right, -right, 1000.0, 1000.0)
    )  # no overflow, no zero to divide by


def test_the_max_step_changes_only_the_projector_and_raises_the_loss() -> None:
    loss, model, projector = build_loss()
    before, kept = read_tensors(model), read_tensors(projector)
    features = [torch.randn(6, 6, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    low = loss.contrastive_loss(*features).item()
    loss.train_projector(*features)
    assert are_equal(before, read_tensors(model))
    assert all(p.grad is None for p in model.parameters())
    assert not are_equal(kept, read_tensors(projector))
    assert loss.contrastive_loss(*features).item() > low


def test_the_min_step_changes_neither_the_projector_nor_the_received_model() -> None:
    loss, model, projector = build_loss()
    value = loss(model, *make_batch())
    kept, received = read_tensors(projector), read_tensors(loss._received)
    value.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert are_equal(kept, read_tensors(projector))
    assert are_equal(received, read_tensors(loss._received))
    assert not loss._received.training
    assert all(p.grad is not None for p in model.parameters())


def test_without_the_contrastive_term_the_projector_does_not_change() -> None:
    loss, model, projector = build_loss(mu=0.0)
    kept = read_tensors(projector)
    loss(model, *make_batch()).backward()
    assert are_equal(kept, read_tensors(projector))


def test_mixture_averages_again_and_does_not_change_the_pool() -> None:
    (x, y), (mixing, _, _), (plain, _, _) = make_batch(), build_loss(), build_loss(mixture=False)
    pool = mixing._pool.clone()
    items, uniform = plain.sample_pseudo(x, y)
    mixed, wanted = mixing.sample_pseudo(x, y)  # the same draw
    assert torch.allclose(mixed, (items + x) / 2)
    assert torch.allclose(uniform, torch.full((6, 4), 0.25))
    assert torch.allclose(wanted, (0.25 + nn.functional.one_hot(y, 4)) / 2)
    assert torch.allclose(wanted.sum(dim=1), torch.ones(6))
    for _ in range(3):
        mixing.sample_pseudo(x, y)
    assert torch.equal(mixing._pool, pool)


def test_zero_weights_are_fedavg_bit_for_bit_and_share_nothing() -> None:
    ours, fedavg = run_in_memory(problem_of("fedbr", params={"mu": 0, "lam": 0})), run_in_memory(problem_of("fedavg"))
    assert ours.sha256 == fedavg.sha256
    assert ours.measured() == ours.predicted() == fedavg.measured()


def test_without_a_full_group_it_is_fedavg() -> None:
    ours = run_in_memory(problem_of("fedbr", params={"mean_size": 1000}))
    assert ours.sha256 == run_in_memory(problem_of("fedavg")).sha256


@pytest.mark.parametrize("num_items", [2, 6, 100])
def test_measured_bytes_equal_the_formula(num_items: int) -> None:
    played = run_in_memory(problem_of("fedbr", fraction=0.5, params=SMALL | {"num_items": num_items}))
    assert played.measured() == played.predicted()
    most = math.ceil(num_items / 4)
    sent = sum(min(len(played.problem.load_client_data(client).train) // 3, most) for client in range(4))
    assert played.measured()["up"]["mean_samples"] == sent * 4 * 784
    assert played.measured()["down"]["mean_samples"] == 4 * min(sent, num_items) * 4 * 784


def test_every_client_has_the_pool_and_a_projector_of_its_own(tmp_path: Path) -> None:
    run_in_memory(problem_of("fedbr", params=SMALL), folder=tmp_path)
    pools, projectors = [], []
    for client in range(4):
        store = ClientStore(tmp_path / str(client))
        pool, kept = Transaction(store).get(POOL, MeanInputs), Transaction(store).get("projector", StoredProjector)
        rows = [json.loads(row) for row in store.read_privacy_rows(0)]
        store.close()
        assert pool is not None
        assert kept is not None
        pools.append(pool.x)
        projectors.append(kept.weights)
        [released] = [row for row in rows if row["kind"] == "mean_samples"]
        assert released["covers"].startswith("no guarantee")
        assert released["parts"] == ["x"]  # no labels
    assert all(torch.equal(pool, pools[0]) for pool in pools)
    assert not any(are_equal(projectors[0], other) for other in projectors[1:])


def test_a_restarted_client_has_its_pool_and_projector(tmp_path: Path) -> None:
    with InMemoryFederation(problem_of("fedbr", params=SMALL), tmp_path) as federation:

        def restart(state: Any) -> Any:
            federation.clients.close()
            return state

        restarted = asyncio.run(federation.play(2, restart))
    assert restarted.sha256 == run_in_memory(problem_of("fedbr", params=SMALL)).sha256


@pytest.mark.parametrize("lie", [lambda x: x.repeat(9, 1, 1, 1), lambda x: x[:, :, 1:]], ids=["too many", "shape"])
def test_an_invalid_answer_affects_no_other_client(lie: Any) -> None:
    class Liar(FedBR):
        name = "liar"

        def share_items(self, ctx: ClientContext, msg: Nothing) -> MeanInputs:
            given = super().share_items(ctx, msg)
            return MeanInputs(lie(given.x)) if ctx.client == 2 else given

    played = run_in_memory(problem_of(Liar, params=SMALL), rounds=1)
    sent = sum(min(len(played.problem.load_client_data(client).train) // 3, 2) for client in (0, 1, 3))
    assert played.measured()["down"]["mean_samples"] == 4 * sent * 4 * 784


def test_a_network_without_features_is_refused() -> None:
    with pytest.raises(ConfigError, match="features"):
        problem_of("fedbr", build=mlp)
    problem_of("fedbr", build=tiny)


def test_the_projector_can_have_sgd_where_the_run_has_adam(tmp_path: Path) -> None:
    def play(name: str, **params: Any) -> dict[str, torch.Tensor]:
        problem = problem_of("fedbr", params=SMALL | params, train={"optimizer": "adam", "lr": 0.01})
        run_in_memory(problem, 1, folder=tmp_path / name)
        store = ClientStore(tmp_path / name / "0")
        kept = Transaction(store).get("projector", StoredProjector)
        store.close()
        assert kept is not None
        return kept.weights

    as_run, by_sgd, slow = play("run"), play("sgd", projector="sgd"), play("slow", projector="sgd", projector_lr=1e-12)
    start = read_tensors(problem_of("fedbr").env.build("fedbr-projector", lambda: build_projector(8)))

    def measure(weights: dict[str, torch.Tensor]) -> float:
        return max(float((weights[name] - start[name]).abs().max()) for name in start)

    # Adam moves every weight by about its rate in each step, whatever the gradient is.
    assert measure(slow) < 1e-6 < measure(by_sgd) < measure(as_run)
