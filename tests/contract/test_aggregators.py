"""What the seam of aggregation must carry, shown on toys: phases of its own, all updates at once, noise, state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedrpc.aggregation import AGGREGATORS
from fedrpc.aggregation.aggregator import Aggregator, Update, register_aggregator
from fedrpc.aggregation.mean import WeightedMean
from fedrpc.client.store import Transaction
from fedrpc.errors import ConfigError
from fedrpc.methods.cost import Cost, Shapes
from fedrpc.methods.fedavg import FIT, FedAvg, Global
from fedrpc.methods.fedavg import Update as FedAvgUpdate
from fedrpc.methods.phases import ClientId, Params, Phase, on
from fedrpc.methods.runtime import ClientContext, Env, Round
from fedrpc.privacy.mechanisms import Gaussian, Histories
from fedrpc.problem import Problem
from fedrpc.server.selection import SELECTIONS, select_cohort
from fedrpc.study.audit import audit_run
from fedrpc.wire import stored
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part
from tests.fakes import InMemoryFederation, mlp, problem_of, run_in_memory
from tests.finished import forge, write_accounts


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

    def add(self, tensors: Tensors, weight: float, client: ClientId) -> None:
        self._mean.add(tensors, 1.0)

    def combine(self) -> Tensors:
        return self._mean.combine()


class Uniform(Aggregator[None]):
    """Every update counts alike."""

    name = "uniform"
    combines = True

    def make_combiner(self, state: Any) -> SumOverCount:
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

    async def prepare(self, state: Any, rnd: Round, phase: Phase[Any, Any], clients: Sequence[ClientId]) -> Any:
        keys = {reply.client: reply.body.key async for reply in rnd.ask(KEYS, dict.fromkeys(clients, Request()))}
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
                await layer.prepare(None, rnd, problem.method.phases["fit"][0], rnd.cohort)
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

    def add(self, tensors: Tensors, weight: float, client: ClientId) -> None:
        self._seen.append({name: tensor.clone() for name, tensor in tensors.items()})

    def combine(self) -> Tensors:
        return {name: torch.stack([seen[name] for seen in self._seen]).median(dim=0).values for name in self._seen[0]}


class Median(Aggregator[None]):
    """The coordinate-wise median."""

    name = "median"
    combines = True

    def make_combiner(self, state: Any) -> MedianOfUpdates:
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
    releases_updates = True

    def build_mechanism(self) -> Gaussian:
        return Gaussian(self.params.std, 2 * self.params.clip, covers="of the whole update", adjacency="replace-one")

    def expect_cost(self, env: Env) -> Histories:
        return self.build_mechanism().guarantee.histories

    def transform(self, ctx: ClientContext, update: Update) -> Tensors:
        assert update.received is not None
        flat = torch.cat([(value - update.received[name]).flatten() for name, value in update.tensors.items()])
        flat = flat * min(1.0, self.params.clip / float(flat.norm()))
        noisy, out = ctx.release(update.field, flat, self.build_mechanism()), {}
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


def test_an_audit_knows_what_an_aggregator_releases(tmp_path: Path):
    played = run_in_memory(problem_with(Noisy, AGGREGATORS["mean"], rounds=2), 2)
    with registered(Noisy):
        write_accounts(tmp_path, played)
        assert audit_run(tmp_path).faults == []
        forge(tmp_path, lambda row: row | {"history": [[5.0, 1.0, 1]]} if row["history"] else row)
        faults = audit_run(tmp_path).faults
    assert any("claims noise 5 at rate 1 for 1 steps; config.toml and" in fault for fault in faults), faults


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


# Mistakes


@dataclass(frozen=True)
class Inner:
    weights: Tensors = part(Kind.WEIGHTS, averaged_by="count")
    count: int = part(Kind.SCALARS)


@dataclass(frozen=True)
class Outer:
    inner: Inner


LOOSE = Phase("fit", Global, FedAvgUpdate)  # without `same`


def test_an_answer_that_cannot_be_averaged_counts_as_missing():
    class Careless(FedAvg):
        name = "careless"

        @on(LOOSE)
        def fit(self, ctx: ClientContext, msg: Any) -> Any:
            update = super().fit(ctx, msg)
            return replace(update, weights={"other": torch.zeros(2)}) if ctx.client == 2 else update

        async def round(self, state: Any, rnd: Round) -> Any:
            fit = await rnd.mean(LOOSE, state)
            rnd.record(clients=fit.clients)
            return state

    run = run_in_memory(problem_of(Careless), 1)
    assert run.records[0]["clients"] == [0, 1, 3]


@pytest.mark.parametrize("other", [{"w": torch.zeros(3, 2)}, {"w": torch.zeros(1)}, {"v": torch.zeros(2, 3)}, {}])
def test_a_mean_refuses_models_with_other_tensors(other):
    mean = WeightedMean()
    mean.add({"w": torch.zeros(2, 3)}, 1.0)
    with pytest.raises(ValueError, match=r"must have the same tensors: '[wv]' differs"):
        mean.add(other, 1.0)


def test_a_server_optimizer_takes_equal_models_for_the_same_start():
    """As when a method copies its weights into a message for each client."""

    class Copying(FedAvg):
        name = "copying"

        async def round(self, state: Any, rnd: Round) -> Any:
            fit = await rnd.mean(FIT, {client: Global(dict(state.weights)) for client in rnd.cohort})
            return Global(fit.weights)

    for optimizer in ("none", "adam"):
        copied, shared = (run_in_memory(problem_of(m, server_optimizer=optimizer), 2) for m in (Copying, "fedavg"))
        assert copied.sha256 == shared.sha256


def test_a_layer_with_noise_of_its_own_is_refused_with_dp_sgd():
    with pytest.raises(ConfigError, match="aggregator 'noisy' releases updates itself, as does DP-SGD"):
        problem_with(Noisy, AGGREGATORS["mean"], privacy={"dp_sgd": {"noise_multiplier": 1.0}})


def test_layers_have_random_streams_of_their_own():
    draws: list[tuple[str, float, float]] = []

    class First(Uniform):
        name = "first"
        combines = False

        def transform(self, ctx: ClientContext, update: Update) -> Tensors:
            noise = float(torch.rand(1, generator=ctx.noise("mask")))
            draws.append((self.name, float(ctx.rng("mask").random()), noise))
            return update.tensors

    class Second(First):
        name = "second"

    run_in_memory(problem_with(First, Second, AGGREGATORS["mean"], clients=1), 1)
    (_, one_rng, one_noise), (_, two_rng, two_noise) = draws
    assert one_rng != two_rng
    assert one_noise != two_noise


def test_a_state_that_changes_its_type_is_a_mistake_that_is_named():
    class Forgetful(Uniform):
        name = "forgetful"

        async def finish(self, state: Any, rnd: Round, aggregates: Any, sent: Any) -> Any:
            return aggregates, Count(1)

    with pytest.raises(TypeError, match="the state of aggregator 'forgetful' was NoneType, got Count"):
        run_in_memory(problem_with(Forgetful), 1)


def test_an_aggregate_of_another_dtype_names_the_aggregator():
    class Wide(Uniform):
        name = "wide"

        def make_combiner(self, state: Any) -> Any:
            mean = SumOverCount()
            combine = mean.combine
            mean.combine = lambda: {name: tensor.double() for name, tensor in combine().items()}
            return mean

    with pytest.raises(TypeError, match="aggregator 'wide' gave 'weights' other names, shapes or dtypes"):
        run_in_memory(problem_with(Wide), 1)


def test_parameters_in_the_place_of_the_state_are_a_mistake_that_is_named():
    with pytest.raises(TypeError, match=r"expected Aggregator\[State, NoiseParams\], got the parameters first"):

        class Swapped(Aggregator[NoiseParams]):
            name = "swapped"


def test_names_and_nested_fields_are_checked():
    with pytest.raises(TypeError, match="lower-case letters, digits and '-', got 'a/b'"):
        register_aggregator(type("Slashed", (Uniform,), {"name": "a/b"}))

    with pytest.raises(TypeError, match=r"inner: a nested message cannot have averaged fields"):
        Phase("nested", Request, Outer)


def test_tied_parameters_are_stepped_under_both_names():
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(784, 10), torch.nn.Linear(784, 10)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(x.flatten(1)) + self.first(x.flatten(1))

    run = run_in_memory(problem_of("fedavg", build=Tied, server_optimizer="adam"), 2)
    assert torch.equal(run.weights["first.weight"], run.weights["second.weight"])


@pytest.mark.parametrize(
    ("chosen", "match"),
    [([1, 1], "distinct"), ([], "distinct"), ([7], "0 to 3"), (np.array([2, 0]), None)],
    ids=["twice", "nobody", "unknown", "numpy"],
)
def test_a_selection_is_checked(chosen, match):
    SELECTIONS.register("odd")(lambda rng, index, env: chosen)
    try:
        problem = problem_of("fedavg", selection="odd")
        if match is None:
            assert select_cohort(problem.config, problem.env, 0) == [0, 2]
        else:
            with pytest.raises(ConfigError, match=match):
                select_cohort(problem.config, problem.env, 0)
    finally:
        SELECTIONS._items.pop("odd")
