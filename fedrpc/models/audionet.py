"""AudioNet, FLea's network for log-mel spectrograms of any size."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedrpc.models.base import Model, Shape, architecture, is_image

WIDTHS = (8, 16, 32, 64)


def _block(channels: int, width: int, kernel: int) -> nn.Sequential:
    # ReLU before BatchNorm, as in the authors' code: the shared features are the normalised ones.
    convolution = nn.Conv2d(channels, width, kernel, stride=2, padding=kernel // 2)
    return nn.Sequential(convolution, nn.ReLU(), nn.BatchNorm2d(width))


@architecture("audionet", takes="a CxHxW spectrogram of any size, such as 2x64x344", fits=is_image)
class AudioNet(Model):
    """Four strided convolutions, a global average and one linear layer.

    Args:
        shape: Channels, mel bands and frames of a sample.
        num_classes: How many logits.
    """

    split_layer_default = 1

    def __init__(self, shape: Shape, num_classes: int) -> None:
        blocks = [_block(shape[0], WIDTHS[0], 5), *(_block(*pair, 3) for pair in pairwise(WIDTHS))]
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        super().__init__([*blocks, pool], nn.Linear(WIDTHS[-1], num_classes))
