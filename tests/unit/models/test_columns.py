"""The column convolution against torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from torch import nn

from fedrpc.models.columns import ColumnConv2d
from fedrpc.models.harnet import BLOCKS, FirstAxes


def pair(channels: int, width: int, kernel: int, stride: int, padding: int) -> tuple[ColumnConv2d, nn.Conv2d]:
    torch.manual_seed(0)
    own = ColumnConv2d(channels, width, kernel, stride, padding).double()
    torch.manual_seed(0)
    reference = nn.Conv2d(channels, width, (kernel, 1), stride=(stride, 1), padding=padding).double()
    return own, reference


def test_parameters_names_and_initial_values_are_torchs():
    own, reference = pair(3, 4, 6, 2, 1)
    assert list(own.state_dict()) == list(reference.state_dict()) == ["weight", "bias"]
    assert torch.equal(own.weight, reference.weight)
    assert torch.equal(own.bias, reference.bias)


def assert_equal_with_gradients(own, reference, x):
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [own(inputs[0]), reference(inputs[1])]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-12)
    push = torch.randn_like(outputs[1])
    for output in outputs:
        output.backward(push)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(own.weight.grad, reference.weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.bias.grad, reference.bias.grad, rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(
    channels=st.integers(1, 4),
    width=st.integers(1, 4),
    kernel=st.integers(1, 6),
    stride=st.integers(1, 4),
    padding=st.integers(0, 3),
    height=st.integers(6, 20),
    columns=st.integers(1, 5),
)
def test_any_column_convolution_equals_torchs(channels, width, kernel, stride, padding, height, columns):
    own, reference = pair(channels, width, kernel, stride, padding)
    assert_equal_with_gradients(own, reference, torch.randn(2, channels, height, columns, dtype=torch.float64))


@pytest.mark.parametrize("block", BLOCKS)
def test_harnets_own_convolutions_equal_torchs(block):
    channels, width, kernel, stride = block
    own, reference = pair(channels, width, kernel, stride, 1)
    assert_equal_with_gradients(own, reference, torch.randn(2, channels, 21, 3, dtype=torch.float64))


def test_second_derivatives_work():
    own, _ = pair(2, 3, 3, 2, 1)
    x = torch.randn(1, 2, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda v: own(v).square().sum(), (x,))


def test_first_axes_takes_three_channels_in_time_order():
    signals = torch.arange(2 * 6 * 128, dtype=torch.float32).reshape(2, 6, 128)
    images = FirstAxes()(signals)
    assert images.shape == (2, 1, 128, 3)
    assert images[1, 0, 7, 2] == signals[1, 2, 7]
    assert torch.equal(FirstAxes()(signals[0]), images[:1])
    assert torch.equal(FirstAxes()(images), images)


def two_networks() -> tuple[nn.Module, nn.Module]:
    """HARNet's last three blocks in small, with our convolution and with torch's."""

    def blocks(conv) -> nn.Sequential:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for channels, width in ((2, 3), (3, 4), (4, 5)):
            layers += [conv(channels, width), nn.BatchNorm2d(width), nn.ReLU()]
        return nn.Sequential(*layers).double()

    own = blocks(lambda channels, width: ColumnConv2d(channels, width, 3, 2, 1))
    reference = blocks(lambda channels, width: nn.Conv2d(channels, width, (3, 1), stride=(2, 1), padding=1))
    return own, reference


def rows_multiplied(network: nn.Module, x: torch.Tensor, monkeypatch) -> list[int]:
    """How many rows each matrix product of a forward pass has."""
    found, linear = [], torch.nn.functional.linear

    def counting(seen, weight, bias):
        found.append(seen[..., 0].numel())
        return linear(seen, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counting)
    network(x)
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    return found


@pytest.mark.parametrize("training", [True, False])
def test_padded_columns_are_multiplied_once_and_gradients_stay_equal(training, monkeypatch):
    own, reference = two_networks()
    x = torch.randn(7, 2, 21, 3, dtype=torch.float64)
    for network in (own, reference):  # statistics of their own, so that evaluation mode is no identity
        network.train()(x)
        network.train(training)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [own(inputs[0] * 1), reference(inputs[1] * 1)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=1e-10)
    for ours, theirs in zip(own.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
    # Outputs are 11, 6 and 3 rows high; 3 inner columns of each of 7 samples, and 1 and 2 outer ones once for all.
    want = [7 * 11 * 3, 7 * 6 * 3, 6 * 1, 7 * 3 * 3, 3 * 2]
    assert rows_multiplied(own, x, monkeypatch) == want


def test_outer_columns_that_differ_between_samples_are_not_shared(monkeypatch):
    own, reference = pair(2, 3, 3, 2, 1)
    x = torch.zeros(4, 2, 9, 5, dtype=torch.float64)
    x[2, 1, 4, 4] = 1.0  # only at one end, in one sample
    torch.testing.assert_close(own(x), reference(x), rtol=0, atol=1e-12)
    assert rows_multiplied(own, x, monkeypatch) == [4 * 5 * 5]


def test_a_leaf_gets_each_samples_own_gradient():
    own, reference = pair(2, 3, 3, 2, 1)
    inputs = [torch.ones(4, 2, 9, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    push = torch.randn(4, 3, 5, 7, dtype=torch.float64)
    own(inputs[0]).backward(push)
    reference(inputs[1]).backward(push)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # Opacus hooks the first layer too
def test_per_example_gradients_are_right_when_examples_repeat():
    # With GroupNorm two equal examples have equal outer columns too, which belong to each of them all the same.
    torch.manual_seed(0)
    network = nn.Sequential(
        ColumnConv2d(1, 4, 3, 2, 1), nn.GroupNorm(2, 4), nn.ReLU(), ColumnConv2d(4, 2, 3, 2, 1), nn.Flatten()
    )
    x = torch.randn(1, 1, 9, 3).repeat(3, 1, 1, 1)
    push = torch.randn(3, *network(x[:1]).shape[1:])
    alone = []
    for i in range(3):
        network.zero_grad()
        (network(x[:1]) * push[i]).sum().backward()
        alone.append(network[0].weight.grad.clone())
    private = GradSampleModule(network, loss_reduction="sum")
    network.zero_grad()
    (private(x) * push).sum().backward()
    torch.testing.assert_close(network[0].weight.grad_sample, torch.stack(alone), rtol=1e-4, atol=1e-5)
