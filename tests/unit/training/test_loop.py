"""Local training: every example once an epoch, no lone example, and an order that knows no method."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedrpc.config import TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.errors import Cancelled
from fedrpc.training.batches import slice_batches
from fedrpc.training.loop import build_optimizer, compute_learning_rate, train


@given(st.integers(0, 200), st.integers(2, 40))
def test_a_lone_example_is_never_a_batch_unless_it_is_all_there_is(count, size):
    batches = list(slice_batches(np.arange(count), size))
    assert [int(index) for batch in batches for index in batch] == list(range(count))
    sizes = [len(batch) for batch in batches]
    assert all(length == size for length in sizes[:-1])
    assert all(length > 1 for length in sizes) or sizes == [1] == [count]
    assert all(length <= size + 1 for length in sizes)


@given(st.integers(0, 20))
def test_batches_of_one_are_possible(count):
    batches = list(slice_batches(np.arange(count), 1))
    assert [int(index) for batch in batches for index in batch] == list(range(count))
    assert all(len(batch) <= 2 for batch in batches)


def test_batches_follow_the_order_given():
    assert [batch.tolist() for batch in slice_batches(np.array([4, 2, 0, 1, 3]), 2)] == [[4, 2], [0, 1, 3]]


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"lr": 0.5}, [0.5, 0.5, 0.5, 0.5]),
        ({"lr": 0.5, "lr_decay": 0.5}, [0.5, 0.25, 0.125, 0.0625]),
        ({"lr": 0.5, "lr_decay": 0.5, "lr_decay_every": 2}, [0.5, 0.5, 0.25, 0.25]),
        ({"lr": 0.5, "lr_decay": 0.1, "lr_min": 0.02}, [0.5, 0.05, 0.02, 0.02]),
    ],
)
def test_the_rate_decays_by_the_round(options, rates):
    config = TrainConfig(**options)
    assert [compute_learning_rate(config, index) for index in range(4)] == pytest.approx(rates)
    assert compute_learning_rate(config, -1) == rates[0], "set-up trains at the first rate"


def test_the_optimizer_is_the_configured_one_for_trainable_parameters():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    sgd = build_optimizer(TrainConfig(momentum=0.9, weight_decay=0.1), model, 0.3)
    assert isinstance(sgd, torch.optim.SGD)
    [group] = sgd.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.9, 0.1)
    assert [id(p) for p in group["params"]] == [id(p) for p in model[1].parameters()]
    assert isinstance(build_optimizer(TrainConfig(optimizer="adam"), model, 0.3), torch.optim.Adam)


class Watch:
    """A loss that notes which examples each batch had."""

    def __init__(self, scale: float = 1.0) -> None:
        self.batches: list[list[float]] = []
        self._scale = scale

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        self.batches.append(x[:, 0].tolist())
        return self._scale * F.mse_loss(model(x).squeeze(1), y)


def make_examples(count: int) -> Examples:
    x = torch.arange(count, dtype=torch.float32).unsqueeze(1)
    return Examples.of(x, x.squeeze(1) * 2)


def run(model: nn.Module, loss, config: TrainConfig, examples: Examples, seed: int = 0, **options):
    options = {"check": lambda: None} | options
    return train(
        model,
        loss,
        examples,
        config,
        lr=config.lr,
        order=np.random.default_rng(seed),
        device=torch.device("cpu"),
        **options,
    )


def build_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(1, 1)


CONFIG = TrainConfig(lr=1e-4, epochs=3, batch_size=4)


def test_every_epoch_has_every_example_once_in_a_new_order():
    watch = Watch()
    report = run(build_linear(), watch, CONFIG, make_examples(10))
    epochs = [[x for batch in watch.batches[start : start + 3] for x in batch] for start in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert (report.num_examples, report.num_steps, len(report.epoch_losses)) == (10, 9, 3)
    assert report.loss == report.epoch_losses[-1]


def test_the_order_does_not_depend_on_the_method():
    one, two, other = Watch(), Watch(scale=7), Watch()
    run(build_linear(), one, CONFIG, make_examples(10))
    run(nn.Sequential(build_linear(), nn.Dropout(0.5)), two, CONFIG, make_examples(10), on_grad=lambda model: None)
    run(build_linear(), other, CONFIG, make_examples(10), seed=1)
    assert one.batches == two.batches
    assert one.batches != other.batches


def test_a_step_is_the_optimizers_step_on_the_mean_loss():
    model, config = build_linear(), TrainConfig(lr=0.01, epochs=1, batch_size=100)
    wanted = build_linear()
    x, y = make_examples(5).all()
    F.mse_loss(wanted(x).squeeze(1), y).backward()
    with torch.no_grad():
        for parameter in wanted.parameters():
            parameter -= 0.01 * parameter.grad
    run(model, Watch(), config, make_examples(5))
    for got, parameter in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.allclose(got, parameter, rtol=1e-6)


def test_the_reported_loss_is_the_mean_over_examples_not_batches():
    frozen = build_linear().requires_grad_(False)
    free = nn.Parameter(torch.zeros(()))
    frozen.register_parameter("free", free)
    x, y = make_examples(10).all()
    report = run(frozen, lambda m, x, y: F.mse_loss(m(x).squeeze(1), y) + 0 * m.free, CONFIG, make_examples(10))
    assert report.epoch_losses == pytest.approx([F.mse_loss(frozen(x).squeeze(1), y).item()] * 3, rel=1e-5)


def test_gradients_can_be_changed_between_backward_and_step():
    model = build_linear()
    before = [p.detach().clone() for p in model.parameters()]

    def forget(m: nn.Module) -> None:
        assert all(p.grad is not None for p in m.parameters())
        for p in m.parameters():
            p.grad.zero_()

    run(model, Watch(), CONFIG, make_examples(10), on_grad=forget)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_withdrawn_task_stops_before_its_next_batch():
    watch, left = Watch(), 2

    def check() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Cancelled("the server withdrew the task")

    with pytest.raises(Cancelled):
        run(build_linear(), watch, CONFIG, make_examples(10), check=check)
    assert len(watch.batches) == 2


@pytest.mark.parametrize("count", [0, 1])
def test_a_client_with_hardly_any_data_can_train(count):
    model = build_linear()
    before = [p.detach().clone() for p in model.parameters()]
    report = run(model, Watch(), CONFIG, make_examples(count))
    assert report.num_steps == 3 * count
    assert len(report.epoch_losses) == 3
    unchanged = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert unchanged == (count == 0)


def test_the_number_of_epochs_can_be_overridden():
    assert len(run(build_linear(), Watch(), CONFIG, make_examples(10), epochs=1).epoch_losses) == 1
    assert run(build_linear(), Watch(), CONFIG, make_examples(10), epochs=0).num_steps == 0


@pytest.mark.parametrize(("draw", "size"), [(4, 4), (9, 9), (10, 10), (50, 10), (0, 0)])
def test_each_epoch_can_sample_its_examples(draw, size):
    watch = Watch()
    report = run(build_linear(), watch, CONFIG, make_examples(10), draw=draw)
    sampled = [x for batch in watch.batches for x in batch]
    assert len(sampled) == 3 * size
    epochs = [sampled[start : start + size] for start in range(0, 3 * size, size or 1)]
    assert all(len(set(epoch)) == size for epoch in epochs), "without replacement"
    assert report.num_examples == size
    assert len(report.epoch_losses) == 3
    if size == 4:
        assert len({tuple(sorted(epoch)) for epoch in epochs}) > 1


def test_drawing_all_examples_is_plain_training():
    one, two = Watch(), Watch()
    run(build_linear(), one, CONFIG, make_examples(10))
    run(build_linear(), two, CONFIG, make_examples(10), draw=10)
    assert one.batches == two.batches


def test_no_epochs_is_no_training():
    report = run(build_linear(), Watch(), TrainConfig(epochs=0), make_examples(10))
    assert (report.num_steps, report.epoch_losses, report.loss) == (0, (), 0.0)


def test_batchnorm_trains_with_any_remainder():
    for count in range(2, 12):
        model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        assert run(model, Watch(), CONFIG, make_examples(count)).num_steps > 0


def test_the_model_is_put_in_training_mode():
    model = build_linear().eval()
    run(model, Watch(), CONFIG, make_examples(3))
    assert model.training
