"""HARNet, FLea's network for human activity from three acceleration signals."""

from __future__ import annotations

from torch import Tensor, nn

from fedrpc.errors import ConfigError
from fedrpc.models.base import Model, Shape, architecture
from fedrpc.models.columns import ColumnConv2d

AXES = 3
# Channels in and out, height of the kernel, stride; the padding of 1 in both axes widens the map at every block.
BLOCKS = ((1, 64, 3, 3), (64, 128, 6, 2), (128, 256, 6, 2), (256, 256, 6, 2))


class FirstAxes(nn.Module):
    """Turns (N, channels, time) signals into (N, 1, time, 3) images of the first three channels.

    Such images pass unchanged; a single (channels, time) signal becomes a batch of one.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The signals as images."""
        if x.ndim == 4:
            return x
        if x.ndim == 2:
            x = x.unsqueeze(0)
        return x[:, :AXES].transpose(1, 2).unsqueeze(1)


def _find_length(shape: Shape) -> int:
    """How many time steps a sample has, or 0 when it is not such a signal."""
    if len(shape) == 2 and shape[0] >= AXES:
        return shape[1]
    return shape[1] if len(shape) == 3 and shape[0] == 1 and shape[2] == AXES else 0


def _reduce_height(length: int) -> int:
    """How many of `length` time steps remain after the four blocks; below 1 when it is too short."""
    for _, _, kernel, stride in BLOCKS:
        length = (length + 2 - kernel) // stride + 1
    return length


def _block(channels: int, width: int, kernel: int, stride: int) -> list[nn.Module]:
    return [ColumnConv2d(channels, width, kernel, stride, padding=1), nn.BatchNorm2d(width), nn.ReLU()]


@architecture(
    "harnet",
    takes="signals of at least 3 channels and 64 time steps, such as (6, 128), or a 1x128x3 image of three",
    fits=lambda s: _reduce_height(_find_length(s)) >= 1,
)
class HarNet(Model):
    """Four convolutions along time and one linear layer.

    Args:
        shape: (channels, time), of which the first three channels are used, or (1, time, 3).
        num_classes: How many logits.
    """

    split_layer_default = 1

    def __init__(self, shape: Shape, num_classes: int) -> None:
        height = _reduce_height(_find_length(shape))
        if height < 1:
            raise ConfigError(f"harnet cannot read samples of shape {shape}; it takes (6, 128) or (1, 128, 3)")
        first, *rest = (_block(*block) for block in BLOCKS)
        stages = [nn.Sequential(FirstAxes(), *first), *(nn.Sequential(*block) for block in rest), nn.Flatten()]
        flat = BLOCKS[-1][1] * height * (AXES + 2 * len(BLOCKS))
        super().__init__(stages, nn.Linear(flat, num_classes))

    def select_input(self, x: Tensor) -> Tensor:
        """The three axes that the network uses."""
        return FirstAxes()(x)  # type: ignore[no-any-return]
