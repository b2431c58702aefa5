"""Random numbers of the stand-in device: a generator whose whole state is a seed and an offset, as CUDA's Philox."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch

HostGenerator = torch.Generator
_STEP = 4  # CUDA counts in fours
_drawing = threading.RLock()


class DeviceGenerator(HostGenerator):  # type: ignore[misc]
    """Draws the values of a CPU generator, and says that it is on the device.

    On CUDA a state (seed, offset) is all that the next values depend on. Here a state that was seen before goes on with
    the values that followed it, and a new one starts a stream of its own.
    """

    _seen: ClassVar[dict[tuple[int, int], torch.Tensor]] = {}

    def __init__(self, device: Any = None) -> None:
        self._seed, self._offset = 0, 0
        self._resume()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def manual_seed(self, seed: int) -> DeviceGenerator:
        self._seed, self._offset = seed % 2**64, 0
        self._seen.pop((self._seed, 0), None)
        self._resume()
        return self

    def seed(self) -> int:
        seed = int(HostGenerator().seed())
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        return self._seed

    def get_state(self) -> torch.Tensor:
        self._seen[self._seed, self._offset] = self.get_host_state()
        return torch.from_numpy(np.array([self._seed, self._offset], np.uint64).view(np.uint8))

    def set_state(self, state: torch.Tensor) -> DeviceGenerator:
        if state.dtype != torch.uint8 or type(state) is not torch.Tensor:
            raise TypeError("RNG state must be a torch.ByteTensor")
        if state.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        seed, offset = (int(word) for word in state.numpy().view(np.uint64))
        if offset % _STEP:
            raise RuntimeError("offset must be a multiple of 4")
        self._seed, self._offset = seed, offset
        self._resume()
        return self

    def get_host_state(self) -> torch.Tensor:
        """The state of the CPU generator behind it."""
        return super().get_state()

    def set_host_state(self, state: torch.Tensor) -> None:
        """Goes on as a CPU generator of this state would: so a test has a CPU's values."""
        super().set_state(state)

    def _resume(self) -> None:
        seen = self._seen.get((self._seed, self._offset))
        self.set_host_state(start_stream(self._seed, self._offset) if seen is None else seen)

    def advance(self) -> None:
        """Counts a draw."""
        self._offset += _STEP


def start_stream(seed: int, offset: int) -> torch.Tensor:
    """The state of the CPU generator behind a stream that starts at `offset`."""
    digest = hashlib.sha256(f"{seed} {offset}".encode()).digest()
    return HostGenerator().manual_seed(int.from_bytes(digest[:4], "big")).get_state()


default = DeviceGenerator()  # the device's own, for dropout and the like


@contextmanager
def drawing_from_default() -> Iterator[None]:
    """Lets operations without a generator draw from the device's own instead of the CPU's."""
    with _drawing:
        host = torch.get_rng_state()
        torch.set_rng_state(default.get_host_state())
        try:
            yield
        finally:
            after = torch.get_rng_state()
            if not torch.equal(after, default.get_host_state()):
                default.set_host_state(after)
                default.advance()
            torch.set_rng_state(host)


def check_generator(generator: torch.Generator | None, on_device: bool) -> None:
    """Refuses a generator of the other device."""
    if generator is None:
        return
    expected, found = ("cuda" if on_device else "cpu"), generator.device.type
    if found != expected:
        raise RuntimeError(f"Expected a '{expected}' device type for generator but found '{found}'")
