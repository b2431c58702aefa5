from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedrpc.client.store import ClientStore
from fedrpc.errors import ConfigError
from fedrpc.methods.ccvr import CCVR, CCVRParams, Moments, PooledMoments, Spread, compute_moments
from fedrpc.methods.fedavg import Global
from fedrpc.methods.runtime import ClientContext
from fedrpc.models.base import Model
from fedrpc.models.state import load
from fedrpc.server.summary import build_shapes
from fedrpc.wire.kinds import Kind
from tests.fakes import mlp, problem_of, run_in_memory

FAST = {"num_virtual": 40, "epochs": 2}


def make_clients(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Features and labels of four clients; no client has class 3, class 2 has one example."""
    rng = torch.Generator().manual_seed(seed)
    labels = [[0, 0, 0, 1], [1, 1, 0], [0] * 6, [2, 1, 1, 0, 0]]
    return [
        (torch.randn(len(y), 5, generator=rng, dtype=torch.float64) * (k + 1) + k, torch.tensor(y))
        for k, y in enumerate(labels)
    ]


def pool_moments(spread: Spread, parts: list[tuple[Tensor, Tensor]]) -> PooledMoments:
    whole = PooledMoments(4, spread)
    for features, y in parts:
        whole.add(compute_moments(features, y, 4, spread))
    return whole


def to_matrix(spread: Tensor) -> Tensor:
    out = torch.zeros(5, 5, dtype=torch.float64)
    rows, columns = torch.triu_indices(5, 5)
    out[rows, columns] = out[columns, rows] = spread
    return out


def test_pooled_moments_are_those_of_the_concatenated_features() -> None:
    whole = pool_moments(Spread(5, diagonal=False), make_clients())
    features, y = (torch.cat(values) for values in zip(*make_clients(), strict=True))
    assert whole.counts.tolist() == torch.bincount(y, minlength=4).tolist()
    for c in (0, 1):
        mine = features[y == c].numpy()
        np.testing.assert_allclose(whole.means[c], mine.mean(axis=0), rtol=1e-13)
        np.testing.assert_allclose(to_matrix(whole.compute_spread(c)), np.cov(mine.T), rtol=1e-12, atol=1e-13)


def test_pooled_moments_by_the_papers_formula() -> None:
    whole, spread = pool_moments(Spread(5, diagonal=False), make_clients()), Spread(5, diagonal=False)
    moments_by_client = [compute_moments(features, y, 4, spread) for features, y in make_clients()]
    counts = [int(moments.counts[0]) for moments in moments_by_client]
    total = sum(counts)
    mean = sum(n * moments.means[0] for n, moments in zip(counts, moments_by_client, strict=True)) / total
    formula = -total / (total - 1) * torch.outer(mean, mean)
    for n, moments in zip(counts, moments_by_client, strict=True):
        formula += (n - 1) / (total - 1) * to_matrix(moments.spreads[0])
        formula += n / (total - 1) * torch.outer(moments.means[0], moments.means[0])
    torch.testing.assert_close(to_matrix(whole.compute_spread(0)), formula, rtol=1e-10, atol=1e-12)


def test_diagonal_spreads_are_the_diagonal_of_the_covariance() -> None:
    full, diagonal = (pool_moments(Spread(5, diagonal=flag), make_clients()) for flag in (False, True))
    for c in (0, 1):
        torch.testing.assert_close(to_matrix(full.compute_spread(c)).diagonal(), diagonal.compute_spread(c))


def test_classes_with_one_and_with_no_example() -> None:
    whole = pool_moments(Spread(5, diagonal=False), make_clients())
    assert not whole.compute_spread(2).any()
    sampled = dict(whole.sample(7, np.random.default_rng(0)))
    assert sorted(sampled) == [0, 1, 2]
    assert torch.equal(sampled[2], whole.means[2].float().expand(7, -1))


@pytest.mark.parametrize("diagonal", [False, True])
def test_virtual_features_have_the_moments(diagonal: bool) -> None:
    whole = pool_moments(Spread(5, diagonal=diagonal), make_clients())
    sampled = dict(whole.sample(20000, np.random.default_rng(0)))[0].double()
    spread = whole.compute_spread(0)
    wanted = spread.diag() if diagonal else to_matrix(spread)
    scale = float(wanted.diagonal().max())
    np.testing.assert_allclose(sampled.mean(dim=0), whole.means[0], atol=0.05 * scale**0.5)
    np.testing.assert_allclose(np.cov(sampled.numpy().T), wanted, atol=0.05 * scale)


def test_a_singular_covariance_needs_no_correction() -> None:
    spread = Spread(5, diagonal=False)
    features = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moments_by_client = compute_moments(features, torch.zeros(3, dtype=torch.int64), 4, spread)
    root = spread.compute_root(moments_by_client.spreads[0])
    assert root.shape == (5, 2)  # three points have two directions
    torch.testing.assert_close(root @ root.T, to_matrix(moments_by_client.spreads[0]))


class Wide(Model):
    def __init__(self, features: int) -> None:
        super().__init__([nn.Sequential(nn.Flatten(), nn.Linear(784, features))], nn.Linear(features, 10))


@pytest.mark.parametrize("diagonal", [False, True])
def test_only_the_classifier_changes(diagonal: bool) -> None:
    played = run_in_memory(problem_of("ccvr", params=FAST | {"diagonal": diagonal}))
    before, after = played.states[-2].weights, played.states[-1].weights
    assert list(before) == list(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"classifier.weight", "classifier.bias"}
    assert before == played.states[-2].weights  # the state before is as it was
    assert run_in_memory(problem_of("fedavg")).weights.keys() == before.keys()


def test_rounds_are_fedavgs_bit_for_bit() -> None:
    before = run_in_memory(problem_of("ccvr", params=FAST)).states[-2].weights
    fedavg = run_in_memory(problem_of("fedavg")).weights
    assert all(torch.equal(before[name], fedavg[name]) for name in fedavg)


def test_calibration_repairs_a_classifier() -> None:
    """A classifier that says nothing learns from virtual features what the features know."""
    options: dict[str, Any] = {"train_size": 400, "partition": "iid", "train": {"lr": 0.1, "epochs": 3}}
    params = {"num_virtual": 200, "epochs": 5, "lr": 0.05}

    class Broken(CCVR):
        name = "broken"

        async def finalize(self, state: Global, rnd: Any) -> Global:
            mute = {n: t * 0 if n.startswith("classifier") else t for n, t in state.weights.items()}
            return await super().finalize(Global(mute), rnd)

    assert run_in_memory(problem_of(Broken, params=params, **options), rounds=2).evaluate().accuracy > 30


def test_measured_bytes_equal_the_formula() -> None:
    for diagonal, width in ((False, 8 * 9 // 2), (True, 8)):
        played = run_in_memory(problem_of("ccvr", fraction=0.5, params=FAST | {"diagonal": diagonal}))
        assert played.measured() == played.predicted()
        assert played.measured()["up"]["moments"] == 4 * 4 * 10 * (1 + 8 + width)


def test_the_formula_gives_the_papers_bytes() -> None:
    for diagonal, size in ((False, 32.8e6), (True, 102e3)):
        problem = problem_of("ccvr", build=lambda: Wide(1280), params={"diagonal": diagonal}, clients=1)
        cost = problem.method.cost(build_shapes(problem, {}, [[0]]))
        assert cost.up[Kind.MOMENTS] == pytest.approx(size, rel=5e-3)


def test_moments_that_are_too_large_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"600 features .*params.diagonal = true"):
        problem_of("ccvr", build=lambda: Wide(600), params={"max_moments": "5MB"})
    problem_of("ccvr", build=lambda: Wide(600), params={"max_moments": "5MB", "diagonal": True})


def test_a_network_without_features_is_refused() -> None:
    with pytest.raises(ConfigError, match="features"):
        problem_of("ccvr", build=mlp)


LIES: dict[str, Any] = {
    "counts": lambda m: Moments(-m.counts, m.means, m.spreads),
    "classes": lambda m: Moments(m.counts[:-1], m.means[:-1], m.spreads[:-1]),
    "dtype": lambda m: Moments(m.counts.long(), m.means, m.spreads),
    "spreads": lambda m: Moments(m.counts, m.means, m.spreads[:, :8]),
    "nan": lambda m: Moments(m.counts, m.means * float("nan"), m.spreads),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_invalid_answer_affects_no_other_client(lie: Any) -> None:
    class Liar(CCVR):
        name = "liar"

        def describe(self, ctx: ClientContext, msg: Global) -> Moments:
            moments_by_client = super().describe(ctx, msg)
            return lie(moments_by_client) if ctx.client == 2 else moments_by_client

    lying = run_in_memory(problem_of(Liar, params=FAST), rounds=1)
    absent = run_in_memory(problem_of("ccvr", params=FAST), 1, absent=lambda _, p, __, c: p == "describe" and c == 2)
    assert lying.sha256 == absent.sha256


def test_clients_describe_features_of_the_final_model_in_evaluation_mode(tmp_path: Path) -> None:
    moments_by_client: dict[int, Moments] = {}

    class Spy(CCVR):
        name = "spy"

        def describe(self, ctx: ClientContext, msg: Global) -> Moments:
            moments_by_client[ctx.client] = super().describe(ctx, msg)
            return moments_by_client[ctx.client]

    problem = problem_of(Spy, params=FAST)
    played = run_in_memory(problem, folder=tmp_path)
    model = problem.copy_network().eval()
    load(model, played.states[-2].weights)
    x, y = problem.load_client_data(1).train.all()
    assert isinstance(model, Model)
    with torch.no_grad():
        features = model.features(x)
    for c in y.unique().tolist():
        torch.testing.assert_close(moments_by_client[1].means[c], features[y == c].mean(dim=0), rtol=1e-5, atol=1e-6)
    store = ClientStore(tmp_path / "1")
    [row] = [json.loads(row) for row in store.read_privacy_rows(0) if '"moments"' in row]
    store.close()
    assert row["covers"].startswith("no guarantee")


def test_a_table_tells_of_the_setting_that_sends_less() -> None:
    assert CCVR().describe_caveat(CCVRParams()) == "params.diagonal=true sends variances alone, far fewer bytes"
    assert CCVR().describe_caveat(CCVRParams(diagonal=True)) == ""
