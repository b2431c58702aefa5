"""Serialises messages as safetensors for checkpoints and client stores, flattened as on the wire."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from fedrpc.errors import WireError
from fedrpc.wire.message import Tensors, flatten, is_message, unflatten

_METADATA_KEY = "fedrpc"  # one entry of metadata, since the order of several is random
_SEPARATOR = "|"  # between a part's name, which cannot contain it, and a tensor's path


def dumps(value: Any) -> bytes:
    """Serialises a message, or a plain dict of tensors."""
    if is_message(type(value)):
        flat = {
            f"{part.name}{_SEPARATOR}{path}": tensor for part in flatten(value) for path, tensor in part.tensors.items()
        }
    else:
        flat = dict(value)
    # safetensors sorts, but a message's digest depends on the order, so the metadata keeps it. The metadata also names
    # the complex128 tensors, a dtype that safetensors lacks: they are stored as pairs of reals.
    pairs = [name for name, tensor in flat.items() if tensor.dtype == torch.complex128]
    return save_bytes(_separate(flat), {_METADATA_KEY: json.dumps({"order": list(flat), "complex128": pairs})})


def loads(cls: Any, data: bytes) -> Any:
    """Reads what `dumps` wrote; `cls` is a message class, or dict for plain tensors."""
    try:
        found = load_bytes(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = json.loads(header["__metadata__"][_METADATA_KEY])
        found |= {name: torch.view_as_complex(found[name]) for name in metadata["complex128"]}
        flat = {name: found[name] for name in metadata["order"]}
    except Exception as error:
        raise WireError(f"stored tensors cannot be read: {error}") from None
    if not is_message(cls):
        return flat
    parts: dict[str, Tensors] = {}
    for key, tensor in flat.items():
        name, _, path = key.partition(_SEPARATOR)
        parts.setdefault(name, {})[path] = tensor
    return unflatten(cls, parts)


def _separate(flat: Tensors) -> Tensors:
    """Copies tensors that share memory, which safetensors refuses: decoded ones, or one that a state has twice."""
    separate, seen = {}, set()
    for name, tensor in flat.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype == torch.complex128:
            tensor = torch.view_as_real(tensor).contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(storage.data_ptr())
        separate[name] = tensor
    return separate
