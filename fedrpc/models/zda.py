"""The two small networks of Fed-ZDA (for MNIST-like and for CIFAR-like images), with BatchNorm to invert.

The paper does not state the padding of the convolutions; the defaults keep the size of the image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedrpc.errors import ConfigError
from fedrpc.models.base import Model, Shape, architecture, is_image


class _Block(nn.Sequential):
    """Convolution, BatchNorm, pooling and ReLU on maps with channels last: on a CPU a third faster to train."""

    def __init__(self, channels: int, width: int, kernel: int, padding: int) -> None:
        convolution = nn.Conv2d(channels, width, kernel, padding=padding)
        super().__init__(convolution, nn.BatchNorm2d(width), nn.MaxPool2d(2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """The smaller map."""
        replaced = not isinstance(self[1], nn.BatchNorm2d)  # for Opacus, which cannot read that layout
        if x.stride(1) != 1 and not replaced:
            x = x.clone(memory_format=torch.channels_last)  # a grey image has both layouts until it is copied
        y: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return y


def _count_features(shape: Shape, width: int, kernel: int, padding: int) -> int:
    """How many features two blocks make of one sample."""
    if padding < 0:
        raise ConfigError(f"padding must be 0 or more, got {padding}")
    height, breadth = shape[1:]
    for _ in range(2):
        height, breadth = ((side + 2 * padding - kernel + 1) // 2 for side in (height, breadth))
    if min(height, breadth) < 1:
        raise ConfigError(
            f"an image of {shape[1]}x{shape[2]} is too small for two {kernel}x{kernel} convolutions with padding "
            f"{padding}; raise the model's padding or use larger images"
        )
    return width * height * breadth


@architecture("zda-mnist", takes="a CxHxW image of at least 4x4, such as 1x28x28", fits=lambda s: is_image(s, 4))
class ZdaMnist(Model):
    """Two 5x5 convolutions of 16 and 32 filters and one linear layer.

    Args:
        shape: Channels, height and width of a sample.
        num_classes: How many logits.
        padding: Of both convolutions; 2 keeps the size.
    """

    def __init__(self, shape: Shape, num_classes: int, padding: int = 2) -> None:
        flat = _count_features(shape, 32, 5, padding)
        stages = [_Block(shape[0], 16, 5, padding), _Block(16, 32, 5, padding), nn.Flatten()]
        super().__init__(stages, nn.Linear(flat, num_classes))


@architecture("zda-cifar", takes="a CxHxW image of at least 4x4, such as 3x32x32", fits=lambda s: is_image(s, 4))
class ZdaCifar(Model):
    """Two 3x3 convolutions of 16 filters and hidden layers of 80 and 60.

    Args:
        shape: Channels, height and width of a sample.
        num_classes: How many logits.
        padding: Of both convolutions; 1 keeps the size.
    """

    def __init__(self, shape: Shape, num_classes: int, padding: int = 1) -> None:
        flat = _count_features(shape, 16, 3, padding)
        stages = [
            _Block(shape[0], 16, 3, padding),
            _Block(16, 16, 3, padding),
            nn.Sequential(nn.Flatten(), nn.Linear(flat, 80), nn.ReLU()),
            nn.Sequential(nn.Linear(80, 60), nn.ReLU()),
        ]
        super().__init__(stages, nn.Linear(60, num_classes))
