"""The networks of FedDPMS and FedVAE: a classifier on a latent vector, and a decoder back to images.

The widths of `dpms` are those of the paper's Tables 3 and 4, which name neither activations nor strides: ReLU follows
every convolution but the last, and the transposed convolutions that undo a pooling have stride 2.

`dpms-code` has the layers of the authors' code: PReLU and BatchNorm, dropout after each pooling, other widths, and a
latent mean without bounds. Its classifier reads the latent mean, as in the paper; in their code it has a layer of its
own, of the same size, in that place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrpc.errors import ConfigError
from fedrpc.models.base import Model, Shape, architecture, is_image


@dataclass(frozen=True)
class _Widths:
    """Filters of each convolution; a group of the encoder ends in a pooling; strides of the decoder's layers.

    Attributes:
        code: Whether layers are those of the authors' code.
    """

    encoder: tuple[tuple[int, ...], ...]
    decoder: tuple[tuple[int, int], ...]
    last_stride: int
    latent: int
    code: bool = False


GREY = _Widths(encoder=((16,), (32,)), decoder=((16, 2),), last_stride=2, latent=32)
COLOUR = _Widths(encoder=((32, 32), (64, 64)), decoder=((64, 1), (64, 2), (32, 1)), last_stride=2, latent=128)
CODE_GREY = _Widths(encoder=((32, 32), (64,)), decoder=((64, 1), (32, 2)), last_stride=2, latent=32, code=True)
CODE_COLOUR = _Widths(
    encoder=((32, 32), (64, 64)), decoder=((64, 1), (32, 2), (32, 1)), last_stride=2, latent=128, code=True
)
_DROPOUT = 0.2


def _fits(shape: Shape) -> bool:
    return is_image(shape, 4) and shape[1] % 4 == 0 and shape[2] % 4 == 0


def _widths(shape: Shape, code: bool) -> _Widths:
    if not _fits(shape):
        raise ConfigError(f"dpms networks take CxHxW images with sides that 4 divides, got {shape}")
    if code:
        return CODE_GREY if shape[0] == 1 else CODE_COLOUR
    return GREY if shape[0] == 1 else COLOUR


def _flat(shape: Shape, code: bool) -> tuple[int, int, int]:
    """The encoder's last map: channels, height, width."""
    return _widths(shape, code).encoder[-1][-1], shape[1] // 4, shape[2] // 4


def _latent(shape: Shape, latent: int | None, code: bool) -> int:
    latent = _widths(shape, code).latent if latent is None else latent
    if latent < 1:
        raise ConfigError(f"the latent dimension must be at least 1, got {latent}")
    return latent


def _head(shape: Shape, latent: int, code: bool) -> nn.Linear:
    channels, height, breadth = _flat(shape, code)
    return nn.Linear(channels * height * breadth, latent)


def _encoder(shape: Shape, code: bool) -> list[nn.Module]:
    groups: list[nn.Module] = []
    channels = shape[0]
    for group in _widths(shape, code).encoder:
        layers: list[nn.Module] = []
        for width in group:
            first = not groups and not layers
            layers.append(nn.Conv2d(channels, width, 3, padding=1, bias=not (code and first)))
            layers += _activate(width, code)
            channels = width
        if code:
            groups.append(nn.Sequential(*layers, nn.MaxPool2d(2), nn.Dropout(_DROPOUT)))
        else:  # the same as pooling last, value by value, and a quarter of the work for the last ReLU
            groups.append(nn.Sequential(*layers[:-1], nn.MaxPool2d(2), layers[-1]))
    return [*groups, nn.Flatten()]


def _activate(width: int, code: bool) -> list[nn.Module]:
    """What follows a convolution of so many filters."""
    return [nn.PReLU(), nn.BatchNorm2d(width)] if code else [nn.ReLU()]


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
        code: Whether layers are those of the authors' code.
    """

    def __init__(self, shape: Shape, latent: int | None = None, *, code: bool = False) -> None:
        widths, flat = _widths(shape, code), _flat(shape, code)
        channels = flat[0]
        layers: list[nn.Module] = [
            nn.Linear(_latent(shape, latent, code), flat[0] * flat[1] * flat[2]),
            nn.Unflatten(1, flat),
        ]
        for width, stride in widths.decoder:
            layers += [_up(channels, width, stride), *_activate(width, code)]
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

    code: bool = False  # whether it has the layers of the authors' code, and a latent mean without bounds

    def __init__(self, shape: Shape, num_classes: int, latent: int | None = None) -> None:
        code = self.code
        latent = _latent(shape, latent, code)
        head = _head(shape, latent, code)
        mu = nn.Sequential(head) if code else nn.Sequential(head, nn.Sigmoid())
        super().__init__([*_encoder(shape, code), mu], nn.Linear(latent, num_classes))
        self.shape, self.latent = tuple(shape), latent
        _use_channels_last(self)

    @property
    def encoder(self) -> nn.Sequential:
        """From an image to the flat map under the heads; the model's own modules."""
        return nn.Sequential(*list(self.stages)[:-1])

    @property
    def mu(self) -> nn.Module:
        """From the encoder's output to the latent mean, each coordinate in [0, 1] unless it is the code's network."""
        return self.stages[-1]


@architecture("dpms-code", takes="a CxHxW image with sides that 4 divides, such as 1x28x28 or 3x32x32", fits=_fits)
class DpmsCode(Dpms):
    """The same with the layers and widths of the authors' code."""

    code = True


class Vae(Dpms):
    """A `Dpms` with the head of the latent's log-variance and a decoder: Table 4.

    It shares the modules of the `Dpms`; its own tensors are `logvar.*` and `decoder.*`.

    Args:
        plain: The network to extend.
    """

    def __init__(self, plain: Dpms) -> None:
        Model.__init__(self, plain.stages, plain.classifier)
        self.shape, self.latent = plain.shape, plain.latent
        self.code = plain.code
        self.logvar = _head(self.shape, self.latent, plain.code)
        self.decoder = Decoder(self.shape, self.latent, code=plain.code)

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
