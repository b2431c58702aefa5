"""A client's own ledger of bytes: one file, to which rows are appended as they are booked."""

from __future__ import annotations

import threading
from pathlib import Path

from fedrpc.files import write_atomically
from fedrpc.wire.ledger import Rows, Sums, from_json, merge, to_json

_MAX_LINES = 10_000  # a phase of many steps books the same rows again and again: then they are added up


def read_byte_ledger(path: Path) -> Rows:
    """Reads the rows of a ledger that is not open; none when there is no file."""
    if not path.exists():
        return {}
    ledger = ByteLedger(path)
    ledger.close()
    return ledger.read()


class ByteLedger:
    """Rows are in the file when `book` returns, so a kill loses none; a transaction for each would cost ten times that.

    What a power cut may take with it is counted as the server's alone when the ledgers are compared.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # the event loop books, the training thread reads
        self._rows: Rows = {}
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line.decode() for line in lines if line.endswith(b"\n")]
        for line in whole:
            merge(self._rows, dict([from_json(line)]))
        self._num_lines = len(whole)
        if len(whole) < len(lines):
            self._write_anew()  # without the torn line
        self._file = path.open("ab", buffering=0)

    def _write_anew(self) -> None:
        write_atomically(self._path, "".join(to_json(key, sums) + "\n" for key, sums in self._rows.items()))
        self._num_lines = len(self._rows)

    def book(self, rows: Rows) -> None:
        """Adds rows."""
        data = "".join(to_json(key, sums) + "\n" for key, sums in rows.items()).encode()
        with self._lock:
            merge(self._rows, rows)
            self._file.write(data)
            self._num_lines += len(rows)
            if self._num_lines > _MAX_LINES + 2 * len(self._rows):
                self._file.close()
                self._write_anew()
                self._file = self._path.open("ab", buffering=0)

    def read(self) -> Rows:
        """Returns all rows."""
        with self._lock:
            return {key: Sums(**vars(sums)) for key, sums in self._rows.items()}

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
