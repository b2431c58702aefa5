"""The only source of randomness: one reproducible stream for each named purpose, and secret ones for noise.

No generator of torch on the CPU is seeded by a number: `manual_seed` reads only its low 32 bits, so that 29 pairs of
half a million streams would be the same, and whoever tries all four billion seeds would find the noise that hides a
value. The whole state is filled instead. Even so, who has seen much of one stream can predict the rest, because the
Mersenne twister is linear: every release and every private training has a generator of its own.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch  # the functions that need it import it: listings and errors do without its two seconds

_NUM_WORDS = 624  # of the Mersenne twister, each of 32 bits, kept in 64
_FIRST_WORD = 24  # bytes before the words: the seed that `initial_seed` names, and how far the words are used up
CPU_ENTROPY = 4 * _NUM_WORDS  # bytes that fill the state of a generator on the CPU
CUDA_ENTROPY = 16  # and of one on a GPU


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
    """A torch generator whose state is filled by the next values of `rng`."""
    return _make_generator(rng.bytes, device)


def make_secret_generator(device: torch.device | str) -> torch.Generator:
    """A torch generator whose state is filled by the system's entropy: nobody can have its stream again."""
    return _make_generator(os.urandom, device)


def _make_generator(read: Callable[[int], bytes], device: torch.device | str) -> torch.Generator:
    import torch

    generator = torch.Generator(device)
    on_gpu = generator.device.type == "cuda"
    generator.set_state(build_cuda_state(read(CUDA_ENTROPY)) if on_gpu else build_cpu_state(read(CPU_ENTROPY)))
    return generator


def build_cpu_state(entropy: bytes) -> torch.Tensor:
    """The state of a generator on the CPU that has drawn nothing yet, with `CPU_ENTROPY` bytes as its words."""
    import torch

    state = _read_unused_state().copy()
    words = state[_FIRST_WORD : _FIRST_WORD + 8 * _NUM_WORDS].view(np.uint64)
    words[:] = np.frombuffer(entropy, "<u4")
    return torch.from_numpy(state)


@functools.cache
def _read_unused_state() -> npt.NDArray[np.uint8]:
    """The state of a generator just seeded: its first draw renews all words, and no normal is left from before."""
    import torch

    state: npt.NDArray[np.uint8] = torch.Generator().manual_seed(0).get_state().numpy()
    return state


def build_cuda_state(entropy: bytes) -> torch.Tensor:
    """The state of a generator on a GPU from `CUDA_ENTROPY` bytes: its seed and its offset.

    There it is Philox, a function of a 64-bit seed and a counter. The offset is where the counter starts, in steps of
    four, which CUDA requires; below 2**60, so that no stream reaches the counter's end. Together that is 122 bits.
    """
    import torch

    seed, offset = np.frombuffer(entropy, "<u8")
    start = offset >> np.uint64(4) & ~np.uint64(3)
    return torch.from_numpy(np.array([seed, start], np.uint64).view(np.uint8))


def seed_torch(rng: np.random.Generator, device: torch.device | None = None) -> None:
    """Sets torch's global generators (dropout, initial weights) by the next values of `rng`.

    `torch.manual_seed` also queues calls for devices that are never used, with their stack traces, which costs more
    than a small training step; here only the CPU and the given device are set. A GPU's is seeded by a number, and uses
    all of its bits.
    """
    import torch

    torch.default_generator.set_state(build_cpu_state(rng.bytes(CPU_ENTROPY)))
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed_all(int(rng.integers(2**63 - 1)))
