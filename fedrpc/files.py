"""Replaces files whole: a reader, or a crash, finds the old contents or the new ones, never a mix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedrpc.errors import ConfigError


@contextmanager
def open_replacement(path: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` when the block ends without an error.

    Args:
        path: The file to replace; it need not exist.
        sync: Whether its contents must be on disk before it takes the name.
    """
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        yield file
        if sync:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


def write_atomically(path: Path, data: str | bytes, *, sync: bool = False) -> None:
    """Replaces a file's contents in one step; text is written as UTF-8."""
    with open_replacement(path, sync=sync) as file:
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


@contextmanager
def explain_unwritable(path: Path) -> Iterator[None]:
    """Turns an operating system's refusal to write `path` into a ConfigError with the remedy."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}; check free space and permissions") from error
