"""MobileNetV2 in FLea's variant for 32x32 images: ReLU, gentle strides, and convolutions on some shortcuts."""

from __future__ import annotations

from torch import Tensor, nn

from fedrpc.models.base import Model, Shape, architecture, is_image

# Expansion, width, repetitions, stride of the first repetition.
GROUPS = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STEM, LAST = 32, 1280


def _conv(channels: int, width: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(width)]


class Block(nn.Module):
    """Expand, filter each channel, project back; with a shortcut when the size of the map stays."""

    def __init__(self, channels: int, width: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = expansion * channels
        self.path = nn.Sequential(
            *_conv(channels, inner),
            nn.ReLU(),
            *_conv(inner, inner, kernel=3, stride=stride, groups=inner),
            nn.ReLU(),
            *_conv(inner, width),
        )
        self.has_shortcut = stride == 1
        self.shortcut = nn.Sequential(*(_conv(channels, width) if self.has_shortcut and channels != width else ()))

    def forward(self, x: Tensor) -> Tensor:
        """The block's map."""
        out: Tensor = self.path(x)
        return out + self.shortcut(x) if self.has_shortcut else out


def _blocks() -> list[nn.Module]:
    blocks: list[nn.Module] = []
    channels = STEM
    for expansion, width, repetitions, stride in GROUPS:
        for repetition in range(repetitions):
            blocks.append(Block(channels, width, expansion, 1 if repetition else stride))
            channels = width
    return blocks


@architecture("mobilenetv2", takes="a CxHxW image of at least 8x8, such as 3x32x32", fits=lambda s: is_image(s, 8))
class MobileNetV2(Model):
    """Seventeen inverted residual blocks; cut i is after block i, and cut 17 after the pooled 1280 features.

    Args:
        shape: Channels, height and width of a sample.
        num_classes: How many logits.
    """

    def __init__(self, shape: Shape, num_classes: int) -> None:
        first, *rest = _blocks()
        stem = nn.Sequential(*_conv(shape[0], STEM, kernel=3), nn.ReLU(), first)
        pool = nn.Sequential(*_conv(GROUPS[-1][1], LAST), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        super().__init__([stem, *rest, pool], nn.Linear(LAST, num_classes))
