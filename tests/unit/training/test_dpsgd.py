"""DP-SGD: what it reduces to, whose accounts it keeps, what it refuses, and that every step is charged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from torch import Tensor, nn

from fedrpc.config import PrivacyConfig, TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.errors import Abstained, ConfigError
from fedrpc.methods.blocks.updates import release_update
from fedrpc.methods.fedavg import FIT, FedAvg, Global, Update
from fedrpc.methods.method import allowed
from fedrpc.methods.phases import on
from fedrpc.models import build, load, read_tensors
from fedrpc.privacy.accountant import compute_epsilon
from fedrpc.privacy.mechanisms import ZERO_OUT, Coverage, History, Trainings, public
from fedrpc.seeds import derive, make_torch_generator
from fedrpc.training.dpsgd import DpSgd, prepare_network
from fedrpc.training.loop import TrainReport, build_optimizer
from fedrpc.training.losses import cross_entropy
from tests.fakes import problem_of, run_in_memory

CPU = torch.device("cpu")


def make_examples(size: int = 40, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    return Examples.of(torch.randn(size, 5, generator=generator), torch.randint(3, (size,), generator=generator))


def build_network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def build_trainer(privacy: PrivacyConfig, seed: int = 0, num_rounds: int = 1, afford: Any = lambda *_: None) -> DpSgd:
    streams = {name: make_torch_generator(derive(seed, name)) for name in ("noise", "sampling")}
    return DpSgd(privacy, Trainings(), num_rounds=num_rounds, afford=afford, **streams)


def train_private(
    model: nn.Module,
    data: Examples,
    *,
    dp: dict[str, float],
    loss: Any = cross_entropy,
    afford: Any = None,
    **options: Any,
) -> TrainReport:
    privacy = PrivacyConfig(dp_sgd=dp)
    trainer = build_trainer(privacy, num_rounds=4, afford=afford or (lambda *_: None))
    config = TrainConfig(epochs=2, batch_size=10, lr=0.1, **options)
    return trainer(model, loss, data, config, lr=0.1, order=derive(0, "order"), device=CPU)


def test_without_noise_and_with_a_huge_bound_it_is_sgd_on_the_sampled_batches() -> None:
    private, plain = build_network(), build_network()
    batches: list[tuple[Tensor, Tensor]] = []

    def keep_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        batches.append((x, y))
        return cross_entropy(model, x, y)

    report = train_private(
        private, make_examples(), dp={"noise_multiplier": 0.0, "max_grad_norm": 1e6}, loss=keep_batch
    )
    optimizer = build_optimizer(TrainConfig(lr=0.1), plain, 0.1)
    assert len({len(y) for _, y in batches}) > 1  # Poisson sampling: no two alike
    for x, y in batches:
        optimizer.zero_grad()
        (F.cross_entropy(plain(x), y, reduction="sum") / 10).backward()  # over the expected size, not the drawn one
        optimizer.step()
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(private.parameters(), plain.parameters(), strict=True))
    assert report.num_steps == 8
    assert not hasattr(next(private.parameters()), "grad_sample") or next(private.parameters()).grad_sample is None


def test_no_example_moves_a_step_by_more_than_the_bound() -> None:
    """With one example that shouts, a step of rate 1 is at most the bound over the expected batch."""
    x, y = torch.randn(1, 5) * 1e4, torch.zeros(1, dtype=torch.int64)
    model, before = build_network(), build_network()
    config = TrainConfig(epochs=1, batch_size=1, lr=1.0)
    privacy = PrivacyConfig(dp_sgd={"noise_multiplier": 0.0, "max_grad_norm": 0.3})
    trainer = build_trainer(privacy)
    trainer(model, cross_entropy, Examples.of(x, y), config, lr=1.0, order=derive(0, "order"), device=CPU)
    moved = torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), before.parameters(), strict=True)])
    assert float(moved.detach().norm()) == pytest.approx(0.3, rel=1e-4)


def test_every_step_is_charged_as_opacus_would() -> None:
    report = train_private(build_network(), make_examples(), dp={"noise_multiplier": 1.2})
    assert report.covered is not None
    assert report.covered.guarantee.history == ((1.2, 0.25, 8),)
    assert report.covered.guarantee.adjacency == "zero-out, sizes public"
    assert all(math.isnan(loss) for loss in report.epoch_losses)
    assert report.described is not None
    assert report.described.guarantee.coverage is Coverage.PUBLIC


def test_empty_batches_are_noise_alone_and_charged() -> None:
    """Two examples at a rate of a half: about every fourth batch is empty."""
    data, seen = make_examples(2), []

    def count_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(len(y))
        return cross_entropy(model, x, y)

    model, before = build_network(), build_network()
    privacy = PrivacyConfig(dp_sgd={"noise_multiplier": 1.0})
    trainer = build_trainer(privacy, seed=3)
    config = TrainConfig(epochs=20, batch_size=1, lr=0.01)
    report = trainer(model, count_batch, data, config, lr=0.01, order=derive(3, "order"), device=CPU)
    assert len(seen) < 40  # some were empty, and the loss was never asked about them
    assert report.covered.guarantee.history == ((1.0, 0.5, 40),)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_the_same_seed_gives_the_same_noise() -> None:
    one, two = build_network(), build_network()
    for model in (one, two):
        train_private(model, make_examples(), dp={"noise_multiplier": 1.0})
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_a_target_epsilon_is_kept_by_a_client_in_every_round() -> None:
    report = train_private(build_network(), make_examples(), dp={"target_epsilon": 3.0})
    ((noise, rate, steps),) = report.covered.guarantee.history
    accountant = RDPAccountant()
    accountant.history = [(noise, rate, steps * 4)]
    assert 2.9 < accountant.get_epsilon(1e-5) <= 3.0


def test_training_over_the_budget_is_not_started() -> None:
    asked: list[tuple[str, History]] = []

    def refuse(adjacency: str, history: History) -> None:
        asked.append((adjacency, history))
        raise Abstained("spent")

    model = build_network()
    with pytest.raises(Abstained):
        train_private(model, make_examples(), dp={"noise_multiplier": 1.0}, afford=refuse)
    assert asked == [(ZERO_OUT, ((1.0, 0.25, 8),))]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), build_network().parameters(), strict=True))


def test_a_loss_with_a_term_outside_the_examples_is_refused() -> None:
    def penalise(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x, y) + sum(p.square().sum() for p in model.parameters())

    with pytest.raises(ConfigError, match="the mean of one term for each example"):
        train_private(build_network(), make_examples(), dp={"noise_multiplier": 1.0}, loss=penalise)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("zda-mnist", (1, 28, 28)), ("dpms", (1, 28, 28)), ("harnet", (6, 128)), ("audionet", (1, 64, 64))],
)
def test_networks_get_group_norm_and_can_be_trained(name: str, shape: tuple[int, ...]) -> None:
    fixed = prepare_network(build(name, shape, 10), f"model '{name}'")
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in fixed.modules())
    x, y = torch.randn(6, *shape), torch.arange(6)
    report = train_private(fixed, Examples.of(x, y), dp={"noise_multiplier": 0.5})
    assert report.num_steps == 2
    assert all(torch.isfinite(p).all() for p in fixed.parameters())


REFUSED = ["flea", "feddecorr", "fedmix", "naivemix", "feddata", "fedlc", "fedbr", "fedgen", "qffl", "ccvr", "fedzdac"]


def test_without_noise_there_is_no_guarantee() -> None:
    report = train_private(build_network(), make_examples(), dp={"noise_multiplier": 0.0})
    assert report.covered.guarantee.covers == "no guarantee: the noise is zero"
    assert report.covered.guarantee.history == ()


@pytest.mark.parametrize(("size", "batch", "expected"), [(49, 1, 1), (98, 2, 2), (40, 10, 10)])
def test_the_expected_batch_is_not_rounded_away(size: int, batch: int, expected: int) -> None:
    """A single step without noise moves a bias by the mean gradient, of about the expected batch."""
    seen: list[int] = []

    def scaled_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(len(y))
        return -model(x)[:, 0].mean()

    model = nn.Linear(5, 1)
    before = model.bias.item()
    privacy = PrivacyConfig(dp_sgd={"noise_multiplier": 0.0, "max_grad_norm": 1e6})
    config = TrainConfig(epochs=1, batch_size=batch, lr=1.0)
    build_trainer(privacy)(
        model, scaled_loss, make_examples(size), config, lr=1.0, order=derive(0, "order"), device=CPU
    )
    assert model.bias.item() - before == pytest.approx(sum(seen) / expected, rel=1e-4)


def test_two_trainings_in_one_answer_have_independent_noise_and_are_charged_together() -> None:
    class Twice(FedAvg):
        name = "twice"
        dp_sgd = allowed()

        @on(FIT)
        def fit(self, ctx: Any, msg: Global) -> Update:
            models = [ctx.model(), ctx.model()]
            reports = []
            for model in models:
                load(model, msg.weights)
                reports.append(ctx.train(model, cross_entropy))
            moved = [
                torch.cat([(p - q).flatten() for p, q in zip(m.parameters(), ctx.model().parameters(), strict=True)])
                for m in models
            ]
            likeness.append(float(F.cosine_similarity(*(m.detach() for m in moved), dim=0)))
            return Update(**release_update(ctx, models[0], reports[0]))

    likeness: list[float] = []
    problem = problem_of(Twice, partition="iid", privacy={"dp_sgd": {"noise_multiplier": 50.0}})
    played = run_in_memory(problem, 1)
    assert max(map(abs, likeness)) < 0.2, "two trainings under the same noise would give each other away"
    steps = math.ceil(len(problem.load_client_data(0).train) / 8)
    weights = [row for row in played.released if row["kind"] == "weights"]
    assert all(sum(entry[2] for entry in row["history"]) == 2 * steps for row in weights)


def train_many(sizes: Sequence[int], *, released: bool = True) -> type[FedAvg]:
    """FedAvg whose clients train one step on each of so many of their examples, and release the result or keep it."""

    class Many(FedAvg):
        name = "many"
        dp_sgd = allowed()

        @on(FIT)
        def fit(self, ctx: Any, msg: Global) -> Update:
            model = ctx.model()
            x, y = ctx.data.train.all()
            for size in sizes:
                report = ctx.train(model, cross_entropy, data=Examples.of(x[:size], y[:size]), draw=1)
            ctx.store.put("mine", Global(read_tensors(model)))
            if released:
                return Update(**release_update(ctx, model, report))
            nothing = public("nothing of the training leaves")
            unchanged = ctx.release("weights", msg.weights, nothing)
            losses = ctx.release("losses", torch.zeros(1, dtype=torch.float64), nothing)
            return Update(weights=unchanged, num_examples=ctx.release("num_examples", 1, nothing), losses=losses)

    return Many


def play_many(sizes: Sequence[int], **kwargs: Any) -> Any:
    values = {
        "clients": 1,
        "train_size": 80,
        "privacy": {"dp_sgd": {"noise_multiplier": 1.0}},
        "train": {"batch_size": 1},
    }
    return run_in_memory(problem_of(train_many(sizes, **kwargs), **values), 1)


def test_equal_trainings_of_an_answer_are_one_entry_of_its_row() -> None:
    played = play_many([8, 4] * 40)
    weights = [row for row in played.released if row["kind"] == "weights"]
    assert [sorted(row["history"]) for row in weights] == [[[1.0, 0.125, 40], [1.0, 0.25, 40]]]


def test_many_different_trainings_of_an_answer_are_charged_no_less_than_they_cost() -> None:
    assert len(play_many(range(1, 65)).released[0]["history"]) == 64
    claimed = tuple((noise, rate, steps) for noise, rate, steps in play_many(range(1, 66)).released[0]["history"])
    exact = tuple((1.0, 1 / size, 1) for size in range(1, 66))
    assert len(claimed) <= 64, "more is more than a row holds"
    assert compute_epsilon(exact, 1e-5) <= compute_epsilon(claimed, 1e-5) < 2 * compute_epsilon(exact, 1e-5)


def test_training_that_stays_at_the_client_is_charged_when_it_is_done() -> None:
    played = play_many([8], released=False)
    (kept,) = [row for row in played.released if row["history"]]
    assert (kept["kind"], kept["parts"], kept["coverage"]) == ("weights", [], "covered")
    assert (kept["history"], kept["adjacency"]) == ([[1.0, 0.125, 1]], ZERO_OUT)
    assert "kept at the client" in kept["covers"]
    assert played.privacy()["epsilon"] == compute_epsilon(((1.0, 0.125, 1),), 1e-5)


def test_a_method_without_a_declaration_refuses_dp_sgd() -> None:
    class Undeclared(FedAvg):
        name = "undeclared"

    with pytest.raises(ConfigError, match="undeclared refuses DP-SGD: it does not declare"):
        problem_of(Undeclared, privacy={"dp_sgd": {"noise_multiplier": 1.0}})


def test_a_target_epsilon_is_also_a_budget() -> None:
    """A run that is made longer than it was planned for spends no more."""
    privacy = {"dp_sgd": {"target_epsilon": 3.0}}
    problem = problem_of("fedavg", partition="iid", rounds=1, clients=2, train_size=32, privacy=privacy)
    played = run_in_memory(problem, 2)
    assert len([row for row in played.released if row["kind"] == "weights"]) == 2, "the second round is not paid for"
    assert played.privacy()["epsilon"] <= 3.0


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_refuse_dp_sgd_give_the_reason(method: str) -> None:
    with pytest.raises(ConfigError, match=f"{method} refuses DP-SGD: .*; leave --dp-sgd out"):
        problem_of(method, privacy={"dp_sgd": {"noise_multiplier": 1.0}})


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedntd"])
def test_a_private_run_has_opacuss_epsilon_and_nothing_uncovered(method: str) -> None:
    problem = problem_of(method, partition="iid", privacy={"dp_sgd": {"noise_multiplier": 1.0}})
    played = run_in_memory(problem, 3)
    found = played.privacy()
    size = len(problem.load_client_data(0).train)
    steps = math.ceil(size / 8)
    accountant = RDPAccountant()
    accountant.history = [(1.0, 1 / steps, 3 * steps)]
    assert found["epsilon"] == accountant.get_epsilon(1e-5)
    assert (found["accountant"], found["reason"]) == ("rdp", None)
    assert found["releases"]["scalars"]["covers"].startswith("public")
    assert found["noise"].startswith("reproducible noise")
    assert played.measured() == played.predicted()


@pytest.mark.parametrize("dp", [{}, {"noise_multiplier": 1.0, "target_epsilon": 1.0}, {"noise_multiplier": -1.0}])
def test_invalid_settings_are_refused(dp: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="dp_sgd"):
        problem_of("fedavg", privacy={"dp_sgd": dp})
