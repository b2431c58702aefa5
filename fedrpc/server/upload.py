"""A large result on its way: waits for a permit, is received into a file, and is kept or given up."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import BinaryIO

from fedrpc.errors import DiskFull, FedrpcError, WireError
from fedrpc.files import explain_full
from fedrpc.server.mailbox import Task
from fedrpc.server.pace import PATIENCE_S, PERMIT_BYTES_S, Pace, Permit
from fedrpc.server.roster import Session
from fedrpc.server.spool import Spool
from fedrpc.wire.frames import Assembler
from fedrpc.wire.ledger import Attempt, Rows, classify_chunk, merge
from fedrpc.wire.receiving import LEAST_BYTES_S, Receiver
from fedrpc.wire.v2 import coordinator_pb2 as pb


class Upload:
    """Receives one result. Once it is given up, chunks that were under way are only counted.

    Args:
        rows: The session's rows of the first frame.
        max_bytes: The largest message that is accepted.

    Raises:
        WireError: The headers are inconsistent, or announce too much.
    """

    def __init__(
        self, task: Task, session: Session, envelope: pb.Envelope, attempt: Attempt, rows: Rows, max_bytes: int
    ) -> None:
        self.task, self.session = task, session
        self._envelope, self._attempt, self._rows, self._max_bytes = envelope, attempt, rows, max_bytes
        self._pace, self._permit_pace = Pace(LEAST_BYTES_S), Pace(PERMIT_BYTES_S)
        self._permit: Permit | None = None
        self._holding: asyncio.Task[None] | None = None  # until it ends
        self._receiver: Receiver | None = None
        self._file: BinaryIO | None = None
        self._path: Path | None = None
        Assembler(envelope, max_bytes, io.BytesIO())

    def begin(
        self,
        permits: asyncio.Semaphore,
        spool: Spool,
        pool: Executor,
        grant: Callable[[], None],
        refuse: Callable[[str], None],
        fail: Callable[[FedrpcError], None],
    ) -> None:
        """Waits for a permit in the background, then opens a file and calls `grant`.

        Calls `refuse` with a reason when that cannot be done, and `fail` when it could not for anybody.
        """

        async def hold_permit() -> None:
            async with Permit(permits) as self._permit:
                try:
                    self._path = spool.make_incoming_path(self.task.epoch, self.task.task_id)
                    with explain_full(self._path):
                        self._file = self._path.open("wb")
                except DiskFull as error:
                    return fail(error)
                except OSError as error:
                    refuse(f"the server cannot write: {error.strerror}")
                    return
                assembler = Assembler(self._envelope, self._max_bytes, self._file)
                self._receiver = Receiver(assembler, self._attempt, pool)
                grant()
                await asyncio.get_running_loop().create_future()  # until `end` cancels it

        self.task.receiving += 1
        self._holding = asyncio.ensure_future(hold_permit())

    def note_received(self, now: float, total: int, *, waiting: bool) -> float:
        """Notes how many bytes its stream has brought; one that is slow gives its permit back and goes on without.

        Args:
            waiting: Whether the server waits for the client, and not the other way round.

        Returns:
            By how many seconds it is behind the least rate; 0 while no chunk is expected.
        """
        if self._permit is None or self._receiver is None or self._holding is None:
            return 0.0
        for pace in (self._pace, self._permit_pace):
            pace.note(now, total, waiting=waiting)
        self.task.behind_s = self._pace.behind_s
        if self._permit_pace.behind_s > PATIENCE_S:
            self._permit.give_back()
        return self._pace.behind_s

    async def receive(self, part: int, data: memoryview, size: int) -> bool:
        """Receives a chunk; returns whether the message is complete. Raises WireError or OSError when it is bad."""
        if self._receiver is None:
            kind, tensor_bytes = classify_chunk(part, data.nbytes, self._envelope)
            self._attempt.add(kind, size, tensor_bytes)
            if self._is_given_up():
                return False
            raise WireError("got a chunk before its message was granted")
        self._receiver.count(part, data, size)
        if self._is_given_up():
            return False
        await self._receiver.add(part, data)
        if self._is_given_up() or not self._receiver.is_complete:
            return False
        await self._receiver.finish()
        return not self._is_given_up()

    def _is_given_up(self) -> bool:
        return self._holding is None  # asked anew after each wait, in which `end` may have been called

    def keep(self, spool: Spool) -> Path:
        """Moves the complete result to where the spool keeps it."""
        assert self._file is not None and self._path is not None, "it is complete"
        with explain_full(self._path):
            self._file.close()
            return spool.keep(self._path, self.task.epoch, self.task.task_id)

    async def end(self) -> None:
        """Gives back the permit and removes the file, unless the spool has it."""
        if self._holding is None:
            return
        holding, self._holding = self._holding, None
        holding.cancel()
        self.task.receiving -= 1
        self.task.behind_s = 0.0
        try:
            await asyncio.wait([holding])  # which lets a cancellation of this call through, unlike `await holding`
            if self._receiver:
                await self._receiver.abandon()
        finally:
            if self._file and self._path:
                self._file.close()
                self._path.unlink(missing_ok=True)

    def take_rows(self, *, accepted: bool) -> Rows:
        """Returns the rows of what was received, once: a second call has none."""
        rows, self._rows = self._rows, {}
        merge(rows, self._attempt.close(aborted=not accepted))
        self._attempt.rows = {}
        return rows
