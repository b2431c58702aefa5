"""Two convolutions with dropout and without BatchNorm, for MNIST: what stands in for the network of MP-GAN's thesis.

The thesis does not give its classifier. These are the layers of a widely used public FedAvg code whose optimizer, rate
and partition are the thesis's own, so it is likely the same network; that is an inference.
"""

from __future__ import annotations

from torch import nn

from fedrpc.models.base import Model, Shape, architecture, is_image

WIDTHS, KERNEL, HIDDEN = (10, 20), 5, 50
_LEAST = 16  # a side that both convolutions and poolings leave something of


def _count_side(side: int) -> int:
    """A map's side after two convolutions without padding, each with a pooling by 2."""
    for _ in WIDTHS:
        side = (side - KERNEL + 1) // 2
    return side


@architecture(
    "cnn-dropout", takes="a CxHxW image of at least 16x16, such as 1x28x28", fits=lambda s: is_image(s, _LEAST)
)
class CnnDropout(Model):
    """Two 5x5 convolutions of 10 and 20 filters and a hidden layer of 50; 21,840 parameters on 1x28x28 and 10 classes.

    Args:
        shape: Channels, height and width of a sample.
        num_classes: How many logits.
    """

    def __init__(self, shape: Shape, num_classes: int) -> None:
        first, second = WIDTHS
        flat = second * _count_side(shape[1]) * _count_side(shape[2])
        stages = [
            nn.Sequential(nn.Conv2d(shape[0], first, KERNEL), nn.MaxPool2d(2), nn.ReLU()),
            nn.Sequential(nn.Conv2d(first, second, KERNEL), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU()),
            nn.Sequential(nn.Flatten(), nn.Linear(flat, HIDDEN), nn.ReLU(), nn.Dropout()),
        ]
        super().__init__(stages, nn.Linear(HIDDEN, num_classes))
