from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedrpc.client.store import ClientStore, Transaction
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.pool import POOL, Nothing, count_shared
from fedrpc.methods.cost import Shapes
from fedrpc.methods.fedavg import Global, Update
from fedrpc.methods.feddata import FedData, Samples, pack, remove_own, unpack
from fedrpc.methods.runtime import ClientContext
from fedrpc.problem import Problem
from fedrpc.wire.kinds import Kind
from tests.fakes import InMemoryFederation, problem_of, run_in_memory


def read_pools(problem: Problem, folder: Path) -> list[Samples | None]:
    """What every client keeps."""
    found = []
    for client in range(problem.config.clients):
        store = ClientStore(folder / str(client))
        found.append(Transaction(store).get(POOL, Samples))
        store.close()
    return found


def count_items(samples: Samples) -> Counter[tuple[int, bytes]]:
    return Counter((int(y), x.numpy().tobytes()) for x, y in zip(samples.x, samples.y, strict=True))


def test_pool_is_the_disjoint_union_less_own_items(tmp_path: Path) -> None:
    problem = problem_of("feddata", params={"alpha": 0.3})
    run_in_memory(problem, rounds=0, folder=tmp_path)
    data = [problem.load_client_data(client).train for client in range(4)]
    counts = [count_shared(0.3, len(own)) for own in data]
    assert min(counts) >= 1
    owned = [count_items(Samples(*own.all())) for own in data]
    for client, pool in enumerate(read_pools(problem, tmp_path)):
        assert pool is not None
        assert len(pool.y) == sum(counts) - counts[client]
        found = count_items(pool)
        assert max(found.values()) == 1  # no item twice
        assert not found & owned[client]
        for other in set(range(4)) - {client}:
            assert (found & owned[other]).total() == counts[other]


@pytest.mark.parametrize("alpha", [0.0, 0.001])
def test_nothing_to_share_is_fedavg_bit_for_bit(alpha: float) -> None:
    ours, fedavg = (run_in_memory(problem_of(m, params=p)) for m, p in (("feddata", {"alpha": alpha}), ("fedavg", {})))
    assert ours.sha256 == fedavg.sha256
    assert ours.measured() == fedavg.measured()


@pytest.mark.parametrize(("transport", "item_bytes"), [("float32", 4 * 784 + 8), ("uint8", 784 + 8 + 8)])
def test_bytes_are_the_formula(transport: str, item_bytes: int) -> None:
    played = run_in_memory(problem_of("feddata", fraction=0.5, params={"alpha": 0.3, "transport": transport}))
    assert played.measured() == played.predicted()
    given = sum(count_shared(0.3, len(played.problem.load_client_data(client).train)) for client in range(4))
    assert played.measured()["up"]["samples"] == given * item_bytes
    assert played.measured()["down"]["samples"] == 4 * given * item_bytes


@pytest.mark.parametrize(("transport", "megabytes"), [("float32", 61.5), ("uint8", 15.4)])
def test_the_formula_gives_the_papers_megabytes(transport: str, megabytes: float) -> None:
    """500 clients of 100 CIFAR-10 images share 5,000 of them."""
    env = problem_of("feddata", params={"transport": transport}).env
    shapes = Shapes(0, [], [100] * 500, [], replace(env, shape=(3, 32, 32), num_clients=500))
    cost = FedData().cost(shapes)
    assert cost.up[Kind.SAMPLES] == pytest.approx(megabytes * 1e6, rel=3e-3)
    assert cost.down[Kind.SAMPLES] == 500 * cost.up[Kind.SAMPLES]


def test_packed_inputs_come_back_within_half_a_level() -> None:
    x = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(0)) * 3 + 1
    x[1] = 0.7  # a constant input
    sent = pack(x, torch.zeros(5, dtype=torch.int64))
    assert sent.x.dtype == torch.uint8
    back = unpack(sent.x, sent.bounds)
    assert back.dtype == torch.float32
    reach = (x.flatten(1).amax(1) - x.flatten(1).amin(1)).view(-1, 1, 1, 1)
    assert bool(((back - x).abs() <= reach / 510 + 1e-5).all())
    assert torch.equal(back[1], x[1])


def test_without_removes_one_copy_of_each() -> None:
    pool = Samples(torch.tensor([[1.0], [1.0], [2.0], [1.0]]), torch.tensor([0, 0, 1, 1]))
    left = remove_own(pool, Samples(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0])))
    assert left.x.flatten().tolist() == [1.0, 2.0, 1.0]
    assert left.y.tolist() == [0, 1, 1]


def test_models_count_by_own_examples_and_train_on_more() -> None:
    seen: dict[int, tuple[int, int]] = {}

    class Spy(FedData):
        name = "spy"

        def fit(self, ctx: ClientContext, msg: Global) -> Update:
            update = super().fit(ctx, msg)
            pool = ctx.store.get(POOL, Samples)
            assert pool is not None
            seen[ctx.client] = update.num_examples, len(pool.y)
            return update

    problem = problem_of(Spy, params={"alpha": 0.3})
    run_in_memory(problem, rounds=1)
    assert {client: own for client, (own, _) in seen.items()} == {
        client: len(problem.load_client_data(client).train) for client in range(4)
    }
    assert all(pooled for _, pooled in seen.values())


LIES: dict[str, Any] = {
    "label": lambda s: Samples(s.x, s.y + 10),
    "negative label": lambda s: Samples(s.x, s.y - 10),
    "shape": lambda s: Samples(s.x[:, :, 1:], s.y),
    "dtype": lambda s: Samples(s.x.double(), s.y),
    "rows": lambda s: Samples(s.x, s.y[1:]),
    "no rows": lambda s: Samples(s.x, torch.tensor(1)),
    "nan": lambda s: Samples(s.x * float("nan"), s.y),
    "bounds": lambda s: Samples(s.x, s.y, torch.zeros(len(s.y), 2)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_invalid_answer_affects_no_other_client(lie: Any, tmp_path: Path) -> None:
    class Liar(FedData):
        name = "liar"

        def share_items(self, ctx: ClientContext, msg: Nothing) -> Samples:
            given = super().share_items(ctx, msg)
            return lie(given) if ctx.client == 2 else given

    problem = problem_of(Liar, params={"alpha": 0.5})
    run_in_memory(problem, rounds=1, folder=tmp_path)
    counts = [count_shared(0.5, len(problem.load_client_data(client).train)) for client in range(4)]
    sizes = [len(pool.y) for pool in read_pools(problem, tmp_path) if pool is not None]
    honest = sum(counts) - counts[2]
    assert sizes == [honest - (0 if client == 2 else counts[client]) for client in range(4)]


def test_bounds_that_cross_are_refused(tmp_path: Path) -> None:
    class Liar(FedData):
        name = "liar"

        def share_items(self, ctx: ClientContext, msg: Nothing) -> Samples:
            given = super().share_items(ctx, msg)
            assert given.bounds is not None
            return Samples(given.x, given.y, given.bounds.flip(1)) if ctx.client == 2 else given

    problem = problem_of(Liar, params={"alpha": 0.5, "transport": "uint8"})
    run_in_memory(problem, rounds=1, folder=tmp_path)
    counts = [count_shared(0.5, len(problem.load_client_data(client).train)) for client in range(4)]
    pool = read_pools(problem, tmp_path)[2]
    assert pool is not None
    assert len(pool.y) == sum(counts) - counts[2]


def test_who_missed_the_pool_trains_without_it(tmp_path: Path) -> None:
    problem = problem_of("feddata", params={"alpha": 0.3})
    played = run_in_memory(problem, folder=tmp_path, absent=lambda _, phase, __, c: phase == "distribute" and c == 1)
    assert [pool is None for pool in read_pools(problem, tmp_path)] == [False, True, False, False]
    assert sorted(played.records[-1]["local_losses"]) == [0, 1, 2, 3]


def test_a_restarted_client_still_has_the_pool(tmp_path: Path) -> None:
    problem = problem_of("feddata", params={"alpha": 0.3})
    with InMemoryFederation(problem, tmp_path) as federation:

        def restart(state: Any) -> Any:
            federation.clients.close()
            return state

        restarted = asyncio.run(federation.play(2, restart))
    assert restarted.sha256 == run_in_memory(problem_of("feddata", params={"alpha": 0.3})).sha256
    assert [phase for _, phase, _, _ in restarted.asked].count("distribute") == 4  # once for each client


def test_a_pool_over_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"more than 10000 bytes .*params.max_pool"):
        run_in_memory(problem_of("feddata", params={"alpha": 1.0, "max_pool": "10kB"}))


def test_raw_data_leaves_without_a_guarantee(tmp_path: Path) -> None:
    problem = problem_of("feddata", params={"alpha": 0.3})
    run_in_memory(problem, rounds=1, folder=tmp_path)
    store = ClientStore(tmp_path / "0")
    rows = [json.loads(row) for row in store.read_privacy_rows(0)]
    store.close()
    released = {row["kind"]: row["covers"] for row in rows}
    assert set(released) == {"samples", "weights", "scalars"}
    assert released["samples"].startswith("no guarantee")
    assert FedData.shares_raw_data
    assert not FedData.dp_sgd.is_allowed
