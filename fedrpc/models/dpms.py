"""The networks of FedDPMS and FedVAE: a classifier on a latent vector, and a decoder back to images.

The widths are those of the paper's Tables 3 and 4, which name neither activations nor strides: ReLU follows every
convolution but the last, and the transposed convolutions that undo a pooling have stride 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrpc.errors import ConfigError
from fedrpc.models.base import Model, Shape, architecture, is_image


@dataclass(frozen=True)
class _Widths:
    """Filters of each convolution; a group of the encoder ends in a pooling; strides of the decoder's layers."""

    encoder: tuple[tuple[int, ...], ...]
    decoder: tuple[tuple[int, int], ...]
    last_stride: int
    latent: int


GREY = _Widths(encoder=((16,), (32,)), decoder=((16, 2),), last_stride=2, latent=32)
COLOUR = _Widths(encoder=((32, 32), (64, 64)), decoder=((64, 1), (64, 2), (32, 1)), last_stride=2, latent=128)


def _fits(shape: Shape) -> bool:
    return is_image(shape, 4) and shape[1] % 4 == 0 and shape[2] % 4 == 0


def _widths(shape: Shape) -> _Widths:
    if not _fits(shape):
        raise ConfigError(f"dpms networks take CxHxW images with sides that 4 divides, got {shape}")
    return GREY if shape[0] == 1 else COLOUR


def _flat(shape: Shape) -> tuple[int, int, int]:
    """The encoder's last map: channels, height, width."""
    return _widths(shape).encoder[-1][-1], shape[1] // 4, shape[2] // 4


def _latent(shape: Shape, latent: int | None) -> int:
    latent = _widths(shape).latent if latent is None else latent
    if latent < 1:
        raise ConfigError(f"the latent dimension must be at least 1, got {latent}")
    return latent


def _head(shape: Shape, latent: int) -> nn.Linear:
    channels, height, breadth = _flat(shape)
    return nn.Linear(channels * height * breadth, latent)


def _encoder(shape: Shape) -> list[nn.Module]:
    groups: list[nn.Module] = []
    channels = shape[0]
    for group in _widths(shape).encoder:
        layers: list[nn.Module] = []
        for width in group:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        # The same as pooling last, value by value, and a quarter of the work for the last ReLU.
        groups.append(nn.Sequential(*layers[:-1], nn.MaxPool2d(2), layers[-1]))
    return [*groups, nn.Flatten()]


def _up(channels: int, width: int, stride: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(channels, width, 3, stride=stride, padding=1, output_padding=stride - 1)


def _use_channels_last(module: nn.Module) -> None:
    """Stores filters, and so images, channels last: halves a training step on 64 grey images, from 24 to 12 ms."""
    module.to(memory_format=torch.channels_last)


class Decoder(nn.Sequential):
    """From a latent vector to an image in [0, 1].

    Args:
        shape: Channels, height and width of the image.
        latent: Length of the latent vector; the paper's for this kind of image by default.
    """

    def __init__(self, shape: Shape, latent: int | None = None) -> None:
        widths, flat = _widths(shape), _flat(shape)
        channels = flat[0]
        layers: list[nn.Module] = [
            nn.Linear(_latent(shape, latent), flat[0] * flat[1] * flat[2]),
            nn.Unflatten(1, flat),
        ]
        for width, stride in widths.decoder:
            layers += [_up(channels, width, stride), nn.ReLU()]
            channels = width
        super().__init__(*layers, _up(channels, shape[0], widths.last_stride), nn.Sigmoid())
        _use_channels_last(self)


@architecture("dpms", takes="a CxHxW image with sides that 4 divides, such as 1x28x28 or 3x32x32", fits=_fits)
class Dpms(Model):
    """Encoder, latent mean in [0, 1], classifier on the mean: Table 3, the base network of every method.

    Grey images get the narrow network of the paper's FMNIST column, others the wide one of its CIFAR column.

    Args:
        shape: Channels, height and width of a sample.
        num_classes: How many logits.
        latent: Length of the latent vector; 32 for grey images and 128 for others by default.
    """

    def __init__(self, shape: Shape, num_classes: int, latent: int | None = None) -> None:
        latent = _latent(shape, latent)
        mu = nn.Sequential(_head(shape, latent), nn.Sigmoid())
        super().__init__([*_encoder(shape), mu], nn.Linear(latent, num_classes))
        self.shape, self.latent = tuple(shape), latent
        _use_channels_last(self)

    @property
    def encoder(self) -> nn.Sequential:
        """From an image to the flat map under the heads; the model's own modules."""
        return nn.Sequential(*list(self.stages)[:-1])

    @property
    def mu(self) -> nn.Module:
        """From the encoder's output to the latent mean, each coordinate in [0, 1]."""
        return self.stages[-1]


class Vae(Dpms):
    """A `Dpms` with the head of the latent's log-variance and a decoder: Table 4.

    It shares the modules of the `Dpms`; its own tensors are `logvar.*` and `decoder.*`.

    Args:
        plain: The network to extend.
    """

    def __init__(self, plain: Dpms) -> None:
        Model.__init__(self, plain.stages, plain.classifier)
        self.shape, self.latent = plain.shape, plain.latent
        self.logvar = _head(self.shape, self.latent)
        self.decoder = Decoder(self.shape, self.latent)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the log-variance of the latent vector of each image."""
        flat = self.encoder(x)
        return self.mu(flat), self.logvar(flat)


def require_latent(module: nn.Module, purpose: str) -> Dpms:
    """`module` as a `Dpms`, or a ConfigError that says what `purpose` needs."""
    if isinstance(module, Dpms):
        return module
    raise ConfigError(
        f"{purpose} needs a latent vector to decode, which {type(module).__name__} does not have; set --model dpms"
    )
