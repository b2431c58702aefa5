"""records.jsonl: what happened in each round, append-only, one object a line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedrpc.files import write_atomically


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a records file."""
    if path.exists():
        with path.open() as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)


def plain(value: Any) -> Any:
    """A value that JSON can hold: what is not a finite number becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


class RecordsFile:
    """The server's records.

    Args:
        path: The file.
        durable_round: Lines of later rounds are from a round that will be played again: they go.
        last: The lines that the checkpoint has of its round, in case a crash came before they were written.
    """

    def __init__(self, path: Path, durable_round: int, last: list[dict[str, Any]]) -> None:
        kept = [row for row in read(path) if row.get("round", -1) < durable_round]
        write_atomically(path, "".join(json.dumps(plain(row)) + "\n" for row in [*kept, *last]))
        self._path = path
        self._file = path.open("a")

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Appends lines, durably."""
        self._file.writelines(json.dumps(plain(row)) + "\n" for row in rows)
        self._file.flush()
        os.fsync(self._file.fileno())

    def all(self) -> list[dict[str, Any]]:
        """Every line so far."""
        return list(read(self._path))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
