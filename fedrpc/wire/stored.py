"""Messages at rest: the same flattening as on the wire, in safetensors, for checkpoints and client stores."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from fedrpc.errors import WireError
from fedrpc.wire.message import Tensors, flatten, is_message, unflatten

_BESIDE = "fedrpc"  # one entry of metadata, since the order of several is random
_SEPARATOR = "|"  # between a part's name, which has no such sign, and a tensor's path


def dumps(value: Any) -> bytes:
    """A message, or a plain dict of tensors, as bytes."""
    if is_message(type(value)):
        flat = {
            f"{part.name}{_SEPARATOR}{path}": tensor for part in flatten(value) for path, tensor in part.tensors.items()
        }
    else:
        flat = dict(value)
    # safetensors sorts; the order is part of what a message says (its digest), so it is kept beside. So are the names
    # of tensors whose dtype it does not have and that are kept as pairs of reals.
    pairs = [name for name, tensor in flat.items() if tensor.dtype == torch.complex128]
    return save_bytes(_apart(flat), {_BESIDE: json.dumps({"order": list(flat), "complex128": pairs})})


def loads(cls: Any, data: bytes) -> Any:
    """What `dumps` was given; `cls` is a message class, or dict for plain tensors."""
    try:
        found = load_bytes(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        beside = json.loads(header["__metadata__"][_BESIDE])
        found |= {name: torch.view_as_complex(found[name]) for name in beside["complex128"]}
        flat = {name: found[name] for name in beside["order"]}
    except Exception as error:
        raise WireError(f"stored tensors can not be read: {error}") from None
    if not is_message(cls):
        return flat
    parts: dict[str, Tensors] = {}
    for key, tensor in flat.items():
        name, _, path = key.partition(_SEPARATOR)
        parts.setdefault(name, {})[path] = tensor
    return unflatten(cls, parts)


def _apart(flat: Tensors) -> Tensors:
    """Tensors that share no memory, as safetensors wants; decoded ones share a buffer, a state may have one twice."""
    apart, seen = {}, set()
    for name, tensor in flat.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype == torch.complex128:
            tensor = torch.view_as_real(tensor).contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(storage.data_ptr())
        apart[name] = tensor
    return apart
