"""Puts GroupNorm in the place of BatchNorm, whose statistics differ between clients with different classes."""

from __future__ import annotations

import math

from torch import nn

_MOST_GROUPS = 32


def replace_batch_norm(module: nn.Module) -> nn.Module:
    """The network with a GroupNorm of up to 32 groups for each BatchNorm; other layers and their weights stay."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        groups = math.gcd(_MOST_GROUPS, module.num_features)
        return nn.GroupNorm(groups, module.num_features, eps=module.eps, affine=module.affine)
    for name, child in module.named_children():
        setattr(module, name, replace_batch_norm(child))
    return module
