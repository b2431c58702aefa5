"""A client's own ledger of bytes: one file, to which rows are appended as they are booked."""

from __future__ import annotations

import threading
from pathlib import Path

from fedrpc import log
from fedrpc.errors import Damaged
from fedrpc.files import Appended, measure_whole_lines, write_atomically
from fedrpc.wire.ledger import Rows, Sums, merge, read_rows, to_json

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

    What a power cut or damage may take with it is counted as the server's alone when the ledgers are compared.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # the event loop books, the training thread reads
        self._rows: Rows = {}
        self._num_lines = 0
        try:
            for key, sums in read_rows(path):
                merge(self._rows, {key: sums})
                self._num_lines += 1
        except Damaged as error:
            log.get("store").warning("byte_ledger_damaged", error=str(error), kept_as=f"torn-{path.name}")
            path.replace(path.with_name(f"torn-{path.name}"))
            self._write_anew()  # what came before
        self._file = Appended(path, measure_whole_lines(path))

    def _write_anew(self) -> None:
        write_atomically(self._path, "".join(to_json(key, sums) + "\n" for key, sums in self._rows.items()))
        self._num_lines = len(self._rows)

    def book(self, rows: Rows) -> None:
        """Adds rows."""
        data = "".join(to_json(key, sums) + "\n" for key, sums in rows.items())
        with self._lock:
            self._file.add(data)
            merge(self._rows, rows)
            self._num_lines += len(rows)
            if self._num_lines > _MAX_LINES + 2 * len(self._rows):
                self._file.close()
                self._write_anew()
                self._file = Appended(self._path)

    def read(self) -> Rows:
        """Returns all rows."""
        with self._lock:
            return {key: Sums(**vars(sums)) for key, sums in self._rows.items()}

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
