"""Chooses the device of a process, fixes how it computes, and says what it is and how much memory it has left."""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from fedrpc.errors import ConfigError

_DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")
# Workspaces of fixed size: a setting that NVIDIA gives for results that do not depend on which one is free.
_CUBLAS_WORKSPACE = ":4096:8"
LOST_GPU: tuple[type[Exception], ...] = (getattr(torch, "AcceleratorError", torch.cuda.CudaError),)
_SHARES: dict[torch.device, float] = {}  # of GPUs' memory that this process may take, where that is not all
_TORCH: Any = torch  # parts of it have no types, or not the same ones in each version


def choose(wanted: str, index: int = 0, share: float = 1.0) -> torch.device:
    """Chooses the device of a process.

    Args:
        wanted: "auto", "cpu", "cuda" or "cuda:N".
        index: The number of the process; with "auto" and "cuda" it spreads processes over the GPUs.
        share: Of a GPU's memory that the process may take.
    """
    if not _DEVICES.fullmatch(wanted):
        raise ConfigError(f"unknown device '{wanted}'; expected auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not count):
        return torch.device("cpu")
    number = int(wanted.partition(":")[2]) if ":" in wanted else index % max(count, 1)
    if number >= count:
        raise ConfigError(f"device '{wanted}' is not available: {count} CUDA devices found; use --device auto or cpu")
    device = torch.device("cuda", number)
    if share < 1.0:
        torch.cuda.set_per_process_memory_fraction(share, device)
        _SHARES[device] = share
    return device


def set_up(device: torch.device, *, deterministic: bool, tf32: bool) -> None:
    """Fixes how a GPU computes, before its first operation; on a CPU nothing is changed.

    Args:
        deterministic: The same bits each time; an operation that cannot promise that raises.
        tf32: Whether the factors of products and convolutions are rounded to TF32, which PyTorch's convolutions do
            unless they are told otherwise.
    """
    if device.type != "cuda":
        return
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(deterministic)
    _TORCH.utils.deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads such memory
    _TORCH.backends.cudnn.benchmark = not deterministic
    _set_tf32(tf32)
    torch.cuda.set_device(device)


def _set_tf32(allowed: bool) -> None:
    backends = _TORCH.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        for each in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
            each.fp32_precision = "tf32" if allowed else "ieee"
    else:  # before torch 2.9
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = allowed


def describe(device: torch.device) -> dict[str, Any]:
    """What a device is: equal models are promised for equal descriptions."""
    if device.type != "cuda":
        return {"type": device.type, "name": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}
    return {
        "type": device.type,
        "name": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": _TORCH.backends.cudnn.version(),
    }


def label(device: torch.device) -> str:
    """What a device is, in a line of ASCII."""
    found = describe(device)
    words = [f"{found['type']} {found['name']}", f"torch {found['torch']}"]
    words += [f"CUDA {found['cuda']}"] if "cuda" in found else []
    return ", ".join(words).encode("ascii", "replace").decode()


def measure_room(device: torch.device) -> int:
    """The bytes that this process can still take of a GPU: what is free, and what it holds but does not use."""
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    mine = int(_SHARES.get(device, 1.0) * total) - used
    return max(0, min(free + torch.cuda.memory_reserved(device) - used, mine))


def explain_full_gpu(error: BaseException) -> str:
    """A GPU without enough memory in one line, with what helps."""
    return (
        f"the GPU's memory is full ({_first_sentence(error)}); it needs less with a smaller train.batch_size, a "
        "lower --parallel, or many clients in one process (--hosts); or choose --device cpu"
    )


def explain_nondeterminism(error: BaseException) -> str:
    """An operation that a GPU cannot do in the same way each time, in one line."""
    what = _first_sentence(error)
    return f"{what}: train.deterministic = true refuses it on a GPU; --set train.deterministic=false, or --device cpu"


def _first_sentence(error: BaseException) -> str:
    return " ".join(str(error).split()).partition(". ")[0].removesuffix(".")[:200]


def is_shared(device: torch.device) -> bool:
    """Whether other processes take turns with this one at a GPU."""
    return device in _SHARES


def give_back_gpu_memory(device: torch.device) -> None:
    """Returns what the process holds of a GPU but does not use, so that others can have it; of a CPU, nothing."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
