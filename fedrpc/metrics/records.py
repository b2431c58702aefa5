"""Reads and writes records.jsonl: the events of each round, append-only, one JSON object per line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedrpc.files import Appended, explain_damage, read_lines, write_atomically


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a records file; raises Damaged."""
    return read_lines(path)


def to_json_value(value: Any) -> Any:
    """A value that JSON can hold: infinities and NaN become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: to_json_value(item) for key, item in value.items()}
    return [to_json_value(item) for item in value] if isinstance(value, list | tuple) else value


class RecordsFile:
    """The server's records.

    Args:
        path: The file.
        durable_round: Lines from this round on are dropped: the round will be run again.
        last: The lines of the checkpoint's round, which a crash may have kept from being written.
    """

    def __init__(self, path: Path, durable_round: int, last: list[dict[str, Any]]) -> None:
        with explain_damage(path):
            kept = [row for row in read_records(path) if row.get("round", -1) < durable_round]
        write_atomically(path, "".join(json.dumps(to_json_value(row)) + "\n" for row in [*kept, *last]))
        self._path = path
        self._file = Appended(path)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Appends lines, durably."""
        self._file.add("".join(json.dumps(to_json_value(row)) + "\n" for row in rows), sync=True)

    def all(self) -> list[dict[str, Any]]:
        """Every line so far."""
        return list(read_records(self._path))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
