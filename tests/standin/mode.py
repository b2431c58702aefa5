"""Sends calls of torch that name the device to the stand-in: `.to("cuda")`, factories, and who draws at random."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from tests.standin import generator as random
from tests.standin.syncs import record
from tests.standin.tensor import DEVICE, DeviceTensor, is_device, mark, parse_to, to_device, to_host

_NETWORK = {F.linear, F.conv1d, F.conv2d, F.conv_transpose2d, F.batch_norm, F.cross_entropy, Tensor.backward}
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor}


class DeviceMode(TorchFunctionMode):
    """Is active in every thread while the stand-in is present."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload):  # from BackwardMode: the device that autograd names is its belief
            return func(*args, **(kwargs or {}))
        with _called_from(python=True):
            return _call(func, args, kwargs or {})


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    if handler := _HANDLERS.get(func):
        return handler(*args, **kwargs)
    if kwargs.get("device") is not None:
        return _make(func, args, kwargs)
    if func in _NETWORK and not _has_device_tensor(args) and not any(map(_is_batched, args)):
        record("host", func.__name__)
    if isinstance(kwargs.get("generator"), random.HostGenerator):
        random.check_generator(kwargs["generator"], _has_device_tensor(args))
    return func(*args, **kwargs)


class _Caller(threading.local):
    is_python = True


_caller = _Caller()


@contextmanager
def _called_from(*, python: bool) -> Iterator[None]:
    """Tells what Python code (a hook, a custom function) makes during backward from what autograd makes."""
    before, _caller.is_python = _caller.is_python, python
    try:
        yield
    finally:
        _caller.is_python = before


class BackwardMode(TorchDispatchMode):
    """Is active while autograd computes for the device.

    What autograd makes from nothing (zeros for an output without a gradient) it makes where it believes the tensors to
    be, and to it they are on the CPU.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_made = not any(isinstance(value, Tensor) for value in tree_iter((args, kwargs)))
        return tree_map_only(Tensor, mark, out) if is_made and not _caller.is_python else out


def run_backward(engine: Callable[..., Any]) -> Callable[..., Any]:
    """Autograd's engine, with the modes for what it computes and for the hooks that it calls."""

    def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        with DeviceMode(), _called_from(python=False), BackwardMode() if _has_device_tensor(tensors) else nullcontext():
            return engine(tensors, *args, **kwargs)

    return run


def _is_batched(value: Any) -> bool:
    """Whether vmap, by which Opacus computes examples' gradients, hides where a tensor is."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def _has_device_tensor(args: Any) -> bool:
    return any(isinstance(value, DeviceTensor) for value in args)


def _make(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a factory; one such as `zeros_like` may be given a tensor of the other device."""
    wanted, rest = is_device(kwargs["device"]), {key: value for key, value in kwargs.items() if key != "device"}
    generator = rest.get("generator")
    random.check_generator(generator, wanted)
    if _has_device_tensor(args):
        made = func(*args, **rest)
        return made if wanted else to_host(made)
    if not wanted:
        return func(*args, **kwargs)
    if func in _FROM_DATA:
        record("upload", func.__name__)
    with random.drawing_from_default():
        made = func(*args, **rest)
    if generator is not None:
        generator.advance()
    return mark(made.detach()).requires_grad_(made.requires_grad)


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device, rest = parse_to(*args, **kwargs)
    if isinstance(tensor, DeviceTensor) or not is_device(device):
        return tensor.to(*args, **kwargs)
    waits = not (_is_pinned(tensor) and rest.get("non_blocking"))
    return to_device(tensor.to(**rest | {"copy": False}), waits=waits)


def _cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
    return _to(tensor, DEVICE if device is None else device, non_blocking=non_blocking, **kwargs)


def _type_as(tensor: Tensor, other: Tensor) -> Tensor:
    return _to(tensor, other.device, other.dtype)


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    pinned = tensor.detach().clone()
    pinned._is_pinned = True  # type: ignore[attr-defined]
    return pinned


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    """Of a plain tensor; views of a pinned one are pinned too."""
    base = tensor if tensor._base is None else tensor._base
    return bool(getattr(base, "_is_pinned", False))


def _one_hot(labels: Tensor, num_classes: int = -1) -> Tensor:
    """torch makes the numbers of the classes inside, where it believes the labels to be."""
    if not isinstance(labels, DeviceTensor):
        return torch.nn.functional.one_hot(labels, num_classes)
    classes = int(labels.max()) + 1 if num_classes == -1 else num_classes
    return labels.new_zeros((*labels.shape, classes)).scatter_(-1, labels.unsqueeze(-1), 1)


def group_tensors(group: Callable[..., Any]) -> Callable[..., Any]:
    """torch's grouping of tensors by device and dtype for foreach, with the device that they say they are on."""

    def run(lists: Any, with_indices: bool = False) -> Any:
        groups = group(lists, with_indices)
        return {(_find_device(key[0], value[0]), key[1]): value for key, value in groups.items()}

    return run


def _find_device(believed: torch.device, lists: Any) -> torch.device:
    return next((tensor.device for tensor in lists[0] if tensor is not None), believed)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.cuda: _cuda,
    Tensor.type_as: _type_as,
    Tensor.pin_memory: _pin_memory,
    Tensor.is_pinned: _is_pinned,
    torch.nn.functional.one_hot: _one_hot,
}
