"""FLea against reference values, with invalid input and clients, and its bytes."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.mixup import EndlessOrder, mix, one_hot, soft_cross_entropy
from fedrpc.methods.fedavg import Global, Update
from fedrpc.methods.flea.messages import EXTRACT, FIT, ChosenExamples, Contribution, Correlation, Features, Start
from fedrpc.methods.flea.method import Flea
from fedrpc.methods.flea.objective import Objective, kl_divergence
from fedrpc.methods.phases import on
from fedrpc.methods.runtime import ClientContext
from fedrpc.metrics.exposure import exposure_matrix, list_movements
from fedrpc.metrics.features import dcor2
from fedrpc.models import Model, cut, load, read_tensors
from fedrpc.seeds import derive
from fedrpc.wire import stored
from tests.fakes import InMemoryFederation, Played, mlp, problem_of, run_in_memory, tiny
from tests.unit.wire.messages import same

CLASSES = 10


def build_plain() -> Model:
    """A network without BatchNorm, for what must hold exactly and for batches of one."""
    first = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 12), nn.Tanh())
    return Model([first, nn.Sequential(nn.Linear(12, 8), nn.Tanh())], nn.Linear(8, CLASSES))


def build_normalised() -> Model:
    """A network with BatchNorm on both sides of the first cut."""
    first = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 12), nn.BatchNorm1d(12), nn.ReLU())
    return Model([first, nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU())], nn.Linear(8, CLASSES))


def build_seeded(build: Any, seed: int) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def make_batch(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 28, 28, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


def make_buffer(size: int, seed: int = 1) -> Features:
    generator = torch.Generator().manual_seed(seed)
    return Features(torch.randn(size, 12, generator=generator), torch.randint(CLASSES, (size,), generator=generator))


class Constant(np.random.Generator):
    """Draws the same mix-up weight for ever."""

    def __init__(self, value: float) -> None:
        super().__init__(np.random.PCG64(0))
        self._value = value

    def beta(self, a: float, b: float, size: Any = None) -> Any:
        return np.full(size, self._value)


def build_objective(
    received: nn.Module | None = None, given: Features | None = None, weight: float | None = None, **params: Any
) -> Objective:
    rng = derive(0, "mixup") if weight is None else Constant(weight)
    chosen = Flea.Params(**params)
    return Objective(
        chosen,
        0,
        received,
        given,
        lambda2=chosen.compute_lambda2(0),
        order=derive(0, "buffer"),
        weights=rng,
    )


def take_from_buffer(given: Features, size: int) -> tuple[Tensor, Tensor]:
    """What `objective` meets first in the buffer."""
    index = torch.from_numpy(EndlessOrder(derive(0, "buffer"), len(given.labels)).take(size))
    return given.activations[index], given.labels[index]


def play(rounds: int = 3, *, build: Any = tiny, **values: Any) -> Played:
    """A run of FLea; the same run is played once for all tests."""
    return _play("flea", rounds, build, json.dumps(values, sort_keys=True))


def play_fedavg(rounds: int = 3) -> Played:
    return _play("fedavg", rounds, tiny, "{}")


@functools.cache
def _play(method: str, rounds: int, build: Any, values: str) -> Played:
    return run_in_memory(problem_of(method, build=build, **json.loads(values)), rounds)


def list_rows(features: Features) -> set[tuple[Any, ...]]:
    return {(*row, label) for row, label in zip(features.activations.tolist(), features.labels.tolist(), strict=True)}


class TestMixup:
    def test_weight_one_is_exactly_ours_and_zero_exactly_theirs(self) -> None:
        ours, theirs = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
        weight = torch.tensor([1.0, 0.0, 1.0, 0.0])
        mixed = mix(ours, theirs, weight)
        assert torch.equal(mixed[::2], ours[::2])
        assert torch.equal(mixed[1::2], theirs[1::2])

    def test_value_computed_by_hand_with_one_weight_for_all(self) -> None:
        ours, theirs = torch.tensor([[1.0], [2.0]]), torch.tensor([[5.0], [10.0]])
        assert mix(ours, theirs, torch.tensor([0.25, 0.5])).flatten().tolist() == [4.0, 6.0]
        assert mix(ours, theirs, torch.tensor(0.5)).flatten().tolist() == [3.0, 6.0]

    def test_mixed_labels_sum_to_one(self) -> None:
        rng = derive(3, "labels")
        y, z = (torch.from_numpy(rng.integers(CLASSES, size=200)) for _ in range(2))
        weight = torch.from_numpy(rng.beta(2, 2, 200))
        rows = mix(one_hot(y, CLASSES), one_hot(z, CLASSES), weight).sum(dim=1)
        assert torch.allclose(rows, torch.ones(200), atol=1e-6)

    def test_the_result_has_the_dtype_of_ours(self) -> None:
        assert mix(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.float16), torch.ones(2)).dtype == torch.float32

    def test_soft_cross_entropy_of_hard_labels(self) -> None:
        logits, y = torch.randn(6, CLASSES), torch.arange(6)
        found = soft_cross_entropy(F.log_softmax(logits, dim=1), one_hot(y, CLASSES))
        assert found.item() == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-6)

    def test_the_order_consists_of_whole_passes(self) -> None:
        order = EndlessOrder(derive(0, "x"), 7)
        taken = np.concatenate([order.take(n) for n in (5, 5, 4, 14)])
        assert [sorted(taken[i : i + 7]) for i in range(0, 28, 7)] == [list(range(7))] * 4

    def test_a_set_smaller_than_a_batch_repeats(self) -> None:
        assert sorted(EndlessOrder(derive(0, "x"), 2).take(5))[:2] == [0, 0]
        with pytest.raises(ValueError, match="empty"):
            EndlessOrder(derive(0, "x"), 0)


class TestObjective:
    def test_weight_one_uses_only_local_activations(self) -> None:
        model, (x, y) = build_seeded(build_plain, 0), make_batch(6)
        loss = build_objective(given=make_buffer(9), weight=1.0, lambda1=0, lambda2=0)(model, x, y)
        assert loss.item() == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)

    def test_weight_zero_uses_only_the_buffer(self) -> None:
        model, (x, y), given = build_seeded(build_plain, 0), make_batch(6), make_buffer(9)
        loss = build_objective(given=given, weight=0.0, lambda1=0, lambda2=0)(model, x, y)
        loss.backward()
        theirs, labels = take_from_buffer(given, 6)
        assert loss.item() == pytest.approx(F.cross_entropy(cut(model, 0)[1](theirs), labels).item(), rel=1e-6)
        assert not any(p.grad.any() for p in model.stages[0].parameters() if p.grad is not None)

    def test_divergence_is_from_global_to_local(self) -> None:
        p, g = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]])
        expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
        assert kl_divergence(p.log(), g.log()).item() == pytest.approx(expected, rel=1e-6)
        assert kl_divergence(g.log(), p.log()).item() != pytest.approx(expected, rel=1e-3)

    def test_distillation_from_the_same_model_is_zero(self) -> None:
        model, received, (x, y), given = (
            build_seeded(build_plain, 0),
            build_seeded(build_plain, 0),
            make_batch(6),
            make_buffer(9),
        )
        without = build_objective(given=given, lambda1=0, lambda2=0)(model, x, y)
        expected = torch.autograd.grad(without, list(model.parameters()))
        with_it = build_objective(received, given, lambda1=5, lambda2=0)(model, x, y)
        found = torch.autograd.grad(with_it, list(model.parameters()))
        assert with_it.item() == pytest.approx(without.item(), abs=1e-6)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-6)

    @pytest.mark.parametrize("size", [9, None])
    def test_the_loss_has_three_terms(self, size: int | None) -> None:
        model, received, (x, y) = build_seeded(build_plain, 0), build_seeded(build_plain, 1), make_batch(6)
        given = make_buffer(size) if size else None
        head, tail = cut(model, 0)
        own = head(x)
        mixed, wanted = own, one_hot(y, CLASSES)
        if given is not None:
            theirs, labels = take_from_buffer(given, 6)
            weight = torch.from_numpy(derive(0, "mixup").beta(2, 2, 6))
            assert len(weight.unique()) == 6  # each pair has its own
            mixed, wanted = (mix(a, b, weight) for a, b in ((own, theirs), (wanted, one_hot(labels, CLASSES))))
        p, g = tail(mixed).softmax(1), cut(received, 0)[1](mixed).softmax(1)
        clf = -(wanted * p.log()).sum(1).mean()
        dis = (p * (p / g).log()).sum(1).mean()
        expected = clf + 1.5 * dis + 2.5 * dcor2(x, own)
        assert dis > 1e-3
        found = build_objective(received, given, lambda1=1.5, lambda2=2.5)(model, x, y)
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)

    def test_decorrelation_trains_only_the_layers_before_the_cut(self) -> None:
        model, (x, y) = build_seeded(build_plain, 0), make_batch(6)
        plainly, full = (build_objective(lambda1=0, lambda2=v)(model, x, y) for v in (0.0, 3.0))
        (full - plainly).backward()
        assert max(p.grad.abs().max().item() for p in model.stages[0].parameters()) > 1e-5
        others = [*model.stages[1].parameters(), *model.classifier.parameters()]
        assert all(p.grad.abs().max().item() < 1e-6 for p in others)

    def test_the_root_of_the_correlation_is_the_authors_form(self) -> None:
        model, (x, y) = build_seeded(build_plain, 0), make_batch(6)
        squared, root, none = (
            build_objective(lambda1=0, lambda2=weight, decorrelation=form)(model, x, y)
            for weight, form in ((1.0, "dcor2"), (1.0, "dcor"), (0.0, "dcor2"))
        )
        assert (root - none).item() == pytest.approx(math.sqrt((squared - none).item()), rel=1e-4)

    def test_the_root_has_no_infinite_gradient_where_nothing_correlates(self) -> None:
        model, (x, y) = build_seeded(build_plain, 0), make_batch(6)
        loss = build_objective(lambda1=0, decorrelation="dcor")(model, x[:1], y[:1])
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)

    def test_the_weight_of_decorrelation_falls_as_in_the_authors_code(self) -> None:
        annealed = Flea.Params(lambda2_decay=0.1)
        assert [annealed.compute_lambda2(t) for t in (0, 1, 19, 20, 99)] == pytest.approx([3, 2.9, 1.1, 1, 1])
        assert {Flea.Params().compute_lambda2(t) for t in (0, 50)} == {3.0}
        assert {Flea.Params(lambda2=0, lambda2_decay=0.1).compute_lambda2(t) for t in (0, 50)} == {0.0}

    def test_a_round_uses_its_own_weight(self) -> None:
        constant, falling = play(2), play(2, params={"lambda2_decay": 1.0})
        assert same(constant.states[1].weights, falling.states[1].weights)
        assert not same(constant.states[2].weights, falling.states[2].weights)

    def test_a_batch_passes_each_layer_once_and_the_received_network_does_not_change(self) -> None:
        model, received = build_seeded(build_normalised, 0), build_seeded(build_normalised, 0)
        before = read_tensors(received)
        loss = build_objective(received, make_buffer(3))
        model.train()
        for seed in range(4):
            loss(model, *make_batch(6, seed)).backward()
        assert all(torch.equal(before[name], value) for name, value in read_tensors(received).items())
        counters = [value.item() for name, value in read_tensors(model).items() if name.endswith("num_batches_tracked")]
        assert counters == [4, 4]
        assert all(p.grad is None for p in received.parameters())

    def test_batch_of_one(self) -> None:
        model, (x, y) = build_seeded(build_plain, 0), make_batch(1)
        loss = build_objective(build_seeded(build_plain, 1), make_buffer(1))(model, x, y)
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


class TestRounds:
    def test_buffer_is_the_last_cohorts_activations_under_the_new_model(self) -> None:
        problem = problem_of("flea", clients=6, fraction=0.5, train_size=120, params={"alpha": 0.2})
        with InMemoryFederation(problem) as federation:
            played = asyncio.run(federation.play(2))
            chosen = {k: federation.clients.store(k).read_value("chosen") for k in range(6)}
        for cohort, state in zip(played.cohorts, played.states[1:], strict=True):
            model = problem.copy_network().eval()
            load(model, state.weights)
            expected: set[tuple[Any, ...]] = set()
            for k in cohort:
                data = problem.load_client_data(k).train
                positions = stored.loads(ChosenExamples, chosen[k]).positions.numpy()
                assert len(set(positions)) == len(positions)  # without replacement
                x, y = data.batch(positions)
                with torch.no_grad():
                    activations = cut(model, 0)[0](x)
                count = len(data) // 5
                expected |= list_rows(Features(activations[:count], y[:count]))
            assert list_rows(state.buffer) == expected
            assert len(state.buffer.labels) == sum(len(problem.load_client_data(k).train) // 5 for k in cohort)

    def test_a_client_always_shares_the_same_examples(self, tmp_path: Path) -> None:
        kept: dict[int, set[bytes]] = {}
        for _ in range(2):  # the second time is after a restart
            with InMemoryFederation(problem_of("flea"), tmp_path) as federation:
                state = federation.init()
                for index in range(2):
                    state = asyncio.run(federation.problem.method.round(state, federation.stage(index)))
                    for k in range(4):
                        kept.setdefault(k, set()).add(federation.clients.store(k).read_value("chosen") or b"")
                    federation.reach_durable_point()
        assert all(len(blobs) == 1 for blobs in kept.values())

    def test_the_model_depends_on_the_seed_and_survives_checkpoints(self) -> None:
        def reload(state: Any) -> Any:
            return stored.loads(type(state), stored.dumps(state))

        first, again = play(), run_in_memory(problem_of("flea"), 3, between=reload)
        assert first.sha256 == again.sha256
        assert torch.equal(first.state.buffer.activations, again.state.buffer.activations)
        assert first.sha256 != play(seed=8).sha256

    def test_without_sharing_and_extra_losses_it_is_fedavg(self) -> None:
        bare = play(params={"alpha": 0, "lambda1": 0, "lambda2": 0})
        assert bare.sha256 == play_fedavg().sha256
        assert bare.measured() == play_fedavg().measured() == bare.predicted()

    def test_first_round_without_extra_losses_is_fedavg(self) -> None:
        flea, fedavg = play(params={"lambda1": 0, "lambda2": 0}), play_fedavg()
        for name, value in fedavg.states[1].weights.items():
            assert torch.equal(flea.states[1].weights[name], value)
        assert flea.sha256 != fedavg.sha256  # from then on there is a buffer

    def test_records(self) -> None:
        played = play(2, clients=3, train_size=90, params={"measure": 8})
        for record, state in zip(played.records, played.states[1:], strict=True):
            assert record["buffer_size"] == len(state.buffer.labels)
            assert record["buffer_bytes"] == state.buffer.activations.nbytes + state.buffer.labels.nbytes
            assert 0 < record["dcor2"] <= record["dcor"] <= 1
            assert 0 < record["dcor2_null"] < record["dcor2"]
            assert len(record["local_losses"]) == 3
        assert play(2, params={"transport": "bfloat16", "measure": 0}).records[0]["dcor2"] is None

    def test_decorrelation_lowers_the_correlation(self) -> None:
        values: dict[str, Any] = {"clients": 1, "train_size": 80, "train": {"epochs": 8, "lr": 0.1}}
        last = [play(2, params={"lambda2": v}, **values).records[-1]["dcor2"] for v in (0.0, 6.0)]
        assert last[1] < last[0] - 0.05

    def test_exposure_from_the_ledger(self) -> None:
        played = play(4, clients=6, fraction=0.5, train_size=120)
        rows = [vars(key) | vars(sums) for key, sums in played.rows.items()]
        expected = np.zeros((6, 6), dtype=bool)
        for sources, targets in zip(played.cohorts, played.cohorts[1:], strict=False):
            expected[np.ix_(sources, targets)] = True
        assert (exposure_matrix(list_movements(rows, {"activations"}), 6) == expected).all()


class TestBytes:
    @pytest.mark.parametrize(
        "values",
        [
            {},
            {"fraction": 0.5},
            {"params": {"alpha": 0.29, "split_layer": 1}},
            {"params": {"transport": "float16"}},
            {"params": {"transport": "bfloat16", "measure": 0}},
            {"params": {"alpha": 0}},
            {
                "partition": "dirichlet:0.3,min_size=1",
                "clients": 6,
                "params": {"measure": 6},
            },  # some clients share nothing
            {"local_test": 0.2, "train": {"epochs": 2}},
        ],
    )
    def test_measured_bytes_equal_the_formula(self, values: dict[str, Any]) -> None:
        played = play(2, **values)
        assert played.measured() == played.predicted()

    def test_some_clients_share_nothing(self) -> None:
        problem = problem_of("flea", partition="dirichlet:0.3,min_size=1", clients=6)
        sizes = [len(problem.load_client_data(k).train) for k in range(6)]
        assert min(sizes) < 8 < 10 < max(sizes)

    def test_the_formula_gives_the_papers_bytes(self) -> None:
        played = play(clients=3, params={"measure": 0})
        sizes = [len(played.problem.load_client_data(k).train) // 10 for k in range(3)]
        weights = sum(t.nbytes for t in played.weights.values())
        each = 4 * 12 + 8
        assert played.measured() == {
            "down": {"weights": 3 * 3 * 2 * weights, "activations": 2 * 3 * sum(sizes) * each},
            "up": {"weights": 3 * 3 * weights, "activations": 3 * sum(sizes) * each, "scalars": 3 * 3 * 8 * 2},
        }

    def test_activations_travel_in_the_transport_dtype(self) -> None:
        played = play(2, params={"transport": "bfloat16", "measure": 0})
        assert played.state.buffer.activations.dtype == torch.bfloat16
        assert played.records[0]["transport"] == "bfloat16"

    def test_values_out_of_range_of_float16_stay_finite(self) -> None:
        class Loud(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return 1e6 * x.flatten(1)

        def build() -> Model:
            return Model([Loud(), nn.Sequential(nn.LayerNorm(784), nn.Linear(784, 4))], nn.Linear(4, CLASSES))

        played = play(2, build=build, params={"transport": "float16"})
        assert played.state.buffer.activations.abs().max() == torch.finfo(torch.float16).max
        assert all(torch.isfinite(t).all() for t in played.weights.values())


class TestBadInput:
    def test_a_network_that_cannot_be_cut_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"needs a model with stages.*choose another --model"):
            problem_of("flea", build=mlp)

    def test_a_cut_that_does_not_exist_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="legal cuts are 0 to 1"):
            problem_of("flea", params={"split_layer": 2})

    @pytest.mark.parametrize(
        ("name", "value"),
        [("alpha", -0.1), ("alpha", 1.5), ("a", 0), ("lambda1", -1), ("transport", "int8"), ("max_buffer", 0)],
    )
    def test_parameters_out_of_range_are_refused(self, name: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=name):
            problem_of("flea", params={name: value})

    def test_an_alpha_that_shares_nothing_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"params\.alpha = 0\.01 gives no activation") as caught:
            problem_of("flea", params={"alpha": 0.01})
        remedy = float(re.search(r"set it to ([\d.]+) or more", str(caught.value)).group(1))
        assert play(1, params={"alpha": remedy}).records[0]["buffer_size"] >= 1

    def test_a_buffer_that_is_too_large_is_refused(self) -> None:
        # Two of four clients a round: the two largest ones decide, before anybody joins or any memory goes.
        values = {"fraction": 0.5, "partition": "iid", "train_size": 60}
        needed = 2 * 7 * 56
        assert problem_of("flea", params={"max_buffer": needed, "alpha": 0.5}, **values)
        with pytest.raises(
            ConfigError, match=rf"up to 14 activations of 56 bytes takes {needed} bytes but params\.max_buffer is 783"
        ):
            problem_of("flea", params={"max_buffer": needed - 1, "alpha": 0.5}, **values)

    def test_a_client_cannot_claim_more_examples_than_it_has(self) -> None:
        class Boaster(Flea):
            name = "boaster"

            @on(FIT)
            def fit(self, ctx: Any, msg: Start) -> Update:
                answer = super().fit(ctx, msg)
                return dataclasses.replace(answer, num_examples=10**15) if ctx.client == 0 else answer

        played = run_in_memory(problem_of(Boaster, partition="iid", train_size=60, params={"alpha": 0.2}), 1)
        assert played.records[0]["buffer_size"] == 3 * 3  # it is missing, and no memory for a petabyte was asked for

    @pytest.mark.parametrize("size", [1, 8])
    def test_clients_with_one_example(self, size: int) -> None:
        played = play(
            2,
            build=build_plain,
            clients=5,
            partition="iid",
            train_size=6,
            train={"batch_size": size},
            params={"alpha": 1.0},
        )
        assert min(len(played.problem.load_client_data(k).train) for k in range(5)) == 1
        assert all(torch.isfinite(t).all() for t in played.weights.values())
        assert played.measured() == played.predicted()

    def test_buffer_smaller_than_a_batch(self) -> None:
        played = play(3, clients=2, fraction=0.5, train_size=60, train={"batch_size": 32}, params={"alpha": 0.04})
        assert all(0 < record["buffer_size"] < 3 for record in played.records)

    def test_it_declares_what_it_shares_and_refuses_dp_sgd(self) -> None:
        assert Flea.shares == "activations with labels"
        assert not Flea.dp_sgd.is_allowed


def spoil(shared: Contribution, how: str) -> Contribution:
    features = shared.features
    assert features is not None
    activations, labels = features.activations, features.labels
    changed = {
        "label": Features(activations, labels + CLASSES),
        "negative": Features(activations, labels - CLASSES),
        "shape": Features(activations[:, :-1], labels),
        "dtype": Features(activations.double(), labels),
        "label dtype": Features(activations, labels.int()),
        "rows": Features(activations, labels[:-1]),
        "nan": Features(activations * math.nan, labels),
        "more": Features(activations.repeat(3, 1), labels.repeat(3)),
        "fewer": None,
    }
    if how == "measured":
        return dataclasses.replace(shared, measured=Correlation(math.nan, 0.5))
    return dataclasses.replace(shared, features=changed[how])


class TestBadClients:
    HOW = ("label", "negative", "shape", "dtype", "label dtype", "rows", "nan", "more", "fewer", "measured")

    @pytest.mark.parametrize("how", HOW)
    def test_an_invalid_answer_affects_no_other_client(self, how: str) -> None:
        class Liar(Flea):
            name = "flea-liar"

            @on(EXTRACT)
            def extract(self, ctx: ClientContext, msg: Global) -> Contribution:
                shared = Flea.extract(self, ctx, msg)
                return spoil(shared, how) if ctx.client == 1 else shared

        values: dict[str, Any] = {"clients": 3, "partition": "iid", "train_size": 60}
        played = run_in_memory(problem_of(Liar, **values), 1)
        assert played.records[0]["buffer_size"] == 4  # two of each of the other two
        assert list_rows(played.state.buffer) < list_rows(play(1, **values).state.buffer)
        assert ("refused" in played.records[0]) == (how in ("more", "fewer"))
        assert all(torch.isfinite(t).all() for t in played.weights.values())

    def test_a_client_that_does_not_extract_is_not_in_the_buffer(self) -> None:
        problem = problem_of("flea", clients=3, partition="iid", train_size=60)
        played = run_in_memory(problem, 2, absent=lambda _, phase, __, k: phase == "extract" and k == 0)
        assert [record["buffer_size"] for record in played.records] == [4, 4]

    def test_a_client_that_did_not_train_is_not_asked_to_extract(self) -> None:
        problem = problem_of("flea", clients=3, partition="iid", train_size=60)
        played = run_in_memory(problem, 2, absent=lambda _, phase, __, k: phase == "fit" and k == 0)
        assert not [asked for asked in played.asked if asked[3] == 0]


def build_wide() -> nn.Module:
    """A network with as many features as HARNet."""
    return Model([nn.Sequential(nn.Flatten(), nn.Linear(784, 8448))], nn.Linear(8448, 10))


@pytest.mark.parametrize(
    ("train", "advised"),
    [({"lr": 0.02}, True), ({"lr": 0.002}, False), ({"lr": 0.02, "optimizer": "adam"}, False)],
)
def test_a_rate_that_is_too_fast_for_many_features_is_told(train: Any, advised: bool) -> None:
    problem = problem_of("flea", build=build_wide, train=train)
    said = Flea().advise(problem.env)
    assert ("8448 features" in said and "train.lr=0.001 as in the paper, or train.lr=0.003" in said) is advised
    assert Flea().advise(problem_of("flea", train=train).env) == ""
