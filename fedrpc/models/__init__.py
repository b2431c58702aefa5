"""Networks by name, each of which can be cut at a layer."""

from __future__ import annotations

from fedrpc.models import audionet as _audionet
from fedrpc.models import cnn_dropout as _cnn_dropout
from fedrpc.models import dpms as _dpms
from fedrpc.models import harnet as _harnet
from fedrpc.models import mlp as _mlp
from fedrpc.models import mobilenetv2 as _mobilenetv2
from fedrpc.models import resnet as _resnet
from fedrpc.models import zda as _zda
from fedrpc.models.base import MODELS, Architecture, Builder, Model, Shape, architecture, require_stages, unwrap
from fedrpc.models.cut import cut
from fedrpc.models.pairing import build, choose_default, list_fitting
from fedrpc.models.state import count_payload_bytes, load, read_tensors

# Importing a module registers its architectures.
_REGISTERED = (_audionet, _cnn_dropout, _dpms, _harnet, _mlp, _mobilenetv2, _resnet, _zda)

__all__ = [
    "MODELS",
    "Architecture",
    "Builder",
    "Model",
    "Shape",
    "architecture",
    "build",
    "choose_default",
    "count_payload_bytes",
    "cut",
    "list_fitting",
    "load",
    "read_tensors",
    "require_stages",
    "unwrap",
]
