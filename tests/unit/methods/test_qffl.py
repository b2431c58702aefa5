"""q-FFL against its oracles: hand values, the uniform mean at q = 0, fixed points, and losses of any size."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedrpc.errors import ConfigError, QuorumError
from fedrpc.methods.phases import on
from fedrpc.methods.qffl import FIT, FairStep, FairUpdate, QFfl
from fedrpc.methods.runtime import ClientContext
from fedrpc.models.state import load
from fedrpc.wire.message import Tensors
from tests.fakes import mlp, problem_of, run_in_memory
from tests.unit.methods.test_fedzdac import Uniform, remove_data
from tests.unit.wire.messages import same

HAND = {"start": [1.0, 2.0], "clients": [([0.0, 1.0], 0.7), ([3.0, 2.5], 1.9)], "lipschitz": 10.0}


def take_step(q: float, start: Any, clients: Any, lipschitz: float) -> torch.Tensor:
    fair = FairStep({"w": torch.tensor(start)}, ["w"], q=q, lipschitz=lipschitz)
    for weights, loss in clients:
        fair.add({"w": torch.tensor(weights)}, loss)
    return fair.value["w"]


# Reference values


@pytest.mark.parametrize(("q", "wanted"), [(1, (1.047619, 2.003840)), (5, (1.017512, 2.004333)), (0, (1.5, 1.75))])
def test_values_computed_by_hand(q, wanted):
    assert take_step(q, **HAND).tolist() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("q", [0, 0.1, 1, 5, 15])
def test_the_step_is_the_papers_formula(q):
    torch.manual_seed(0)
    start, lipschitz = torch.randn(7), 50.0
    clients = [(torch.randn(7), float(loss)) for loss in torch.rand(5) * 3]
    total, h = torch.zeros(7, dtype=torch.float64), 0.0
    for weights, loss in clients:
        moved = lipschitz * (start.double() - weights.double())
        f = loss + 1e-10
        total += f**q * moved
        h += q * f ** (q - 1) * float(moved.square().sum()) + lipschitz * f**q
    got = take_step(q, start.tolist(), [(w.tolist(), loss) for w, loss in clients], lipschitz)
    assert torch.allclose(got.double(), start.double() - total / h, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("train", [{}, {"lr_decay": 0.5}, {"optimizer": "adam", "lr": 0.01}])
def test_q_0_is_the_uniform_mean_bit_for_bit(train):
    ours, uniform = (
        run_in_memory(problem_of(m, fraction=0.75, params=p, train=train), 3)
        for m, p in (("qffl", {"q": 0}), (Uniform, {}))
    )
    assert all(map(same, ours.states, uniform.states))


@pytest.mark.parametrize("q", [0, 0.1, 1, 50])
def test_unchanged_clients_leave_the_model_unchanged(q):
    clients = [([0.1, -7.0], loss) for loss in (0.0, 0.3, 40.0)]
    assert torch.equal(take_step(q, [0.1, -7.0], clients, 50.0), torch.tensor([0.1, -7.0]))


@pytest.mark.parametrize("q", [0, 0.1, 1, 5])
def test_the_step_is_no_longer_than_the_longest_clients(q):
    for seed in range(20):
        torch.manual_seed(seed)
        start, clients = torch.randn(6), [(torch.randn(6), float(loss)) for loss in torch.rand(4) * 5]
        got = take_step(q, start.tolist(), [(w.tolist(), loss) for w, loss in clients], 50.0)
        longest = max(float((start - w).norm()) for w, _ in clients)
        assert float((start - got).norm()) <= longest * (1 + 1e-6)


def test_a_larger_q_gives_clients_with_a_high_loss_more_weight():
    ends = [([0.0], 0.1), ([2.0], 2.0)]
    moves = [float(take_step(q, [1.0], ends, 0.01)) - 1 for q in (0, 0.5, 1, 2)]  # h is nearly L F^q for a small L
    assert moves[0] == pytest.approx(0, abs=1e-6)
    assert moves == sorted(moves)
    assert moves[-1] > 0.9


# Scales


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("q", [0.1, 1, 50, 500])
def test_losses_of_any_size_give_finite_steps(q, order):
    clients = [([0.0, 1.0], 0.0), ([3.0, 2.5], 1e-9), ([1.0, 1.0], 1e9), ([0.5, 4.0], 1e30)][::order]
    got = take_step(q, [1.0, 2.0], clients, 50.0)
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("order", [1, -1])
def test_powers_beyond_the_range_of_floats_are_exact(order):
    """1000 ** q overflows from q = 103 on; decimals have no such bounds."""
    q, start, clients = 400, 1.0, [(0.0, 1000.0), (3.0, 999.0)][::order]
    total = h = Decimal(0)
    for weight, loss in clients:
        moved, f = Decimal(10 * (start - weight)), Decimal(loss) + Decimal("1e-10")
        total += f**q * moved
        h += q * f ** (q - 1) * moved**2 + 10 * f**q
    assert float(take_step(q, [start], [([w], loss) for w, loss in clients], 10.0)) == pytest.approx(
        float(Decimal(start) - total / h), rel=1e-6
    )


def test_statistics_move_as_far_as_the_weights_do_and_do_not_shorten_the_step():
    start: Tensors = {"w": torch.zeros(1), "running_mean": torch.zeros(1)}
    fair = FairStep(start, ["w"], q=2, lipschitz=10)
    for target, loss in ((1.0, 0.5), (4.0, 3.0)):
        fair.add({"w": torch.full((1,), target), "running_mean": torch.full((1,), 100 * target)}, loss)
    alone = float(take_step(2, [0.0], [([1.0], 0.5), ([4.0], 3.0)], 10.0))
    assert fair.value["w"].item() == pytest.approx(alone, rel=1e-6)
    assert fair.value["running_mean"].item() == pytest.approx(100 * alone, rel=1e-6)
    assert 0 < alone < 1, "less than either client's way"


def test_counters_are_the_largest():
    start: Tensors = {"w": torch.ones(2), "num_batches_tracked": torch.tensor(3)}
    fair = FairStep(start, ["w"], q=5, lipschitz=10)
    for number, loss in ((1, 0.1), (4, 3.0)):
        fair.add({"w": torch.ones(2), "num_batches_tracked": torch.tensor(number + 3)}, loss)
    assert list(fair.value) == list(start)
    assert fair.value["num_batches_tracked"].item() == 7
    assert fair.value["num_batches_tracked"].dtype == torch.int64


def test_without_clients_there_is_no_step():
    with pytest.raises(QuorumError, match="no client that answered had any training data"):
        _ = FairStep({"w": torch.ones(1)}, ["w"], q=1, lipschitz=1).value


# Whole runs


def test_the_loss_is_of_the_received_model_in_evaluation_mode_before_training():
    problem = problem_of("qffl")
    played = run_in_memory(problem, 2)
    for index, record in enumerate(played.records):
        model = problem.copy_network().eval()
        load(model, played.states[index].weights)
        for client, loss in record["losses_before"].items():
            x, y = problem.load_client_data(client).train.all()
            with torch.no_grad():
                assert loss == pytest.approx(float(F.cross_entropy(model(x), y)), rel=1e-5)


def test_a_round_uses_its_own_learning_rate():
    sent: dict[tuple[int, int], FairUpdate] = {}

    class Watched(QFfl):
        name = "watched"

        @on(FIT)
        def fit(self, ctx: ClientContext, msg: Any) -> FairUpdate:
            sent[ctx.round, ctx.client] = update = super().fit(ctx, msg)
            return update

    problem = problem_of(Watched, build=mlp, params={"q": 2}, train={"lr": 0.1, "lr_decay": 0.5})
    played = run_in_memory(problem, 2)
    learned = [name for name, _ in problem.copy_network().named_parameters()]
    for index, rate in enumerate((0.1, 0.05)):
        wanted = FairStep(played.states[index].weights, learned, q=2, lipschitz=1 / rate)
        for client in range(4):
            wanted.add(sent[index, client].weights, sent[index, client].loss)
        assert same(played.states[index + 1].weights, wanted.value)


def test_bytes_are_fedavgs_plus_a_scalar():
    ours, fedavg = (run_in_memory(problem_of(m, fraction=0.5, train={"epochs": 2}), 3) for m in ("qffl", "fedavg"))
    assert ours.measured() == ours.predicted()
    wanted = fedavg.measured()
    wanted["up"]["scalars"] += 3 * 2 * 8
    assert ours.measured() == wanted


def test_it_learns():
    problem = problem_of("qffl", train_size=400, partition="iid", params={"q": 0.1}, train={"epochs": 2, "lr": 0.1})
    before, after = (run_in_memory(problem, rounds).evaluate() for rounds in (0, 4))
    assert after.accuracy > before.accuracy + 10


@pytest.mark.parametrize("train", [{"optimizer": "adam"}, {"momentum": 0.9}])
def test_optimizers_other_than_plain_sgd_are_refused(train):
    with pytest.raises(ConfigError, match=r"plain SGD only, got .*; set train\.optimizer=sgd and train\.momentum=0"):
        problem_of("qffl", train=train)


@pytest.mark.parametrize("loss", [-1e-9, math.nan, math.inf])
def test_invalid_losses_are_refused(loss):
    assert FIT.check is not None
    losses = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="the loss of the received model"):
        FIT.check(None, FairUpdate({}, 1, losses, loss))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an update needs"):
        FIT.check(None, FairUpdate({}, -1, losses, 1.0))  # type: ignore[arg-type]
    FIT.check(None, FairUpdate({}, 1, losses, 0.0))  # type: ignore[arg-type]


def test_a_negative_q_is_refused():
    with pytest.raises(ConfigError, match=r"params\.q"):
        problem_of("qffl", params={"q": -0.1})


def test_a_client_without_data_does_not_count():
    poor = run_in_memory(remove_data(problem_of("qffl"), 2), 1)
    assert set(poor.records[0]["losses_before"]) == {0, 1, 3}
    assert same(poor.state, run_in_memory(problem_of("qffl"), 1, absent=lambda i, p, s, client: client == 2).state)
