"""How a step is computed: in less than fp32 where the run says so, and as ever where it does not."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrpc.config import TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.errors import Diverged
from fedrpc.training.acceleration import Precision, wants_channels_last
from fedrpc.training.loop import TrainReport, build_optimizer, train
from fedrpc.training.losses import Loss, cross_entropy

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Network(nn.Module):
    """Small, with a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4 * 16, 3)
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        found = self.conv(x)
        if not torch.compiler.is_compiling():
            self.seen.append((found.dtype, found.is_contiguous(memory_format=torch.channels_last)))
        logits: Tensor = self.head(found.relu().flatten(1))
        return logits


def make_examples(count: int = 30) -> Examples:
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=(count, 2, 6, 6)).astype(np.float32))
    return Examples.of(x, torch.from_numpy(rng.integers(0, 3, count)))


def run(model: nn.Module, loss: Loss = cross_entropy, **settings: object) -> TrainReport:
    config, order = TrainConfig(lr=0.1, epochs=2, batch_size=7, **settings), np.random.default_rng(3)
    return train(model, loss, make_examples(), config, lr=0.1, order=order, device=CPU)


def read(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_loss_is_computed_in_the_precision_and_the_weights_stay_fp32(precision, dtype):
    whole, half = Network(), Network()
    expected, found = run(whole), run(half, precision=precision)
    assert {seen for seen, _ in whole.seen} == {torch.float32}
    assert {seen for seen, _ in half.seen} == {dtype}
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    assert not torch.equal(read(whole), read(half))
    # A weight moves by some 0.1 here; bf16 has 8 bits, so the two come apart by a hundredth of that or so.
    assert torch.allclose(read(whole), read(half), atol=1e-2)
    assert found.epoch_losses == pytest.approx(expected.epoch_losses, rel=1e-2)
    assert found.num_steps == expected.num_steps == 10


def test_methods_see_gradients_in_their_true_size_in_fp16():
    seen = {}
    for precision in ("fp32", "fp16"):
        sizes: list[float] = []

        def note(model: nn.Module, sizes: list[float] = sizes) -> None:
            sizes.append(sum(float(p.grad.norm()) for p in model.parameters()))

        config, order = TrainConfig(epochs=1, batch_size=30, precision=precision), np.random.default_rng(0)
        train(Network(), cross_entropy, make_examples(), config, lr=0.1, order=order, device=CPU, on_grad=note)
        seen[precision] = sizes
    assert seen["fp16"] == pytest.approx(seen["fp32"], rel=1e-2)


def test_a_step_whose_gradients_overflow_in_fp16_is_left_out_and_not_counted():
    """Methods divide by the number of steps (SCAFFOLD, FedNova)."""
    calls = 0

    def explode_twice(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(model(x), y) * (1e6 if calls <= 2 else 1.0)

    model = Network()
    report = run(model, explode_twice, precision="fp16")
    assert calls == 10
    assert report.num_steps == 8
    assert torch.isfinite(read(model)).all()


def test_nhwc_changes_the_layout_within_the_loop_alone():
    plain, relaid = Network(), Network()
    assert run(plain).num_steps == run(relaid, channels_last=True).num_steps
    assert {seen for _, seen in plain.seen} == {False}
    assert {seen for _, seen in relaid.seen} == {True}
    assert all(p.is_contiguous() for p in relaid.parameters())
    assert torch.allclose(read(plain), read(relaid), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "device", "wanted"),
    [
        ({}, CPU, False),
        ({"precision": "bf16"}, CPU, False),
        ({}, GPU, False),
        ({"precision": "fp16"}, GPU, True),
        ({"tf32": True}, GPU, True),
        ({"precision": "bf16", "channels_last": False}, GPU, False),
        ({"channels_last": True}, CPU, True),
    ],
)
def test_nhwc_is_for_tensor_cores_unless_somebody_says_otherwise(settings, device, wanted):
    assert wants_channels_last(TrainConfig(**settings), device) is wanted


def test_on_a_cpu_no_optimizer_is_fused():
    """Its bits would be others."""
    for name in ("sgd", "adam"):
        [group] = build_optimizer(TrainConfig(optimizer=name), Network(), 0.1).param_groups
        assert not group["fused"]


def test_in_fp32_nothing_is_cast():
    precision = Precision(TrainConfig(), CPU)
    with precision.casting():
        assert not torch.is_autocast_enabled("cpu")
    assert precision.count_left_out() == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU takes g++, which is not here")
@pytest.mark.filterwarnings("ignore")  # of what torch's compiler imports
def test_a_network_is_compiled_once_for_all_rounds_and_clients():
    import torch._dynamo

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    plain, first, second = Network(), Network(), Network()
    run(plain)
    run(first, compile="on")
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    run(second, compile="on")
    assert counters["stats"]["unique_graphs"] == compiled, "a second network of the kind is not compiled again"
    assert torch.equal(read(first), read(second))
    assert torch.allclose(read(plain), read(first), atol=1e-4)
    assert first._compiled_call_impl is None, "outside the loop it is as it was"


def test_a_training_that_overflows_again_and_again_in_fp16_says_so():
    def explode(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) * math.inf

    config, order = TrainConfig(epochs=40, batch_size=7, precision="fp16"), np.random.default_rng(3)
    with pytest.raises(Diverged, match=r"overflowed in fp16 in 30 steps or more, .* lower train\.lr, or choose --pre"):
        train(Network(), explode, make_examples(), config, lr=0.1, order=order, device=CPU)
