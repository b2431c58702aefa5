"""Receives a large message: its chunks are hashed and stored in another thread while the next ones arrive."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Executor

from fedrpc.errors import WireError
from fedrpc.wire.frames import Assembler
from fedrpc.wire.ledger import Attempt, classify_chunk

# What the slowest link that people still use gives, GPRS with one time slot: 8 to 20 kbit/s. Who is slower than this
# for `limits.transfer_idle_s` is not there, or does it on purpose.
LEAST_BYTES_S = 1000
_MAX_WAITING = 4  # chunks that wait while others are hashed; more would only take memory


class Receiver:
    """Takes the chunks of one message, in order.

    Args:
        assembler: Checks and keeps the bytes; used in one thread of `pool` at a time.
        attempt: Counts the bytes.
    """

    def __init__(self, assembler: Assembler, attempt: Attempt, pool: Executor) -> None:
        self.attempt = attempt
        self._assembler, self._pool = assembler, pool
        self._waiting: list[tuple[int, memoryview]] = []
        self._job: asyncio.Future[None] | None = None
        self._abandoned = False
        self._missing = sum(part.size for part in assembler.envelope.parts)

    @property
    def is_complete(self) -> bool:
        """Whether all bytes that the headers announce have arrived."""
        return self._missing == 0

    def count(self, part: int, data: memoryview, serialised_bytes: int) -> None:
        """Counts a chunk that arrived in a frame of its own."""
        kind, tensor_bytes = classify_chunk(part, data.nbytes, self._assembler.envelope)
        self.attempt.add(kind, serialised_bytes, tensor_bytes)

    async def add(self, part: int, data: memoryview) -> None:
        """Adds a chunk; waits when too many wait already. Raises WireError when a chunk does not belong."""
        if data.nbytes > self._missing:
            raise WireError("the message has more bytes than its headers announce")
        self._missing -= data.nbytes
        self._waiting.append((part, data))
        if self._job and not self._job.done() and len(self._waiting) < _MAX_WAITING:
            return
        await self._finish_job()
        batch, self._waiting = self._waiting, []
        if not self._abandoned:
            self._job = asyncio.get_running_loop().run_in_executor(self._pool, self._add_all, batch)

    def _add_all(self, batch: list[tuple[int, memoryview]]) -> None:
        for part, data in batch:
            self._assembler.add(part, data)

    async def _finish_job(self) -> None:
        if self._job:  # it stays, since `abandon` may wait for the same one
            await self._job

    async def finish(self) -> list[memoryview]:
        """Checks that the message is complete and intact; returns its parts' bytes, none when they went to a file."""
        await self._finish_job()
        batch, self._waiting = self._waiting, []
        buffers: list[memoryview] = []
        if not self._abandoned:
            self._job = asyncio.get_running_loop().run_in_executor(self._pool, self._finish, batch, buffers)
            await self._job
        return buffers

    def _finish(self, batch: list[tuple[int, memoryview]], buffers: list[memoryview]) -> None:
        self._add_all(batch)
        buffers += self._assembler.finish()

    async def abandon(self) -> None:
        """Waits for the thread, so that what it writes to can be removed."""
        self._abandoned = True
        self._waiting.clear()
        with contextlib.suppress(WireError, OSError):  # the message is given up anyway
            await self._finish_job()
