"""Reads a module's parameters and buffers as plain tensors, and writes them back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedrpc.errors import ConfigError


def read_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Detached, contiguous CPU copies of every parameter and buffer, in the order of `state_dict`."""
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in module.state_dict().items()
    }


def load(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into `module`; changes nothing unless all names, shapes and dtypes agree.

    Raises:
        ConfigError: The tensors are of another architecture; names the first differences.
    """
    own = module.state_dict()
    wrong = _list_differences(own, tensors)
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(f"tensors do not fit {type(module).__name__}: {'; '.join(wrong[:3])}{more}")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])


def count_payload_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The bytes of the tensors' values alone: what a method's cost formula counts."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


def _list_differences(own: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> list[str]:
    missing = [f"missing '{name}'" for name in own if name not in got]
    extra = [f"unexpected '{name}'" for name in got if name not in own]
    differing = [
        f"'{name}' expected {_describe(own[name])}, got {_describe(got[name])}"
        for name in own
        if name in got and (own[name].shape != got[name].shape or own[name].dtype != got[name].dtype)
    ]
    return missing + extra + differing


def _describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def read_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimizer's moments and counters by parameter number, for a checkpoint or a client's store."""
    return {
        f"{number}.{name}": value.detach().cpu().clone() if isinstance(value, Tensor) else torch.tensor(value)
        for number, slots in optimizer.state_dict()["state"].items()
        for name, value in slots.items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restores copies of what `read_optimizer` returned into a fresh optimizer of the same parameters.

    torch would keep the tensors themselves where the device is the same, and change them at the next step.
    """
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        slots.setdefault(int(number), {})[name] = value.clone()
    optimizer.load_state_dict(optimizer.state_dict() | {"state": slots})
