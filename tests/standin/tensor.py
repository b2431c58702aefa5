"""A tensor of the stand-in device: CPU values that say `cuda:0` and obey CUDA's rules about tensors that meet.

Every operation of torch, those of autograd and of optimizers too, comes through `__torch_dispatch__`, which refuses
what CUDA refuses, records where the host would wait, and computes on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from tests.standin import generator as random
from tests.standin.syncs import record

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
_no_dispatch = torch._C._DisableTorchDispatch

_COPIES = {aten.copy_.default, aten._foreach_copy_.default, aten.set_.source_Tensor}
_INDEXED = {aten.index.Tensor, aten._unsafe_index.Tensor}
_INDEX_PUT = {
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
}
# Operations whose result's shape or value the host needs before it goes on.
_READS = {
    "_local_scalar_dense",
    "equal",
    "allclose",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
    "_assert_async",
}
# Besides the pointwise ones, operations that take a value of no dimension from the CPU.
_TAKE_SCALARS = ("fill", "masked_fill", "index_fill", "_foreach_", "_fused_")


class DeviceTensor(Tensor):
    """See the module; made by `to_device`, `.to("cuda")` or a factory with `device="cuda"`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES:
            return _copy(func, args, kwargs)
        _check_devices(func, args, kwargs)
        _record_read(func, args)
        out = _draw(func, args, kwargs) if torch.Tag.nondeterministic_seeded in func.tags else _run(func, args, kwargs)
        return tree_map_only(Tensor, mark, out)

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        device, rest = parse_to(*args, **kwargs)
        if device is None or is_device(device):
            return super().to(**rest)
        on_host = to_host(self)
        return on_host.to(**rest | {"copy": False})

    def cpu(self, memory_format: Any = torch.preserve_format) -> Tensor:
        return self.to("cpu", memory_format=memory_format)

    def cuda(self, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        return self.to(DEVICE if device is None else device, **kwargs)

    def tolist(self) -> Any:
        return to_host(self.detach()).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy()

    def pin_memory(self, device: Any = None) -> Tensor:
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def type(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return super().type().replace("torch.", "torch.cuda.")
        return self.to(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        with torch.no_grad():
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            copied.grad = None if self.grad is None else self.grad.__deepcopy__(memo)
        copied.__dict__ |= {key: value for key, value in self.__dict__.items() if key == "_is_param"}
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (to_host(self.detach()), self.requires_grad, isinstance(self, nn.Parameter))

    def __repr__(self, **_: Any) -> str:
        with torch.no_grad():
            return f"{to_host(self)!r} on {DEVICE}"

    __format__ = Tensor.__format__


def _rebuild(tensor: Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    moved = to_device(tensor)
    return nn.Parameter(moved, requires_grad) if is_parameter else moved.requires_grad_(requires_grad)


def is_device(device: torch.device | str | int | None) -> bool:
    """Whether a device is the stand-in."""
    if device is None:
        return False
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise RuntimeError("CUDA error: invalid device ordinal")
    return found.type == "cuda"


def parse_to(*args: Any, copy: bool = False, **kwargs: Any) -> tuple[torch.device | None, dict[str, Any]]:
    """The device of a call of `.to`, and the other options."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    if "other" in kwargs:
        other = kwargs.pop("other")
        args = (other.device, other.dtype, *args)
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    rest = {"dtype": dtype, "non_blocking": non_blocking, "copy": copy, "memory_format": layout}
    return device, {key: value for key, value in rest.items() if value is not None}


# Between host and device


def mark(tensor: Tensor) -> Tensor:
    """Says that the values of a CPU tensor, which are not copied, are on the device."""
    return tensor if isinstance(tensor, DeviceTensor) else Tensor._make_subclass(DeviceTensor, tensor)


def _unmark(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    with _no_dispatch():
        return tensor.detach().clone()


class _Upload(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return mark(tensor.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return to_host(grad)


class _Download(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _unmark(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return to_device(grad)


def to_device(tensor: Tensor, *, waits: bool = True) -> Tensor:
    """A copy on the device, for autograd too; waits until the host's memory is read, unless it is pinned."""
    if waits:
        record("upload", "to")
    return _Upload.apply(tensor) if tensor.requires_grad else mark(tensor.detach().clone())


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, for autograd too; waits for the device."""
    record("read", "to")
    return _Download.apply(tensor) if tensor.requires_grad else _unmark(tensor)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Copies may cross between host and device."""
    pairs = zip(*args[:2], strict=True) if isinstance(args[0], list) else [args[:2]]
    for into, source in pairs:
        if isinstance(into, DeviceTensor) != isinstance(source, DeviceTensor):
            record("read" if isinstance(source, DeviceTensor) else "upload", "copy_")
    _run(func, args, kwargs)
    return args[0]


# CUDA's rules


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


def _check_devices(func: Any, args: Any, kwargs: Any) -> None:
    if func in _INDEXED or func in _INDEX_PUT:
        _check_indices(args[0], args[1])
        if func in _INDEX_PUT:
            _refuse(func, [t for t in (args[0], args[2]) if not _is_on_device(t) and (t is args[0] or t.dim() > 0)])
        return
    hosts = [tensor for tensor in _tensors((args, kwargs)) if not _is_on_device(tensor)]
    if _takes_scalars(func):
        written = _list_written(func, args, kwargs)
        hosts = [tensor for tensor in hosts if tensor.dim() > 0 or any(tensor is other for other in written)]
    _refuse(func, hosts)


def _is_on_device(tensor: Tensor) -> bool:
    return isinstance(tensor, DeviceTensor)


def _takes_scalars(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or _name(func).startswith(_TAKE_SCALARS)


def _name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _list_written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation changes."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    changed = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return list(_tensors([given.get(name) for name in changed]))


def _check_indices(indexed: Tensor, indices: Any) -> None:
    if not _is_on_device(indexed) and any(_is_on_device(index) for index in _tensors(indices)):
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    for index in _tensors(indices):
        if not _is_on_device(index):
            record("upload", "index")


def _refuse(func: Any, hosts: list[Tensor]) -> None:
    if hosts:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"(when checking arguments of {func})"
        )


def _record_read(func: Any, args: Any) -> None:
    if _name(func) in _READS:
        record("read", _name(func))
    masks = args[1] if func in _INDEXED or func in _INDEX_PUT else []
    if any(_is_on_device(mask) and mask.dtype in (torch.bool, torch.uint8) for mask in _tensors(masks)):
        record("read", f"{_name(func)} by a mask")


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    with _no_dispatch():
        return func(*args, **kwargs)


def _draw(func: Any, args: Any, kwargs: Any) -> Any:
    given = [value for value in tree_iter((args, kwargs)) if isinstance(value, random.HostGenerator)]
    if not given:
        with random.drawing_from_default():
            return _run(func, args, kwargs)
    random.check_generator(given[0], on_device=True)
    given[0].advance()
    return _run(func, args, kwargs)
