"""The only source of reproducible randomness: one independent stream for each named purpose."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch  # the functions that need it import it: listings and errors do without its two seconds


def derive(seed: int, *path: str | int) -> np.random.Generator:
    """The generator for `path` under `seed`: equal on every platform, independent of all other paths.

    Args:
        seed: The run's seed.
        path: What the stream is for, such as ("order", client, round).
    """
    text = "/".join(f"{type(part).__name__[0]}:{part}" for part in (seed, *path))
    entropy = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")
    return np.random.Generator(np.random.PCG64(entropy))


def make_torch_generator(rng: np.random.Generator, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator seeded by the next value of `rng`."""
    import torch

    return torch.Generator(device=device).manual_seed(int(rng.integers(2**63 - 1)))


def seed_torch(rng: np.random.Generator, device: torch.device | None = None) -> None:
    """Seeds torch's global generators (dropout, initial weights) by the next value of `rng`.

    `torch.manual_seed` also queues calls for devices that are never used, with their stack traces, which costs more
    than a small training step; here only the CPU and the given device are seeded.
    """
    import torch

    seed = int(rng.integers(2**63 - 1))
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
