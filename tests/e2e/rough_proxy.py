"""A TCP proxy that treats connections badly, by a seed: it cuts, stalls, delays, half-closes and swallows."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from tests.e2e.proxy import Connection, Proxy

LEAST_BYTES, MOST_BYTES = 1000, 1_500_000  # that pass in one direction between two troubles
STALL_S, DELAY_S = (0.5, 4.0), (0.005, 0.05)
NUM_DELAYED = 20  # pieces
TROUBLES = {"cut": 4, "stall": 2, "delay": 4, "half-close": 1, "swallow": 1}  # with how often each comes


class RoughProxy(Proxy):
    """Forwards everything to the server, until the next trouble.

    Troubles come by bytes, not by the clock: a connection that moves nothing has none.

    Args:
        server: HOST:PORT; nobody need listen there yet.
        seed: Decides what happens to the n-th connection, and after how many bytes.
        most: How many troubles there are before it only forwards.
    """

    def __init__(self, server: str, seed: int, most: int) -> None:
        self.troubles: Counter[str] = Counter()
        self._seed, self._most = seed, most
        self._num_directions = 0
        self._swallowed: set[int] = set()  # connections of which nothing passes any more
        super().__init__(server)

    @property
    def is_rough(self) -> bool:
        """Whether there is trouble to come."""
        return self.troubles.total() < self._most

    def calm_down(self) -> None:
        """Only forwards from now on; what was swallowed stays so, until its ends give it up."""
        self._most = 0

    async def _up(self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._forward(connection, reader, writer)

    async def _down(self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._forward(connection, reader, writer)

    async def _forward(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        rng = random.Random(f"{self._seed}/{self._num_directions}")
        self._num_directions += 1
        left, num_delayed = rng.randint(LEAST_BYTES, MOST_BYTES), 0
        while data := await reader.read(65536):
            if id(connection) in self._swallowed:
                continue
            if num_delayed:
                num_delayed -= 1
                await asyncio.sleep(rng.uniform(*DELAY_S))
            if left <= len(data) and self.is_rough:
                writer.write(data[:left])
                await writer.drain()
                data, left = data[left:], rng.randint(LEAST_BYTES, MOST_BYTES)
                trouble = rng.choices(list(TROUBLES), list(TROUBLES.values()))[0]
                self.troubles[trouble] += 1
                if trouble == "cut":
                    writer.transport.abort()
                    raise ConnectionResetError("cut by the proxy")
                if trouble == "half-close":
                    writer.write_eof()
                    while await reader.read(65536):
                        pass
                    break
                if trouble == "swallow":
                    self._swallowed.add(id(connection))
                    continue
                if trouble == "stall":
                    await asyncio.sleep(rng.uniform(*STALL_S))
                else:
                    num_delayed = NUM_DELAYED
            left -= len(data)
            writer.write(data)
            await writer.drain()
        writer.close()
