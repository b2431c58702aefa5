"""Messages at rest: the same flattening as on the wire, in safetensors, for checkpoints and client stores."""

from __future__ import annotations

from typing import Any

from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from fedrpc.errors import WireError
from fedrpc.wire.message import Tensors, flatten, is_message, unflatten

_SEPARATOR = "|"  # between a part's name, which has no such sign, and a tensor's path


def dumps(value: Any) -> bytes:
    """A message, or a plain dict of tensors, as bytes."""
    if is_message(type(value)):
        flat = {
            f"{part.name}{_SEPARATOR}{path}": tensor for part in flatten(value) for path, tensor in part.tensors.items()
        }
    else:
        flat = dict(value)
    return save_bytes({name: _own(tensor) for name, tensor in flat.items()})


def loads(cls: Any, data: bytes) -> Any:
    """What `dumps` was given; `cls` is a message class, or dict for plain tensors."""
    try:
        flat = load_bytes(data)
    except Exception as error:
        raise WireError(f"stored tensors can not be read: {error}") from None
    if not is_message(cls):
        return flat
    parts: dict[str, Tensors] = {}
    for key, tensor in flat.items():
        name, _, path = key.partition(_SEPARATOR)
        parts.setdefault(name, {})[path] = tensor
    return unflatten(cls, parts)


def _own(tensor: Tensor) -> Tensor:
    # Tensors that were decoded in place share one buffer, which safetensors refuses.
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
