"""Keeps accepted replies on disk until a durable point: memory stays bounded, and a restart reuses them."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from fedrpc.errors import WireError
from fedrpc.files import Appended, explain_full
from fedrpc.wire.envelope import Envelope
from fedrpc.wire.frames import check_digest, parse_file, read_file

_SMALL = "small.log"
_LINE = re.compile(rb"([0-9A-Za-z_-]+) ([0-9]{1,18})\n")
_MAX_LINE = 200  # bytes: a task's id and a size


@dataclass(frozen=True)
class Span:
    """The place of a small reply in a file of many."""

    file: Appended
    start: int
    size: int

    def read(self) -> memoryview:
        """Reads its bytes, into writable memory as torch requires."""
        return memoryview(bytearray(self.file.read(self.start, self.size)))


Spooled = Path | Span


def read_reply(reply: Spooled) -> tuple[Envelope, list[memoryview]]:
    """Reads a reply's envelope and parts; raises WireError when it is torn."""
    return read_file(reply) if isinstance(reply, Path) else parse_file(reply.read(), "a reply")


class _Log:
    """Small replies one after the other in one file: a file for each would cost more than the rest of the work on it.

    Each begins with a line of its task and size. A crash can tear only the last one, which was not acknowledged. What
    follows a damaged one is left out: its clients still have their answers.
    """

    def __init__(self, path: Path) -> None:
        self.spans: dict[str, Span] = {}
        spans, end = _list_spans(path)
        self._file = Appended(path, end)
        for task, (start, size) in spans.items():
            self.spans[task] = Span(self._file, start, size)

    def add(self, task_id: str, data: bytes) -> Span:
        line = f"{task_id} {len(data)}\n".encode()
        start = self._file.add(line + data)
        span = self.spans[task_id] = Span(self._file, start + len(line), len(data))
        return span

    def close(self) -> None:
        self._file.close()


def _list_spans(path: Path) -> tuple[dict[str, tuple[int, int]], int]:
    """Finds the replies in a file of small ones by task, as (start, size); and where the last whole one ends."""
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    if not path.exists():
        return spans, end
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        while line := _LINE.fullmatch(file.readline(_MAX_LINE)):
            start, size = end + len(line[0]), int(line[2])
            if start + size > total:
                break
            spans[line[1].decode()] = start, size
            end = file.seek(start + size)
    return spans, end


class Spool:
    """One folder for each epoch, the time between two durable points: a file for each reply, one for all small ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob("*/*.part"):
            torn.unlink()
        self._logs = {int(path.parent.name): _Log(path) for path in folder.glob(f"*/{_SMALL}")}

    def close(self) -> None:
        """Closes the files of small replies."""
        for log in self._logs.values():
            log.close()

    def _make_folder(self, epoch: int) -> Path:
        path = self.folder / str(epoch)
        with explain_full(path):
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
        log, path = self._logs.get(epoch), self.folder / str(epoch) / task_id
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
        for path in self.folder.iterdir():
            if int(path.name) < durable:
                shutil.rmtree(path)
