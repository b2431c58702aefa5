"""Matches models and data: builds a model for a data set's shape, and chooses a default one."""

from __future__ import annotations

import inspect

from torch import nn

from fedrpc.errors import ConfigError
from fedrpc.models.base import MODELS, Architecture, Shape
from fedrpc.models.norm import replace_batch_norm
from fedrpc.models.plain import build_plain

BY_DATASET = {
    "mnist": "zda-mnist",
    "fmnist": "zda-mnist",
    "cifar10": "zda-cifar",
    "cifar100": "zda-cifar",
    "uci-har": "harnet",
    "urbansound8k": "audionet",
    "esc10": "audionet",
}


def build(name: str, shape: Shape, num_classes: int, *, norm: str | None = None, **options: object) -> nn.Module:
    """A freshly initialised model for samples of `shape`.

    Args:
        name: A registered model.
        shape: Of one sample, without the batch.
        num_classes: How many logits.
        norm: "group" for GroupNorm in place of BatchNorm.
        options: Options of this model, such as `padding` of zda-mnist.

    Raises:
        ConfigError: The model does not accept such samples or does not know an option; names alternatives.
    """
    builder, shape = MODELS[name], tuple(shape)
    if num_classes < 1:
        raise ConfigError(f"model '{name}' needs at least one class, got {num_classes}")
    if isinstance(builder, Architecture) and not builder.fits(shape):
        raise ConfigError(
            f"model '{name}' takes {builder.takes}; the data has samples of shape {shape}. "
            f"Models that take these: {', '.join(list_fitting(shape)) or 'none'}. Choose one with --model"
        )
    if MODELS.find_owner(name) and not isinstance(builder, Architecture):
        model = build_plain(name, builder, shape, num_classes, options)
    else:
        _check_options(name, options)
        model = builder(shape, num_classes, **options)
    return replace_batch_norm(model) if norm == "group" else model


def list_fitting(shape: Shape) -> list[str]:
    """The names of the models known to accept samples of `shape`."""
    known = ((name, MODELS[name]) for name in MODELS)
    return [name for name, builder in known if isinstance(builder, Architecture) and builder.fits(shape)]


def choose_default(shape: Shape, dataset: str) -> str:
    """The model to use when none is configured: by the data set's name if it is known, else by the shape.

    Raises:
        ConfigError: Neither name nor shape has a default.
    """
    named = _find_by_dataset(dataset)
    if named in (fits := list_fitting(tuple(shape))):
        return named
    guess = _guess_by_shape(tuple(shape))
    if guess in fits:
        return guess
    raise ConfigError(
        f"no default model for data set '{dataset}' with samples of shape {tuple(shape)}; name one with --model: "
        f"{', '.join(fits or MODELS)}"
    )


def _find_by_dataset(dataset: str) -> str:
    # 'fmnist-mini' and 'urbansound8k-part' are parts of the sets that they are named after.
    whole = next((name for name in BY_DATASET if dataset == name or dataset.startswith(f"{name}-")), "")
    return BY_DATASET.get(whole, "")


def _guess_by_shape(shape: Shape) -> str:
    if len(shape) == 1:
        return "mlp"
    if len(shape) == 2 or shape[2:] == (3,):
        return "harnet"
    if len(shape) != 3:
        return ""
    if shape[1] != shape[2]:
        return "audionet" if shape[0] <= 2 else ""
    return {1: "zda-mnist", 3: "zda-cifar"}.get(shape[0], "")


def _check_options(name: str, options: dict[str, object]) -> None:
    builder = MODELS[name]
    make = builder.make if isinstance(builder, Architecture) else builder
    parameters = list(inspect.signature(make).parameters.values())[2:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for option in options:
        if option not in known:
            raise ConfigError(f"model '{name}' has no option '{option}'; it has: {', '.join(known) or 'none'}")
