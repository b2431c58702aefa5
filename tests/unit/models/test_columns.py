"""The column convolution against torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
