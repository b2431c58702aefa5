"""Cuts a model in two at a layer, without copying a parameter."""

from __future__ import annotations

from torch import nn

from fedrpc.errors import ConfigError
from fedrpc.models.base import require_stages


def cut(model: nn.Module, layer: int) -> tuple[nn.Module, nn.Module]:
    """The head up to and including stage `layer`, and the tail from there to the logits.

    Both halves hold the model's own modules: training a half trains the model, and a half's mode is that of its
    layers in the model.

    Args:
        model: Any registered model.
        layer: Where to cut, 0 to `model.num_cuts - 1`.
    """
    whole = require_stages(model, "a cut")
    if not 0 <= layer < whole.num_cuts:
        raise ConfigError(
            f"cut {layer} of {type(model).__name__} is out of range; legal cuts are 0 to {whole.num_cuts - 1}"
        )
    stages = list(whole.stages)
    head, tail = nn.Sequential(*stages[: layer + 1]), nn.Sequential(*stages[layer + 1 :], whole.classifier)
    # Only the two wrappers get the model's mode: a layer frozen in evaluation mode stays frozen.
    head.training = tail.training = whole.training
    return head, tail
