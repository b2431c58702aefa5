"""Reads the lines of a file that grows, each once, however large the file is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOST_BYTES = 2 << 20  # read at a time, so that a large file takes several turns instead of one long one
_LONGEST_LINE = 64 << 20
_MARK_BYTES = 64  # before the place reached: whether they are still the same tells a file that was rewritten


class News(NamedTuple):
    """What came since the last time; after `restarted` all that was read before does not count any more."""

    restarted: bool
    lines: list[bytes]


NOTHING = News(False, [])


class Tail:
    """Remembers how far a file was read. A line that is not whole yet comes another time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place, self._mark, self._inode = 0, b"", 0
        self._seen: tuple[int, int, int] | None = None
        self._most = MOST_BYTES

    def read(self) -> News:
        """The new whole lines, up to some megabytes of them; a file that vanished starts anew."""
        try:
            found = os.stat(self.path)
            seen = (found.st_ino, found.st_size, found.st_mtime_ns)
            if seen == self._seen and self._place == found.st_size:
                return NOTHING
            return self._read(seen)
        except OSError:
            restarted, self._seen = self._place > 0, None
            self._restart(0)
            return News(restarted, [])

    def read_all(self) -> Iterator[News]:
        """All that is new, in as many turns as it takes."""
        place = None
        while place != (place := (self._place, self._most)):
            yield self.read()

    def _read(self, seen: tuple[int, int, int]) -> News:
        with self.path.open("rb") as file:
            inode, size = (found := os.fstat(file.fileno())).st_ino, found.st_size
            restarted = self._place > 0 and (
                inode != self._inode or size < self._place or not self._is_marked(file.fileno())
            )
            if restarted or not self._place:
                self._restart(inode)
            data = os.pread(file.fileno(), self._most, self._place)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == self._most < _LONGEST_LINE:
            self._most *= 2  # one line is longer than that
        elif end:
            self._most, self._seen = MOST_BYTES, seen
            self._mark = (self._mark + data[:end])[-_MARK_BYTES:]
            self._place += end
        return News(restarted, data[:end].splitlines())

    def _is_marked(self, fd: int) -> bool:
        return os.pread(fd, len(self._mark), self._place - len(self._mark)) == self._mark

    def _restart(self, inode: int) -> None:
        self._place, self._mark, self._inode, self._most = 0, b"", inode, MOST_BYTES
