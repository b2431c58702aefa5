"""Keeps accepted replies on disk until a durable point: memory stays bounded, and a restart reuses them."""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fedrpc.errors import WireError
from fedrpc.wire.envelope import Envelope
from fedrpc.wire.frames import check_digest, parse_file, read_file

_SMALL = "small.log"


@dataclass(frozen=True)
class Span:
    """The place of a small reply in a file of many."""

    file: BinaryIO
    start: int
    size: int

    def read(self) -> memoryview:
        """Reads its bytes, into writable memory as torch requires."""
        return memoryview(bytearray(os.pread(self.file.fileno(), self.size, self.start)))


Spooled = Path | Span


def read_reply(reply: Spooled) -> tuple[Envelope, list[memoryview]]:
    """Reads a reply's envelope and parts; raises WireError when it is torn."""
    return read_file(reply) if isinstance(reply, Path) else parse_file(reply.read(), "a reply")


class _Log:
    """Small replies one after the other in one file: a file for each would cost more than the rest of the work on it.

    Each begins with a line of its task and size. A crash can tear only the last one, which was not acknowledged.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)
        self.spans: dict[str, Span] = {}
        self._end = 0
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while (line := file.readline()).endswith(b"\n"):
                task, length = line.decode().split()
                start = self._end + len(line)
                if start + int(length) > size:
                    break
                self.spans[task] = Span(self._file, start, int(length))
                self._end = file.seek(start + int(length))
        self._file.truncate(self._end)

    def add(self, task_id: str, data: bytes) -> Span:
        line = f"{task_id} {len(data)}\n".encode()
        if self._file.write(line + data) != len(line) + len(data):
            self._file.truncate(self._end)
            raise OSError(f"no space left for replies in {self._file.name}")
        span = self.spans[task_id] = Span(self._file, self._end + len(line), len(data))
        self._end += len(line) + len(data)
        return span

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()


class Spool:
    """One folder for each epoch, the time between two durable points: a file for each reply, one for all small ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob("*/*.part"):
            torn.unlink()
        self._logs = {int(path.parent.name): _Log(path) for path in folder.glob(f"*/{_SMALL}")}

    def _make_folder(self, epoch: int) -> Path:
        path = self._folder / str(epoch)
        path.mkdir(exist_ok=True)
        return path

    def make_incoming_path(self, epoch: int, task_id: str) -> Path:
        """Returns a new path for a transfer to write to; never the same path twice."""
        return self._make_folder(epoch) / f"{task_id}.{next(self._numbers)}.part"

    def keep(self, incoming: Path, epoch: int, task_id: str) -> Path:
        """Moves a complete reply to its final name."""
        return incoming.replace(self._make_folder(epoch) / task_id)

    def keep_small(self, data: bytes, epoch: int, task_id: str) -> Span:
        """Keeps a small reply, given as the bytes of its file."""
        if epoch not in self._logs:
            self._logs[epoch] = _Log(self._make_folder(epoch) / _SMALL)
        return self._logs[epoch].add(task_id, data)

    def _find(self, epoch: int, task_id: str) -> Spooled | None:
        log, path = self._logs.get(epoch), self._folder / str(epoch) / task_id
        if log and task_id in log.spans:
            return log.spans[task_id]
        return path if path.exists() else None

    def find_reusable(self, epoch: int, task_id: str, question: bytes) -> Spooled | None:
        """Finds the reply to the same question that this server accepted before a restart."""
        found = self._find(epoch, task_id)
        if found is None:
            return None
        try:
            envelope, views = read_reply(found)
            if envelope.question == question:
                check_digest(envelope, views)
                return found
        except WireError:
            pass  # torn by a power cut: the client still has its answer
        if isinstance(found, Path):
            found.unlink()
        else:
            del self._logs[epoch].spans[task_id]
        return None

    def exists(self, epoch: int, task_id: str) -> bool:
        """Whether there is a reply to this task, to whatever question."""
        return self._find(epoch, task_id) is not None

    def clear(self, durable: int) -> None:
        """Removes the replies from before the last durable point."""
        for epoch in [epoch for epoch in self._logs if epoch < durable]:
            self._logs.pop(epoch).close()
        for path in self._folder.iterdir():
            if int(path.name) < durable:
                shutil.rmtree(path)
