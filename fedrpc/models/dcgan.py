"""The DCGAN discriminator and one path of the multi-path generator of MP-GAN."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from fedrpc.errors import ConfigError

WIDTH = 64  # of the outermost convolution; each one further in is twice as wide
# The innermost convolution by image size: stride and padding that turn the last map into a single pixel.
INNERMOST = {32: (2, 1), 64: (1, 0)}


def _find_innermost(size: int) -> tuple[int, int]:
    if size not in INNERMOST:
        raise ConfigError(f"DCGAN images are 32x32 or 64x64, got {size}x{size}; pad or resize them")
    return INNERMOST[size]


def _list_widths(width: int) -> tuple[int, ...]:
    return width, 2 * width, 4 * width, 8 * width


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


class Discriminator(nn.Module):
    """From images in [-1, 1] to one logit each: real against generated.

    Args:
        channels: Of the images.
        size: Side of the square images, 32 or 64.
        width: Of the first convolution.
        num_classes: Above 0, a logit for each class follows the first one (an auxiliary head).
    """

    def __init__(self, channels: int, size: int = 32, width: int = WIDTH, num_classes: int = 0) -> None:
        super().__init__()
        stride, padding = _find_innermost(size)
        widths = _list_widths(width)
        layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        for narrow, wide in pairwise(widths):
            layers += [nn.Conv2d(narrow, wide, 4, 2, 1, bias=False), nn.BatchNorm2d(wide), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1 + num_classes, 4, stride, padding, bias=False))
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """A logit for each image, of shape (batch,); with an auxiliary head (batch, 1 + num_classes)."""
        logits: Tensor = self.layers(x).flatten(1)
        return logits[:, 0] if logits.shape[1] == 1 else logits


class GeneratorPath(nn.Module):
    """From noise to images in [-1, 1], the mirror of the discriminator.

    Args:
        channels: Of the images.
        nz: Length of the noise vector.
        size: Side of the square images, 32 or 64.
        width: Of the last convolution's input.
    """

    def __init__(self, channels: int, nz: int = 100, size: int = 32, width: int = WIDTH) -> None:
        super().__init__()
        stride, padding = _find_innermost(size)
        self.nz = nz
        widths = _list_widths(width)[::-1]
        layers: list[nn.Module] = [nn.ConvTranspose2d(nz, widths[0], 4, stride, padding, bias=False)]
        for wide, narrow in pairwise(widths):
            layers += [nn.BatchNorm2d(wide), nn.ReLU(), nn.ConvTranspose2d(wide, narrow, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(widths[-1]), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(widths[-1], channels, 4, 2, 1, bias=False), nn.Tanh())
        self.apply(_initialise)

    def forward(self, z: Tensor) -> Tensor:
        """Images for noise of shape (batch, nz)."""
        images: Tensor = self.layers(z.reshape(len(z), self.nz, 1, 1))
        return images
