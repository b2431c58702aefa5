"""Makes the stand-in present: for the length of a block torch has one CUDA device, whatever the machine has."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tests.standin import generator as random
from tests.standin.mode import DeviceMode, group_tensors, run_backward
from tests.standin.syncs import record
from tests.standin.tensor import DEVICE, DeviceTensor, is_device

MEMORY = 8 << 30
_FOREACH_KINDS = [
    sys.modules["torch.optim.optimizer"]._foreach_supported_types,
    sys.modules["torch.utils._foreach_utils"]._foreach_supported_types,
]


@contextmanager
def present() -> Iterator[torch.device]:
    """Puts the stand-in in place of CUDA, in threads started meanwhile too, and yields the device."""
    with ExitStack() as stack:
        for name, value in _QUERIES.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name in ("is_available", "device_count", "current_stream", "synchronize"):
            stack.enter_context(patch.object(torch.accelerator, name, _QUERIES[name]))
        stack.enter_context(patch.object(torch, "Generator", _AnyGenerator))
        stack.enter_context(patch.object(nn.Module, "_apply", _swapping(nn.Module._apply)))
        stack.enter_context(patch.object(threading.Thread, "run", _in_mode(threading.Thread.run)))
        engine = run_backward(torch.autograd._engine_run_backward)
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", engine))
        group = torch._C._group_tensors_by_device_and_dtype
        stack.enter_context(patch.object(torch._C, "_group_tensors_by_device_and_dtype", group_tensors(group)))
        for kinds in _FOREACH_KINDS:
            kinds.append(DeviceTensor)
            stack.callback(kinds.remove, DeviceTensor)
        stack.enter_context(DeviceMode())
        yield DEVICE


def _in_mode(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Modes of torch hold in one thread alone."""

    def run_in_mode(thread: threading.Thread) -> None:
        with DeviceMode():
            run(thread)

    return run_in_mode


def _swapping(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`Module.to` keeps its parameters the same objects, whose class must then change."""

    def apply_swapping(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(module, fn, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return apply_swapping


class _GeneratorKind(type(random.HostGenerator)):  # type: ignore[misc]
    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return random.DeviceGenerator() if is_device(device) else random.HostGenerator(device)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, random.HostGenerator)


class _AnyGenerator(random.HostGenerator, metaclass=_GeneratorKind):  # type: ignore[misc]
    """`torch.Generator` while the stand-in is present."""


class Event:
    """Has always happened: the stand-in has no queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        record("read", "Event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Stream:
    """Has always finished its work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = DEVICE

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        record("read", "Stream.synchronize")


def _enter(*_: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _of_gpus(answer: Callable[..., Any]) -> Callable[..., Any]:
    """A query that refuses the CPU, as torch.cuda does."""

    def query(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if value == "cpu" or getattr(value, "type", "") == "cpu":
                raise ValueError(f"Expected a cuda device, but got: {value}")
        return answer(*args, **kwargs)

    return query


_QUERIES: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "init": lambda: None,
    "set_device": _of_gpus(lambda device: None),
    "device": _enter,
    "stream": _enter,
    "Stream": Stream,
    "Event": Event,
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    "synchronize": _of_gpus(lambda device=None: record("read", "synchronize")),
    "get_device_name": _of_gpus(lambda device=None: "stand-in"),
    "get_device_capability": _of_gpus(lambda device=None: (8, 0)),
    "get_device_properties": lambda device=None: SimpleNamespace(
        name="stand-in", total_memory=MEMORY, major=8, minor=0, multi_processor_count=1
    ),
    "is_bf16_supported": lambda *_, **__: True,
    "mem_get_info": _of_gpus(lambda device=None: (MEMORY, MEMORY)),
    "memory_allocated": _of_gpus(lambda device=None: 0),
    "max_memory_allocated": _of_gpus(lambda device=None: 0),
    "memory_reserved": _of_gpus(lambda device=None: 0),
    "reset_peak_memory_stats": _of_gpus(lambda device=None: None),
    "empty_cache": lambda: None,
    "set_per_process_memory_fraction": _of_gpus(lambda fraction, device=None: None),
    "manual_seed": lambda seed: random.default.manual_seed(seed),
    "manual_seed_all": lambda seed: random.default.manual_seed(seed),
    "seed": lambda: random.default.seed(),
    "initial_seed": lambda: random.default.initial_seed(),
    "get_rng_state": lambda device="cuda": random.default.get_state(),
    "set_rng_state": lambda state, device="cuda": random.default.set_state(state),
    "get_rng_state_all": lambda: [random.default.get_state()],
    "set_rng_state_all": lambda states: random.default.set_state(states[0]),
}
