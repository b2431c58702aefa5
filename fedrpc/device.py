"""Chooses the device of a process and its share of the memory."""

from __future__ import annotations

import re

import torch

from fedrpc.errors import ConfigError

_DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")


def choose(wanted: str, index: int = 0, num_sharing: int = 1) -> torch.device:
    """Chooses the device of a process.

    Args:
        wanted: "auto", "cpu", "cuda" or "cuda:N".
        index: The client's id; with "auto" and "cuda" it spreads clients over the GPUs.
        num_sharing: The number of processes that share the GPUs; each gets an equal fraction of the memory.
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
    per_gpu = -(-num_sharing // count)
    if per_gpu > 1:
        torch.cuda.set_per_process_memory_fraction(1.0 / per_gpu, device)
    return device
