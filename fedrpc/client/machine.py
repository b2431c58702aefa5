"""The machine that a client stands for: it waits for a core of this one, and computes as slowly as it should.

Many clients of a run share the cores of one machine. If all computed at a time, each would seem slow; so a client waits
for its turn before it computes, and gives the core back for as long as a slower machine would go on computing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from fedrpc.errors import Cancelled


class Machine:
    """Makes answers take as long as they should; one at a time.

    Args:
        speed: How fast it computes, beside this machine; at most 1.
        cores: The socket of who hands out this machine's cores; None when the client need not wait for one.
    """

    def __init__(self, speed: float = 1.0, cores: str | None = None) -> None:
        self._speed, self._cores = speed, cores
        self._held: socket.socket | None = None

    async def wait_for_core(self) -> None:
        """Waits for a core, which is held until it is given back or this process ends."""
        if self._cores is None:
            return
        loop, self._held = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX)
        self._held.setblocking(False)
        with contextlib.suppress(OSError):  # nobody hands out cores any more: the run is ending
            await loop.sock_connect(self._held, self._cores)
            await loop.sock_sendall(self._held, b"core\n")
            await loop.sock_recv(self._held, 1)

    def give_core_back(self) -> None:
        """Lets another client compute; in any thread, and does nothing the second time."""
        if self._held:
            self._held.close()
            self._held = None

    def finish_computing(self, seconds: float, stop: threading.Event) -> None:
        """Waits, without a core, for the rest of the time that this machine would take.

        Args:
            seconds: How long the computation took here.
            stop: Set when the answer is no longer wanted.
        """
        self.give_core_back()
        if self._speed < 1.0 and stop.wait(seconds / self._speed - seconds):
            raise Cancelled("the server withdrew the task")
