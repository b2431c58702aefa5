"""Cuts a model in two at a layer, without copying a parameter."""

from __future__ import annotations

from torch import nn

from fedrpc.errors import ConfigError
from fedrpc.models.base import staged


def split(model: nn.Module, i: int) -> tuple[nn.Module, nn.Module]:
    """The head up to and including stage `i`, and the tail from there to the logits.

    Both halves hold the model's own modules: training a half trains the model, and putting a half in evaluation
    mode does the same to these layers of the model.

    Args:
        model: Any registered model.
        i: The cut, 0 to `model.num_cuts - 1`.
    """
    whole = staged(model, "a split")
    if not 0 <= i < whole.num_cuts:
        raise ConfigError(
            f"cut {i} of {type(model).__name__} is out of range; legal cuts are 0 to {whole.num_cuts - 1}"
        )
    stages = list(whole.stages)
    head, tail = nn.Sequential(*stages[: i + 1]), nn.Sequential(*stages[i + 1 :], whole.classifier)
    # Only the two wrappers take the model's mode: a layer that someone froze in evaluation mode stays so.
    head.training = tail.training = whole.training
    return head, tail
