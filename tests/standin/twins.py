"""Computes the same on the CPU and on the stand-in, from the same random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fedrpc import seeds
from tests.standin import generator as random
from tests.standin.cuda import present
from tests.standin.syncs import Sync, record, recorded

CPU = torch.device("cpu")
T = TypeVar("T")


@dataclass(frozen=True)
class Twins(Generic[T]):
    """What the same computation gave."""

    host: T
    device: T
    syncs: list[Sync]


def compute_twins(compute: Callable[[torch.device], T]) -> Twins[T]:
    """Calls `compute` with the CPU, then with the stand-in.

    A stream of fedrpc is filled otherwise for a GPU than for the CPU. For the comparison both begin as the GPU's does,
    and where the device's own generator is seeded it goes on as the CPU's.
    """
    start = torch.get_rng_state()
    with patch.object(seeds, "build_cpu_state", _start_as_on_the_device):
        on_host = compute(CPU)
        torch.set_rng_state(start)
        with present() as device, patch.object(torch.cuda, "manual_seed_all", _follow_host), recorded() as syncs:
            random.default.manual_seed(0)  # as good as unseeded
            return Twins(on_host, compute(device), syncs)


def _start_as_on_the_device(entropy: bytes) -> Tensor:
    words = seeds.build_cuda_state(entropy[: seeds.CUDA_ENTROPY]).numpy().view(np.uint64)
    return random.start_stream(*map(int, words))


def _follow_host(seed: int) -> None:
    record("seed", "manual_seed_all")
    random.default.set_host_state(torch.get_rng_state())
