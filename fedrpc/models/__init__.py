"""The networks of every method, by name, each of which can be cut at a layer."""

from __future__ import annotations

from fedrpc.models import audionet as _audionet
from fedrpc.models import dpms as _dpms
from fedrpc.models import harnet as _harnet
from fedrpc.models import mobilenetv2 as _mobilenetv2
from fedrpc.models import resnet as _resnet
from fedrpc.models import zda as _zda
from fedrpc.models.base import MODELS, Architecture, Builder, Model, Shape, architecture, staged, unwrapped
from fedrpc.models.pairing import build, default_for, fitting
from fedrpc.models.split import split
from fedrpc.models.state import load, payload_bytes, tensors

# Importing a module registers its architectures.
_REGISTERED = (_audionet, _dpms, _harnet, _mobilenetv2, _resnet, _zda)

__all__ = [
    "MODELS",
    "Architecture",
    "Builder",
    "Model",
    "Shape",
    "architecture",
    "build",
    "default_for",
    "fitting",
    "load",
    "payload_bytes",
    "split",
    "staged",
    "tensors",
    "unwrapped",
]
