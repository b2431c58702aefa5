"""Notices damage to a client's store: hashes of its rows, the number of its last write, and SQLite's own errors."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedrpc.errors import Damaged, DiskFull
from fedrpc.files import explain_full

_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY}
_TORN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
_REMEDY = (
    "put a copy of {folder} in its place, or remove that folder: then the client goes on without what it had stored, "
    "and a method whose clients remember something gives another model"
)


def seal(*values: bytes | str | int | None) -> bytes:
    """Computes a hash of a row's values."""
    hasher = hashlib.sha256()
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()


def report_damage(what: str, folder: Path) -> Damaged:
    """The error for a store in `folder` that cannot be trusted."""
    return Damaged(f"{what}; {_REMEDY.format(folder=folder)}")


@contextmanager
def explain_sqlite(path: Path, *, checking: bool = False) -> Iterator[None]:
    """Turns SQLite's errors of a full disk into DiskFull, and those of a changed file into Damaged.

    Args:
        checking: Only known tables are read, so that whatever goes wrong is damage, unless somebody else has the file.
    """
    try:
        yield
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # SQLite quotes what it cannot read
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the details
        if code in _FULL:
            raise DiskFull(
                f"cannot write {path}: {error}; free space there, then run the same command again"
            ) from error
        if code in _TORN or (checking and code not in _BUSY):
            raise report_damage(f"{path} is damaged: {error}", path.parent) from error
        raise


class WriteMark:
    """A small file beside a store with the number of the last answer that wrote values.

    A store that is behind it has lost some, for instance with its file of recent changes or all of it. A client that
    never stored a value has no mark, and can do without its store.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self.number = self._read()

    def _read(self) -> int:
        if not self._path.exists():
            return 0
        words = self._path.read_bytes().split()
        if len(words) != 2 or words[1] != _sign(words[0]):
            raise report_damage(f"{self._path} is damaged: its two words do not match", self._path.parent)
        return int(words[0])

    def advance(self, number: int) -> None:
        """Notes an answer that wrote values, after its commit; it is not synced, and neither is every commit."""
        digits = b"%020d" % number
        with explain_full(self._path):
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.pwrite(self._fd, digits + b" " + _sign(digits) + b"\n", 0)  # always of the same length
        self.number = number

    def close(self) -> None:
        """Closes the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


def _sign(digits: bytes) -> bytes:
    return hashlib.sha256(digits).hexdigest()[:16].encode()
