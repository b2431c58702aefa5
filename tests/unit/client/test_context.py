"""What a client half is given: its own data, a stream for each purpose, and training that can be stopped."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from fedrpc.client.context import AnswerContext
from fedrpc.client.store import ClientStore, Transaction
from fedrpc.data.examples import Examples
from fedrpc.errors import Abstained, Cancelled
from fedrpc.methods.fedavg import cross_entropy
from fedrpc.methods.fedprox import FedProx
from fedrpc.models.state import tensors
from fedrpc.wire.v1 import coordinator_pb2 as pb
from tests.fakes import CPU, problem_of


@pytest.fixture
def store(tmp_path):
    found = ClientStore(tmp_path)
    yield found
    found.close()


def context(store, problem=None, client=1, stop=None, **question) -> AnswerContext:
    problem = problem or problem_of("fedavg", train={"lr": 0.1, "lr_decay": 0.5})
    return AnswerContext(
        problem,
        problem.client_data(client),
        client,
        pb.Envelope(phase="fit", **question),
        device=CPU,
        store=Transaction(store),
        stop=stop or threading.Event(),
    )


def draw(ctx: AnswerContext, purpose: str = "order") -> int:
    return int(ctx.rng(purpose).integers(2**60))


def test_a_context_says_where_it_is(store):
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
    one, two = (tensors(context(store, problem_of(method)).model()) for method in ("fedavg", FedProx))
    assert all(torch.equal(one[name], two[name]) for name in one)
    model = context(store).model()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert all(torch.equal(one[name], value) for name, value in tensors(context(store).model()).items())


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
        return tensors(model)

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
        train, test = problem.local_indices(client)
        mine = {*train.tolist(), *test.tolist()}
        assert len(mine) == len(train) + len(test)
        assert not mine & seen
        seen |= mine
    assert len(seen) == 60
