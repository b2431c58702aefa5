"""The attackers' networks: the authors' layers where these fit, and every other shape too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedrpc.study.attacks.decoders import (
    Resize,
    Shape,
    Standardised,
    build_detector,
    build_linear_decoder,
    build_residual_decoder,
)

SHAPES = [  # item, input
    ((16, 32, 32), (3, 32, 32)),  # MobileNetV2's first stage
    ((16, 14, 14), (1, 28, 28)),
    ((12,), (1, 28, 28)),
    ((5, 9), (1, 8, 8)),
    ((128, 20, 7), (3, 128)),  # HARNet's second stage
    ((3, 128), (3, 128)),
    ((4, 3, 3), (2, 7, 5)),
    ((6,), (4,)),
    ((2, 3, 4, 5), (3, 4, 4, 4)),
]
every_shape = pytest.mark.parametrize(("item", "target"), SHAPES)


def random_weights(net: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    return net


def said(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net(x)


@every_shape
@pytest.mark.parametrize("make", [build_linear_decoder, build_residual_decoder])
def test_a_decoder_gives_inputs_and_starts_at_zero(make, item: Shape, target: Shape) -> None:
    out = said(make(item, target), torch.randn(2, *item))
    assert out.shape == (2, *target)
    assert not out.any()


@every_shape
def test_the_linear_decoder_is_affine_and_the_other_one_is_not(item: Shape, target: Shape) -> None:
    x, y = torch.randn(2, *item).double(), torch.randn(2, *item).double()
    for make, affine in ((build_linear_decoder, True), (build_residual_decoder, False)):
        net = random_weights(make(item, target)).double()
        middle = (said(net, x) + said(net, y)) / 2
        assert torch.allclose(said(net, (x + y) / 2), middle) == affine


def test_the_linear_decoder_is_the_papers_where_that_fits() -> None:
    layers = [layer for layer in build_linear_decoder((16, 32, 32), (3, 32, 32)) if not isinstance(layer, Resize)]
    layout = [(type(x), x.in_channels, x.out_channels, x.kernel_size[0], x.stride[0]) for x in layers]
    assert layout == [
        (nn.Conv2d, 16, 32, 1, 1),
        (nn.ConvTranspose2d, 32, 32, 3, 2),
        (nn.Conv2d, 32, 32, 3, 2),
        (nn.Conv2d, 32, 3, 1, 1),
    ]


def test_the_detector_is_the_papers_where_that_fits() -> None:
    layers = [layer for layer in build_detector((16, 32, 32)) if list(layer.parameters())]
    assert [tuple(layer.weight.shape) for layer in layers] == [(32, 16, 1, 1), (32, 32, 3, 3), (8, 32, 1, 1), (2, 2048)]


@pytest.mark.parametrize("item", [(16, 32, 32), (3, 7, 5), (128, 20), (12,), (2, 3, 4, 5)])
def test_the_detector_takes_any_item(item: Shape) -> None:
    assert said(build_detector(item), torch.randn(2, *item)).shape == (2, 2)


def test_standardised_items_have_no_mean_and_unit_deviation() -> None:
    items = torch.randn(50, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 5 + torch.arange(4.0)
    items[:, 2] = 7.0  # a dead channel
    by_channel = Standardised(items.half(), by_place=False)(items.half())
    assert by_channel[:, :2].mean(dim=(0, 2, 3)).tolist() == pytest.approx([0, 0], abs=1e-4)
    assert by_channel[:, :2].std(dim=(0, 2, 3)).tolist() == pytest.approx([1, 1], abs=1e-2)
    by_place = Standardised(items, by_place=True)(items)
    assert by_place.mean(dim=0).abs().max() < 1e-5
    assert not by_place[:, 2].any()
