"""Writes files so that a crash leaves the old contents or the new ones, and reads them with one line for damage."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fedrpc.errors import ConfigError, Damaged, DiskFull

# What a disk says that is full, over its quota, failing or mounted read-only after a failure.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
_BLOCK_BYTES = 64 << 10
CHECKSUMS = "SHA256SUMS"  # of a finished run's files
RESTORE = "put a copy of it in its place, or run again in another --out"


@contextmanager
def open_replacement(path: Path, *, sync: bool = False, private: bool = False) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` when the block ends without an error.

    Args:
        path: The file to replace; it need not exist.
        sync: Whether its contents must be on disk before it takes the name.
        private: Whether only its owner may read it, not even others for a moment.

    Raises:
        DiskFull: There is no room for it.
    """
    temporary = path.with_name(path.name + ".tmp")
    with explain_full(path):
        try:
            with open(temporary, "wb", opener=_open_privately if private else None) as file:
                yield file
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)  # half a file would only take room
            raise
        temporary.replace(path)


def _open_privately(path: str, flags: int) -> int:
    fd = os.open(path, flags, 0o600)
    os.fchmod(fd, 0o600)  # of one, too, that a kill left
    return fd


def write_atomically(path: Path, data: str | bytes, *, sync: bool = False, private: bool = False) -> None:
    """Replaces a file's contents in one step; text is written as UTF-8."""
    with open_replacement(path, sync=sync, private=private) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_durably(path: Path, data: str | bytes) -> None:
    """Replaces a file's contents in one step, and returns only when a power cut cannot undo it."""
    write_atomically(path, data, sync=True)
    sync(path.parent)  # the name must be as safe as the contents


def sync(path: Path) -> None:
    """Waits until a file's contents, or a folder's names, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Appended:
    """A file to which whole pieces are appended; a piece is in the file when `add` returns, so a kill loses none.

    Args:
        path: The file; created when it does not exist.
        size: How much of it to keep; what comes after is removed.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path, self._fd = path, -1
        with explain_full(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size if size is None else size
        os.ftruncate(self._fd, self._size)

    def add(self, data: str | bytes, *, sync: bool = False) -> int:
        """Appends a piece, all of it or nothing; returns where it begins. Raises DiskFull."""
        start = self._size
        rest = memoryview(data.encode() if isinstance(data, str) else data)
        end = start + len(rest)
        with explain_full(self.path):
            try:
                while rest:  # a disk that fills up takes a part first, and gives its error then
                    rest = rest[os.write(self._fd, rest) :]
                if sync:
                    os.fsync(self._fd)
            except OSError:
                os.ftruncate(self._fd, start)
                raise
        self._size = end
        return start

    def read(self, start: int, size: int) -> bytes:
        """Reads a piece again."""
        return os.pread(self._fd, size, start)

    def sync(self) -> None:
        """Waits until all of it is on disk."""
        with explain_full(self.path):
            os.fsync(self._fd)

    def close(self) -> None:
        """Closes the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


def measure_whole_lines(path: Path) -> int:
    """Measures a file up to the end of its last whole line: a kill may have cut off the next one."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            if (place := file.read(end - start).rfind(b"\n")) >= 0:
                return start + place + 1
            end = start
    return 0


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Reads a file of JSON objects, one a line; a last line that a crash tore is left out.

    Raises:
        Damaged: A line is no JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            with explain_damage(path, f"line {number}"):
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"expected an object, got {line[:40]!r}")
            yield row


def write_checksums(folder: Path, names: Iterable[str], known: Mapping[str, bytes]) -> None:
    """Writes SHA256SUMS, which `sha256sum -c` reads, too.

    Args:
        names: The files of `folder` that will not change any more.
        known: The contents of further files, by name.
    """
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in known.items()}
    sums |= {name: _hash_file(folder / name) for name in names if (folder / name).is_file()}
    write_durably(folder / CHECKSUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def find_changed(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """Yields what is wrong with those of these files that SHA256SUMS knows; nothing when there is no SHA256SUMS."""
    path = folder / CHECKSUMS
    if not path.is_file():
        return
    with explain_damage(path, remedy="remove it, which leaves the other files unchecked"):
        lines = [line.split("  ") for line in path.read_text().splitlines()]
        sums = {name: digest for digest, name in lines}
    for name in names:
        if name in sums and not (folder / name).is_file():
            yield f"{folder / name} is missing since the run ended; {RESTORE}"
        elif name in sums and (got := _hash_file(folder / name)) != sums[name]:
            yield (
                f"{folder / name} was changed since the run ended: expected SHA-256 {sums[name][:16]}, got {got[:16]}; "
                f"{RESTORE}"
            )


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def explain_damage(path: Path, place: str = "", remedy: str = RESTORE) -> Iterator[None]:
    """Turns what goes wrong while a file of a run is read into Damaged.

    Args:
        place: Where in the file it is.
        remedy: What the reader can do.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        where = f"{path}, {place}" if place else str(path)
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise Damaged(f"{where} is damaged: {what}; {remedy}") from error


@contextmanager
def explain_full(path: Path) -> Iterator[None]:
    """Turns the error of a disk that is full or fails into DiskFull, with the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFull(
            f"cannot write {path}: {error.strerror}; free space there, then run the same command again to go on"
        ) from error


@contextmanager
def explain_unwritable(path: Path) -> Iterator[None]:
    """Turns an operating system's refusal to write `path` into a ConfigError with the remedy."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}; check free space and permissions") from error
