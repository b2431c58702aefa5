"""The one place that knows about devices."""

from __future__ import annotations

import re

import torch

from fedrpc.errors import ConfigError

_LEGAL = re.compile(r"auto|cpu|cuda(:\d+)?")


def choose(wanted: str, index: int = 0, num_sharing: int = 1) -> torch.device:
    """The device for a process.

    Args:
        wanted: "auto", "cpu", "cuda" or "cuda:N".
        index: The client's id; with "auto" and "cuda", clients are dealt out over the GPUs by it.
        num_sharing: How many processes share the GPUs; each gets its fraction of the memory.
    """
    if not _LEGAL.fullmatch(wanted):
        raise ConfigError(f"unknown device '{wanted}'; expected auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not count):
        return torch.device("cpu")
    number = int(wanted.partition(":")[2]) if ":" in wanted else index % max(count, 1)
    if number >= count:
        raise ConfigError(f"device '{wanted}' is not here: {count} CUDA devices found; use --device auto or cpu")
    device = torch.device("cuda", number)
    a_gpu = -(-num_sharing // count)
    if a_gpu > 1:
        torch.cuda.set_per_process_memory_fraction(1.0 / a_gpu, device)
    return device
