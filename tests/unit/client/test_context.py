"""What a client half is given: its own data, a stream for each purpose, and training that can be stopped."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrpc.client.context import AnswerContext
from fedrpc.client.store import ClientStore, Transaction
from fedrpc.data.examples import Examples
from fedrpc.errors import Abstained, Cancelled
from fedrpc.methods.fedavg import FIT, FedAvg
from fedrpc.methods.fedprox import FedProx
from fedrpc.methods.phases import on
from fedrpc.models.state import read_tensors
from fedrpc.privacy.accountant import compute_epsilon
from fedrpc.privacy.mechanisms import Declared, Gaussian, public
from fedrpc.privacy.statement import state_epsilon
from fedrpc.privacy.words import describe_epsilon
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.envelope import Envelope
from tests.fakes import CPU, SmallProblem, problem_of, run_in_memory, tiny


@pytest.fixture
def store(tmp_path):
    found = ClientStore(tmp_path)
    yield found
    found.close()


def context(store, problem=None, client=1, stop=None, spent=dict, **question) -> AnswerContext:
    problem = problem or problem_of("fedavg", train={"lr": 0.1, "lr_decay": 0.5})
    return AnswerContext(
        problem,
        problem.load_client_data(client),
        client,
        Envelope("task", phase="fit", **question),
        device=CPU,
        store=Transaction(store),
        stop=stop or threading.Event(),
        spent=spent,
    )


def draw(ctx: AnswerContext, purpose: str = "order") -> int:
    return int(ctx.rng(purpose).integers(2**60))


def test_a_context_has_its_client_round_phase_and_step(store):
    ctx = context(store, round=3, step=2)
    assert (ctx.client, ctx.round, ctx.phase, ctx.step) == (1, 3, "fit", 2)
    assert ctx.env.num_clients == 4
    assert len(ctx.data.train) == ctx.data.train.y.numel() > 0


def test_streams_are_one_for_each_purpose_client_round_and_step(store):
    base = draw(context(store))
    assert base == draw(context(store))
    others = [
        draw(context(store), "noise"),
        draw(context(store, client=2)),
        draw(context(store, round=1)),
        draw(context(store, step=1)),
        draw(context(store, problem_of("fedavg", seed=8))),
    ]
    assert len({base, *others}) == 6


def test_the_order_of_examples_knows_no_method_and_no_phase(store):
    problem, other = problem_of("fedavg"), problem_of(FedProx)
    assert draw(context(store, problem)) == draw(context(store, other))
    ctx = context(store, problem)
    ctx.phase = "extract"
    assert draw(ctx) == draw(context(store, problem))


def test_the_network_is_the_same_for_every_client_and_method(store):
    one, two = (read_tensors(context(store, problem_of(method)).model()) for method in ("fedavg", FedProx))
    assert all(torch.equal(one[name], two[name]) for name in one)
    model = context(store).model()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert all(torch.equal(one[name], value) for name, value in read_tensors(context(store).model()).items())


def test_training_uses_the_clients_data_and_the_rounds_rate(store):
    ctx = context(store, round=2)
    assert ctx.learning_rate() == pytest.approx(0.025)
    report = ctx.train(ctx.model(), cross_entropy)
    assert report.num_examples == len(ctx.data.train)


def test_training_is_the_same_again(store):
    def trained() -> dict[str, torch.Tensor]:
        ctx = context(store)
        model = ctx.model()
        ctx.train(model, cross_entropy)
        return read_tensors(model)

    one, two = trained(), trained()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_other_data_epochs_and_draws_can_be_given(store):
    ctx = context(store)
    x, y = ctx.data.train.all()
    report = ctx.train(ctx.model(), cross_entropy, data=Examples.of(x[:6], y[:6]), epochs=3, draw=4)
    assert (report.num_examples, len(report.epoch_losses)) == (4, 3)


def test_a_withdrawn_task_stops(store):
    stop = threading.Event()
    ctx = context(store, stop=stop)
    ctx.check()
    stop.set()
    with pytest.raises(Cancelled):
        ctx.check()
    with pytest.raises(Cancelled):
        ctx.train(ctx.model(), cross_entropy)


def test_a_client_can_abstain(store):
    with pytest.raises(Abstained, match="the budget is spent"):
        context(store).abstain("the budget is spent")


def test_no_two_clients_share_an_example(tmp_path: Path):
    problem = problem_of("fedavg", local_test=0.2)
    seen: set[int] = set()
    for client in range(4):
        train, test = problem.split_client_indices(client)
        mine = {*train.tolist(), *test.tolist()}
        assert len(mine) == len(train) + len(test)
        assert not mine & seen
        seen |= mine
    assert len(seen) == 60


# Releases


def released(ctx: AnswerContext) -> dict[str, tuple[tuple[float, float, int], ...]]:
    return {part: guarantee.history for part, guarantee in ctx.guarantees.items()}


def test_a_release_gets_noise_and_a_guarantee(store):
    ctx = context(store, digest=b"q")
    value = torch.zeros(1000)
    noisy = ctx.release("means", value, Gaussian(2.0, 0.5, draws=3, covers="x"))
    assert float(noisy.std()) == pytest.approx(2.0, rel=0.1)
    assert released(ctx) == {"means": ((4.0, 1.0, 3),)}
    assert ctx.release("plain", value, None) is value
    assert "plain" not in ctx.guarantees
    with pytest.raises(ValueError, match="'means' is released twice"):
        ctx.release("means", value, Gaussian(2.0, 0.5, covers="x"))


def test_noise_is_the_same_for_the_same_question_and_unrelated_otherwise(store):
    def noise(problem=None, **question) -> float:
        return float(torch.randn(1, generator=context(store, problem, **question).noise("x")))

    base = noise(digest=b"q")
    assert base == noise(digest=b"q")
    others = [noise(digest=b"r"), noise(digest=b"q", round=1), noise(digest=b"q", step=1)]
    ctx = context(store, digest=b"q")
    ctx.phase = "extract"
    others.append(float(torch.randn(1, generator=ctx.noise("x"))))
    assert len({base, *others}) == 5
    secret = problem_of("fedavg", privacy={"noise": "secret"})
    assert noise(secret, digest=b"q") != noise(secret, digest=b"q")


def test_secret_noise_cannot_be_found_by_trying_the_seeds_of_torch(store):
    """A generator that was seeded by a number has its low 32 bits as the first word of its state."""
    secret = context(store, problem_of("fedavg", privacy={"noise": "secret"})).noise("x")
    first_word = int(secret.get_state()[24:32].view(torch.int64))
    found = torch.Generator().manual_seed(first_word)
    assert not torch.equal(torch.randn(4, generator=secret), torch.randn(4, generator=found))


def test_a_release_over_the_budget_abstains_before_anything_leaves(store):
    mechanism = Gaussian(1.0, 1.0, covers="x")
    one = compute_epsilon(mechanism.guarantee.history, 1e-5)
    problem = problem_of("fedavg", privacy={"epsilon_budget": one * 1.01, "dp_sgd": {"noise_multiplier": 1.0}})
    ctx = context(store, problem)
    ctx.release("a", torch.zeros(2), mechanism)
    told = Declared(mechanism.guarantee)
    ctx.release("b", torch.zeros(2), told)  # follows from the first, so that it costs nothing more
    with pytest.raises(Abstained) as told:
        ctx.release("c", torch.zeros(2), Gaussian(1.0, 1.0, covers="x"))
    one_more = describe_epsilon(state_epsilon(((1.0, 1.0, 2),), 1e-5, "replace-one", "seeded"))
    assert str(told.value) == (
        f"privacy budget: no release, since the budget is {one * 1.01:g} ({one:.4g} spent) and it would come to "
        f"{one_more}"
    )
    assert set(ctx.guarantees) == {"a", "b"}


def test_what_was_spent_before_counts(store):
    budget = compute_epsilon(((1.0, 1.0, 6),), 1e-5) + 1e-6
    problem = problem_of("fedavg", privacy={"epsilon_budget": budget, "dp_sgd": {"noise_multiplier": 1.0}})
    ctx = context(store, problem, spent=lambda: {"replace-one": ((1.0, 1.0, 5),)})
    ctx.release("a", torch.zeros(2), Gaussian(1.0, 1.0, covers="x"))
    over = context(store, problem, spent=lambda: {"replace-one": ((1.0, 1.0, 6),)})
    with pytest.raises(Abstained):
        over.release("a", torch.zeros(2), Gaussian(1.0, 1.0, covers="x"))


def test_costs_for_different_neighbours_are_not_added_up(store):
    one = Gaussian(1.0, 1.0, covers="x")
    budget = compute_epsilon(one.guarantee.history, 1e-5) * 1.01
    problem = problem_of("fedavg", privacy={"epsilon_budget": budget, "dp_sgd": {"noise_multiplier": 1.0}})
    ctx = context(store, problem, spent=lambda: {"zero-out": ((1.0, 1.0, 1),)})
    ctx.release("a", torch.zeros(2), one)
    with pytest.raises(Abstained, match="neighbours: zero-out"):
        ctx.release("b", torch.zeros(2), Gaussian(1.0, 1.0, covers="x", adjacency="zero-out"))
    with pytest.raises(Abstained, match="neighbours: replace-one"):
        ctx.release("c", torch.zeros(2), Gaussian(1.0, 1.0, covers="x"))


def test_trainings_whose_results_are_not_released_count_against_the_budget(store):
    problem = problem_of("fedavg", partition="iid", privacy={"epsilon_budget": 7.0, "dp_sgd": {"noise_multiplier": 1}})
    ctx = context(store, problem)
    ctx.train(ctx.model(), cross_entropy)
    one = compute_epsilon(ctx.trained.history, 1e-5)
    assert one < 7.0 < compute_epsilon(tuple((*entry[:2], 2 * entry[2]) for entry in ctx.trained.history), 1e-5)
    with pytest.raises(Abstained, match=rf"the budget is 7 \({one:.4g} spent\)"):
        ctx.train(ctx.model(), cross_entropy)


def test_a_release_of_a_part_that_the_answer_has_not_is_an_error():
    class Careless(FedAvg):
        name = "careless"

        @on(FIT)
        def fit(self, ctx, msg):
            ctx.release("weight", torch.zeros(1), public("a slip of the pen"))
            return super().fit(ctx, msg)

    with pytest.raises(TypeError, match="released weight, but the answer's parts are losses, num_examples, weights"):
        run_in_memory(problem_of(Careless), 1)


def test_a_round_goes_on_without_clients_that_have_nothing_left_to_spend():
    """One client has twice the examples and so twice the steps: it can pay for one round, the others for two."""
    dp = {"noise_multiplier": 1.0}
    budget = compute_epsilon(((1.0, 1.0, 2),), 1e-5)
    assert compute_epsilon(((1.0, 0.5, 2),), 1e-5) < budget < compute_epsilon(((1.0, 0.5, 4),), 1e-5)

    class Uneven(SmallProblem):
        def split_client_indices(self, client):
            return np.arange(16 if client == 0 else 8) + 16 * client, np.arange(0)

    config = problem_of("fedavg", privacy={"dp_sgd": dp, "epsilon_budget": budget}).config
    played = run_in_memory(Uneven(config, tiny), 3)
    told = [(row["client"], row["round"]) for row in played.released if row["kind"] == "weights"]
    assert sorted(told) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert played.privacy()["epsilon"] == budget
    one, two, three = (played.problem.method.model(state) for state in played.states[1:])
    assert any(not torch.equal(one[name], two[name]) for name in one)
    assert all(torch.equal(two[name], three[name]) for name in two), "all abstained: the model stays as it is"
