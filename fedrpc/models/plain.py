"""Builds a plain torch network of the user's own, and explains in one line why it is none for the data at hand."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedrpc.errors import ConfigError, describe_exception
from fedrpc.models.base import Builder, Model, Shape

_BATCH = 2  # samples in the trial


def build_plain(name: str, make: Builder, shape: Shape, num_classes: int, options: Mapping[str, object]) -> nn.Module:
    """A freshly initialised network, tried once on samples of `shape`.

    A Sequential that ends in a linear layer becomes a `Model`, which can be cut and has features.

    Args:
        name: What messages call it.
        make: A class or a function; it gets those of `shape`, `num_classes` and `in_channels` that it asks for.
        options: Further arguments.

    Raises:
        ConfigError: It cannot be built, or does not give one logit for each class.
    """
    given = {"shape": shape, "num_classes": num_classes, "in_channels": shape[0], **options}
    arguments = _choose_arguments(name, make, given)
    network = _explained(name, make, "cannot be built", lambda: make(**arguments), shape)
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"model '{name}' gives {type(network).__name__}, expected a torch.nn.Module, at {_locate(make)}"
        )
    sample = torch.zeros(_BATCH, *shape)
    logits = _try(name, make, network, sample)
    if not isinstance(logits, torch.Tensor) or logits.shape != (_BATCH, num_classes):
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ConfigError(
            f"model '{name}' gives {got} for {_BATCH} samples of shape {shape}: expected {(_BATCH, num_classes)}, a "
            f"logit for each class, at {_locate(type(network).forward)}"
        )
    return _divide(network, sample)


def _choose_arguments(name: str, make: Builder, given: Mapping[str, object]) -> dict[str, object]:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(
            f"model '{name}' cannot be called; expected a class or function that builds a network"
        ) from None
    for each in parameters:
        is_required = each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if is_required and (each.name not in given or each.kind is each.POSITIONAL_ONLY):
            raise ConfigError(
                f"model '{name}' has a parameter '{each.name}' without a default, which fedrpc cannot know: it gives "
                f"shape, num_classes and in_channels to those that ask for them; give it a default, at {_locate(make)}"
            )
    return {each.name: given[each.name] for each in parameters if each.name in given}


def _locate(thing: Any) -> str:
    """File and line of a class's constructor, or of a function."""
    code = getattr(inspect.unwrap(thing.__init__ if inspect.isclass(thing) else thing), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else f"{thing.__module__}.{thing.__qualname__}"


def _try(name: str, make: Builder, network: nn.Module, sample: torch.Tensor) -> Any:
    """What a copy of the network gives for zeros; the network itself stays as it was built."""
    trial = copy.deepcopy(network).eval()
    with torch.no_grad():
        return _explained(name, make, "fails", lambda: trial(sample), tuple(sample.shape[1:]))


def _explained(name: str, make: Builder, what: str, work: Any, shape: Shape) -> Any:
    try:
        return work()
    except Exception as error:
        why = describe_exception(error, make.__module__)
        raise ConfigError(f"model '{name}' {what} for samples of shape {shape}: {why}") from None


def _divide(network: nn.Module, sample: torch.Tensor) -> nn.Module:
    """A Sequential that ends in a linear layer on flat features as a `Model`; any other network as it is."""
    if isinstance(network, Model) or not isinstance(network, nn.Sequential) or len(network) < 2:
        return network
    *stages, last = network
    if type(network).forward is not nn.Sequential.forward or not isinstance(last, nn.Linear):
        return network
    divided = Model(stages, last)
    with torch.no_grad():
        features = copy.deepcopy(divided).eval().features(sample)
    return divided if features.dim() == 2 else network
