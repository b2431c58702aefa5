"""What the seam of aggregation must carry, shown on toys: phases of its own, all updates at once, noise, state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedrpc.aggregation import AGGREGATORS
from fedrpc.aggregation.aggregator import Aggregator, Update
from fedrpc.aggregation.mean import WeightedMean
from fedrpc.client.store import Transaction
from fedrpc.errors import ConfigError
from fedrpc.methods.cost import Cost, Shapes
from fedrpc.methods.phases import ClientId, Params, Phase, on
from fedrpc.methods.runtime import ClientContext, Env, Round
from fedrpc.privacy.mechanisms import Gaussian
from fedrpc.problem import Problem
from fedrpc.wire import stored
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part
from tests.fakes import InMemoryFederation, mlp, problem_of, run_in_memory


@contextlib.contextmanager
def registered(*aggregators: type[Aggregator[Any, Any]]) -> Iterator[None]:
    list(AGGREGATORS)
    for cls in aggregators:
        AGGREGATORS.register(cls.name)(cls)
    try:
        yield
    finally:
        for cls in aggregators:
            AGGREGATORS._items.pop(cls.name)


def problem_with(*aggregators: type[Aggregator[Any, Any]], method: str = "fedavg", **options: Any) -> Problem:
    own = [cls for cls in aggregators if cls.name not in AGGREGATORS]
    with registered(*own):
        return problem_of(method, aggregators=[cls.name for cls in aggregators], **({"build": mlp} | options))


class SumOverCount:
    """The mean of updates that count alike."""

    def __init__(self) -> None:
        self._mean = WeightedMean()

    def add(self, client: ClientId, tensors: Tensors, weight: float) -> None:
        self._mean.add(tensors, 1.0)

    def combine(self) -> Tensors:
        return self._mean.value


class Uniform(Aggregator[None]):
    """Every update counts alike."""

    name = "uniform"

    def combiner(self, state: Any) -> SumOverCount:
        return SumOverCount()


# Phases of its own: keys and shares before the fit


@dataclass(frozen=True)
class Request:
    """Down: send a key."""


@dataclass(frozen=True)
class Key:
    key: int = part(Kind.SCALARS)


@dataclass(frozen=True)
class Keys:
    keys: dict[int, int] = part(Kind.SCALARS)


KEYS = Phase("keys", Request, Key)
SHARES = Phase("shares", Keys, Request)


class Masked(Uniform):
    """Masks that cancel in the sum: the server sees no client's own update."""

    name = "masked"
    hides_updates = "the server sees sums alone"

    async def prepare(self, state: Any, rnd: Round) -> Any:
        keys = {reply.client: reply.body.key async for reply in rnd.ask(KEYS, Request())}
        async for _ in rnd.ask(SHARES, dict.fromkeys(keys, Keys(keys))):
            pass
        return state

    @on(KEYS)
    def send_key(self, ctx: ClientContext, msg: Request) -> Key:
        return Key(int(ctx.rng("key").integers(2**31)))

    @on(SHARES)
    def keep_keys(self, ctx: ClientContext, msg: Keys) -> Request:
        ctx.store.put("keys", msg)
        return Request()

    def transform(self, ctx: ClientContext, update: Update) -> Tensors:
        kept = ctx.store.get("keys", Keys)
        assert kept is not None, "shares come before the fit"
        masked = {name: tensor.clone() for name, tensor in update.tensors.items()}
        for peer, key in kept.keys.items():
            rng = np.random.default_rng(sorted((key, kept.keys[ctx.client])))
            for tensor in masked.values():
                mask = torch.from_numpy(rng.normal(size=tuple(tensor.shape))).float()
                tensor += mask * np.sign(peer - ctx.client)
        return masked

    def cost(self, shapes: Shapes) -> Cost:
        cost = Cost()
        for cohort in shapes.cohorts:
            cost.add("up", Kind.SCALARS, 8 * len(cohort)).add("down", Kind.SCALARS, 8 * len(cohort) ** 2)
        return cost


def test_an_aggregator_has_phases_of_its_own_before_the_fit_and_books_their_bytes():
    problem = problem_with(Masked, fraction=0.75)
    run = run_in_memory(problem, 2)
    for index, cohort in enumerate(run.cohorts):
        asked = [(phase, client) for at, phase, _, client in run.asked if at == index]
        assert asked == [(phase, client) for phase in ("keys", "shares", "fit") for client in cohort]
    assert run.measured() == run.predicted()
    plain = run_in_memory(problem_with(Uniform, fraction=0.75), 2)
    for name, value in plain.weights.items():
        torch.testing.assert_close(run.weights[name], value, atol=1e-5, rtol=1e-4)


def test_what_leaves_the_client_is_what_the_aggregator_made_of_it():
    async def first_update(problem: Problem) -> Tensor:
        with InMemoryFederation(problem) as federation:
            rnd, state = federation.stage(0), federation.init()
            for layer in problem.aggregators:
                await layer.prepare(None, rnd)
            answers = rnd._ask(problem.method.phases["fit"][0], state)
            first, *_ = [reply.body.weights["1.weight"].clone() async for reply in answers]
            return first

    masked, plain = (asyncio.run(first_update(problem_with(cls))) for cls in (Masked, Uniform))
    assert float((masked - plain).abs().mean()) > 0.5


def test_a_method_that_needs_each_update_is_refused_in_one_line():
    with pytest.raises(
        ConfigError,
        match=r"fedzdas needs each client's update \(the server inverts each client's model\), which 'masked' hides "
        r"\(the server sees sums alone\); choose another --method or aggregator",
    ):
        problem_with(Masked, method="fedzdas", build=None)


# All updates at once


class MedianOfUpdates:
    def __init__(self) -> None:
        self._seen: list[Tensors] = []

    def add(self, client: ClientId, tensors: Tensors, weight: float) -> None:
        self._seen.append({name: tensor.clone() for name, tensor in tensors.items()})

    def combine(self) -> Tensors:
        return {name: torch.stack([seen[name] for seen in self._seen]).median(dim=0).values for name in self._seen[0]}


class Median(Aggregator[None]):
    """The coordinate-wise median."""

    name = "median"

    def combiner(self, state: Any) -> MedianOfUpdates:
        return MedianOfUpdates()


def test_an_aggregator_can_see_all_updates_at_once():
    problem = problem_with(Median, clients=3)
    run = run_in_memory(problem, 1)
    with InMemoryFederation(problem) as federation:
        phase = problem.method.phases["fit"][0]

        async def updates() -> list[Tensors]:
            asked = federation.stage(0)._ask(phase, federation.init())
            return [{n: t.clone() for n, t in reply.body.weights.items()} async for reply in asked]

        seen = asyncio.run(updates())
    for name, value in run.weights.items():
        assert torch.equal(value, torch.stack([one[name] for one in seen]).sort(dim=0).values[1])


def test_two_combining_aggregators_are_refused():
    with pytest.raises(ConfigError, match=r"expected one aggregator that combines updates.*got uniform, median"):
        problem_with(Uniform, Median)


# Noise with a privacy row


class NoiseParams(Params):
    clip: float = 1.0
    std: float = 2.0


class Noisy(Aggregator[None, NoiseParams]):
    """Clips each client's move and adds Gaussian noise to it before it leaves."""

    name = "noisy"

    def transform(self, ctx: ClientContext, update: Update) -> Tensors:
        assert update.received is not None
        flat = torch.cat([(value - update.received[name]).flatten() for name, value in update.tensors.items()])
        flat = flat * min(1.0, self.params.clip / float(flat.norm()))
        covering = Gaussian(
            self.params.std, 2 * self.params.clip, covers="of the whole update", adjacency="replace-one"
        )
        noisy, out = ctx.release(update.field, flat, covering), {}
        for name, value in update.received.items():
            move, noisy = noisy[: value.numel()], noisy[value.numel() :]
            out[name] = value + move.view(value.shape)
        return out


def test_an_aggregator_adds_noise_and_writes_the_privacy_row_that_covers_it():
    problem = problem_with(Noisy, AGGREGATORS["mean"])
    run = run_in_memory(problem, 2)
    rows = [row for row in run.released if row["kind"] == "weights"]
    assert len(rows) == sum(map(len, run.cohorts))
    assert {(row["mechanism"], row["parameters"]["std"]) for row in rows} == {("gaussian", 2.0)}
    release = run.privacy()["releases"]["weights"]
    assert release["epsilon"] is not None
    assert run.sha256 != run_in_memory(problem_of("fedavg", build=mlp), 2).sha256


# Durable state on both sides


@dataclass(frozen=True)
class Count:
    count: int = part(Kind.SCALARS)


@dataclass(frozen=True)
class Residual:
    tensors: Tensors


class Rounding(Uniform):
    """Rounds each move coarsely, keeps the rest for the client's next update, and counts steps at the server."""

    name = "rounding"

    def init(self, env: Env) -> Count:
        return Count(0)

    def transform(self, ctx: ClientContext, update: Update) -> Tensors:
        assert update.received is not None
        kept, out, rest = ctx.store.get("rest", Residual), {}, {}
        for name, value in update.tensors.items():
            move = value - update.received[name] + (kept.tensors[name] if kept else 0)
            out[name] = update.received[name] + (move * 64).round() / 64
            rest[name] = move - (move * 64).round() / 64
        ctx.store.put("rest", Residual(rest))
        return out

    async def finish(
        self, state: Count, rnd: Round, aggregates: Mapping[str, Tensors], sent: Mapping[str, Tensors]
    ) -> tuple[Mapping[str, Tensors], Count]:
        return aggregates, replace(state, count=state.count + 1)


def test_an_aggregator_keeps_durable_state_on_both_sides():
    problem = problem_with(Rounding, fraction=0.5)
    with InMemoryFederation(problem) as federation:
        run = asyncio.run(federation.play(3))
        assert federation.aggregation["rounding"] == Count(3)
        for client in range(4):
            store = Transaction(federation.clients.store(client))
            took_part = any(client in cohort for cohort in run.cohorts)
            assert (store.get("aggregation/rounding/rest", Residual) is not None) == took_part
            assert store.get("rest", Residual) is None
    checkpointed = run_in_memory(problem, 3, between=lambda state: stored.loads(type(state), stored.dumps(state)))
    assert checkpointed.sha256 == run.sha256


def test_aggregators_come_by_entry_point_like_methods():
    assert AGGREGATORS.group == "fedrpc.aggregators"
    assert set(AGGREGATORS) >= {"mean", "sgdm", "adam", "yogi", "adagrad"}


def test_reading_single_updates_without_saying_why_is_a_mistake_that_is_named():
    problem = problem_of("fedavg")
    with InMemoryFederation(problem) as federation:
        rnd, phase = federation.stage(0), problem.method.phases["fit"][0]
        with pytest.raises(TypeError, match=r"FedAvg looks at single clients' updates in phase 'fit', whose weights"):
            rnd.ask(phase, federation.init())
