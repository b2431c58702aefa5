"""Leaves progress.json in the run directory while a run is under way, so that others can watch it.

The run never waits for it, and never fails because of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from types import TracebackType

from fedrpc.errors import FedrpcError
from fedrpc.metrics.progress import MAX_REASON, PROGRESS_FILE, Snapshot, identify_host, write_snapshot
from fedrpc.server.board import count_states, select_shown
from fedrpc.server.coordinator import Coordinator
from fedrpc.server.mailbox import Mailbox
from fedrpc.server.roster import Roster
from fedrpc.wire.kinds import DIRECTIONS
from fedrpc.wire.ledger import LedgerFile

_EVERY_S = 1.0
_SHARE = 0.002  # of a core that it may take: a run of very many clients is shown less often


class ProgressFile(contextlib.AbstractAsyncContextManager["ProgressFile"]):
    """Writes progress.json about once a second, from entering to leaving.

    Leaving removes it when the run is over, and notes why when the server ends before that.

    Args:
        folder: The run directory.
    """

    def __init__(
        self, folder: Path, run_id: str, coordinator: Coordinator, roster: Roster, mailbox: Mailbox, book: LedgerFile
    ) -> None:
        self._folder, self._run_id, self._coordinator = folder, run_id, coordinator
        self._roster, self._mailbox, self._book = roster, mailbox, book
        self._started = time.monotonic()
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ProgressFile:
        self._writing = asyncio.create_task(self._keep_writing())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writing:
            self._writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writing
        with contextlib.suppress(OSError, FedrpcError):  # a disk that is full ends the run elsewhere, with one line
            if error is None:
                (self._folder / PROGRESS_FILE).unlink(missing_ok=True)
            else:
                write_snapshot(self._folder, self.take(_explain(error)))

    async def _keep_writing(self) -> None:
        while True:
            taken_s = time.thread_time()
            found = self.take()
            taken_s = time.thread_time() - taken_s
            taken_s += await asyncio.to_thread(_write, self._folder, found)  # the disk may be slow
            await asyncio.sleep(max(_EVERY_S, taken_s / _SHARE))

    def take(self, ended: str = "") -> Snapshot:
        """The run at this moment."""
        asked = self._mailbox.list_asked()
        index, phase, part = self._coordinator.place
        kinds: dict[str, dict[str, int]] = {direction: {} for direction in DIRECTIONS}
        for (direction, kind), sums in self._book.sums.items():
            kinds[direction][kind] = sums.message_bytes
        return Snapshot(
            run_id=self._run_id,
            host=identify_host(),
            pid=os.getpid(),
            written_at=time.time(),
            round=index,
            phase=phase,
            part=part,
            num_clients=self._roster.num_clients,
            num_connected=self._roster.num_linked,
            message_bytes=kinds,
            kernel=list(self._book.kernel),
            counts=count_states(asked),
            asked=select_shown(asked),
            seconds=time.monotonic() - self._started,
            ended=ended,
        )


def _write(folder: Path, found: Snapshot) -> float:
    """Writes what was found, if that is possible; returns the CPU seconds that it took."""
    started = time.thread_time()
    with contextlib.suppress(OSError, FedrpcError):
        write_snapshot(folder, found)
    return time.thread_time() - started


def _explain(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return "stopped by a signal"
    told = str(error) if isinstance(error, FedrpcError) else f"{type(error).__name__}: {error}"
    return told[: 5 * MAX_REASON]
