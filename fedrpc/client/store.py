"""A client's private, transactional store: what methods remember, answers until they are durable, and both ledgers.

An answer's writes, its outgoing bytes and its privacy rows commit together. Every write carries the number of the
answer that made it, so an answer can be undone with all that came after it; what the server reports durable is folded.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from fedrpc.errors import Refused, WireError
from fedrpc.privacy.accountant import merged, spent
from fedrpc.privacy.ledger import GENESIS, Release, chained, history_of
from fedrpc.privacy.mechanisms import History
from fedrpc.wire import ledger, stored
from fedrpc.wire.codec import Payload
from fedrpc.wire.envelope import Envelope
from fedrpc.wire.frames import check_bytes, file_bytes, fits_envelope, stored_payload, write_file

T = TypeVar("T")
Kept = Path | bytes  # an answer's file, or of a small one the bytes that would be in it
_LARGE_BYTES = 256 << 10  # of a value: SQLite would write it twice, and sum up every page of it
_MAX_ROWS_BYTES = 1 << 20
_DELTA = 1e-5  # for comparing two accounts; any would do

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER);
INSERT OR IGNORE INTO meta VALUES (1, 0);
CREATE TABLE IF NOT EXISTS entries (key TEXT, number INTEGER, epoch INTEGER, value BLOB, PRIMARY KEY (key, number));
CREATE TABLE IF NOT EXISTS answers (task TEXT PRIMARY KEY, number INTEGER, epoch INTEGER, question BLOB,
                                    attempts INTEGER);
CREATE TABLE IF NOT EXISTS bodies (number INTEGER PRIMARY KEY, data BLOB);
CREATE TABLE IF NOT EXISTS privacy (number INTEGER PRIMARY KEY, row TEXT, hash BLOB);
CREATE TABLE IF NOT EXISTS bytes (round INTEGER, phase TEXT, kind TEXT, direction TEXT, client INTEGER,
    attempt INTEGER, aborted INTEGER, tensor INTEGER, message INTEGER, messages INTEGER,
    PRIMARY KEY (round, phase, kind, direction, client, attempt, aborted));
"""


class Transaction:
    """What one answer reads and writes; nothing counts until the store commits it."""

    def __init__(self, store: ClientStore) -> None:
        self._store = store
        self.writes: dict[str, bytes | None] = {}

    def get(self, key: str, cls: type[T]) -> T | None:
        """The message under a key, this answer's own writes included."""
        blob = self.writes[key] if key in self.writes else self._store.blob(key)
        found: T | None = None if blob is None else stored.loads(cls, blob)
        return found

    def put(self, key: str, message: Any) -> None:
        """Keeps a message under a key."""
        self.writes[key] = stored.dumps(message)

    def delete(self, key: str) -> None:
        """Forgets a key."""
        self.writes[key] = None


def _is_whole(kept: Kept) -> bool:
    try:
        envelope, payload = stored_payload(kept)
        check_bytes(envelope, [views[0] if views else memoryview(b"") for views in payload.buffers])
    except (OSError, WireError):
        return False  # lost with the power, for not every answer is worth a sync; it is made again
    return True


class ClientStore:
    """One client's store in one folder."""

    def __init__(self, folder: Path) -> None:
        self._answers = folder / "answers"
        self._values = folder / "values"
        for path in (self._answers, self._values):
            path.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()  # the training thread and the event loop both come here
        self._db = sqlite3.connect(folder / "store.db", check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.executescript(_SCHEMA)
        named = {name for (name,) in self._db.execute("SELECT value FROM entries WHERE typeof(value) = 'text'")}
        self._remove(path.name for path in self._values.iterdir() if path.name not in named)  # of a crash

    def _one(self, sql: str, *args: Any) -> Any:
        with self._lock:
            return self._db.execute(sql, args).fetchone()

    def blob(self, key: str) -> bytes | None:
        """The newest bytes under a key."""
        row = self._one("SELECT value FROM entries WHERE key = ? ORDER BY number DESC LIMIT 1", key)
        if row is None or not isinstance(row[0], str):
            return row[0] if row else None
        return (self._values / row[0]).read_bytes()

    def _set_aside(self, value: bytes | None) -> bytes | str | None:
        """What stands for a value in the data base: itself, or the name of its file, which is safe when it is named."""
        if value is None or len(value) <= _LARGE_BYTES:
            return value
        name = secrets.token_hex(16)
        with (self._values / name).open("wb") as file:
            file.write(value)
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(self._values, os.O_RDONLY)  # its name must be as safe as its bytes
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return name

    def _remove(self, names: Iterable[Any]) -> None:
        for name in names:
            if isinstance(name, str):  # others were in the data base
                (self._values / name).unlink(missing_ok=True)

    def answer(self, task: str, question: bytes) -> Kept | None:
        """The kept answer to a question; the same task with another question undoes the answer and all after it."""
        row = self._one(
            "SELECT number, question, data FROM answers LEFT JOIN bodies USING (number) WHERE task = ?", task
        )
        if row is None:
            return None
        kept: Kept = self._answers / task if row[2] is None else row[2]
        if row[1] == question and _is_whole(kept):
            return kept
        with self._lock, self._db:
            self._db.execute("BEGIN")
            undone = self._db.execute(
                "DELETE FROM entries WHERE number >= ? RETURNING iif(typeof(value) = 'text', value, NULL)", (row[0],)
            ).fetchall()
            self._db.execute("DELETE FROM answers WHERE number >= ?", (row[0],))
            self._db.execute("DELETE FROM bodies WHERE number >= ?", (row[0],))
        self._remove(name for (name,) in undone)
        return None

    def commit(
        self, envelope: Envelope, payload: Payload, writes: dict[str, bytes | None], released: Iterable[Release]
    ) -> Kept:
        """Makes an answer count: its writes, its bytes and its privacy rows, all or none.

        A small answer's bytes lie in the data base: making and removing a file would cost more than the answer. A row
        that promises something must never be lost with the power, or it would be spent twice; only then is it worth a
        sync.
        """
        released = list(released)
        promised = any(release.guarantee.history for release in released)
        kept: Kept
        if fits_envelope(payload):
            kept = file_bytes(envelope, payload)
        else:
            kept = self._answers / envelope.task_id
            write_file(kept, envelope, payload, sync=promised)
        values = {key: self._set_aside(value) for key, value in writes.items()}
        with self._lock:
            self._db.execute(f"PRAGMA synchronous={'FULL' if promised else 'NORMAL'}")
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                number = self._next_number()
                self._db.execute(
                    "INSERT INTO answers VALUES (?, ?, ?, ?, 0)",
                    (envelope.task_id, number, envelope.epoch, envelope.question),
                )
                if isinstance(kept, bytes):
                    self._db.execute("INSERT INTO bodies VALUES (?, ?)", (number, kept))
                rows = [(key, number, envelope.epoch, value) for key, value in values.items()]
                self._db.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", rows)
                for release in released:
                    self._append(release)
        return kept

    def _next_number(self) -> int:
        # Never reused, also after answers were undone or folded.
        self._db.execute("UPDATE meta SET number = number + 1")
        return int(self._db.execute("SELECT number FROM meta").fetchone()[0])

    def _append(self, release: Release) -> None:
        count, head = self._head()
        row = release.row(count, head)
        self._db.execute("INSERT INTO privacy VALUES (?, ?, ?)", (count, row, chained(head, row)))

    def _head(self) -> tuple[int, bytes]:
        row = self._db.execute("SELECT number, hash FROM privacy ORDER BY number DESC LIMIT 1").fetchone()
        return (row[0] + 1, row[1]) if row else (0, GENESIS)

    def next_attempt(self, task: str) -> int:
        """Numbers the uploads of an answer from 0, across restarts."""
        with self._lock:
            row = self._db.execute(
                "UPDATE answers SET attempts = attempts + 1 WHERE task = ? RETURNING attempts - 1", (task,)
            ).fetchone()
        return int(row[0]) if row else 0

    def fold(self, durable: int) -> None:
        """Drops what only a replay from before the last durable point would need."""
        with self._lock, self._db:
            self._db.execute("BEGIN")
            done = self._db.execute(
                "SELECT task FROM answers WHERE epoch < ? AND number NOT IN (SELECT number FROM bodies)", (durable,)
            ).fetchall()
            self._db.execute(
                "DELETE FROM bodies WHERE number IN (SELECT number FROM answers WHERE epoch < ?)", (durable,)
            )
            self._db.execute("DELETE FROM answers WHERE epoch < ?", (durable,))
            old = self._db.execute(
                "DELETE FROM entries WHERE number < (SELECT MAX(number) FROM entries AS newer "
                "WHERE newer.key = entries.key AND newer.epoch < ?) RETURNING iif(typeof(value) = 'text', value, NULL)",
                (durable,),
            ).fetchall()
        self._remove(name for (name,) in old)
        for (task,) in done:
            (self._answers / task).unlink(missing_ok=True)

    def privacy_rows(self, first: int) -> list[str]:
        """The chain's rows from index `first` on, as many as fit well into one gRPC message."""
        with self._lock:
            found = self._db.execute("SELECT row FROM privacy WHERE number >= ? ORDER BY number", (first,))
            rows: list[str] = []
            size = 0
            for (row,) in found:
                size += len(row)
                if size > _MAX_ROWS_BYTES:
                    break
                rows.append(row)
        return rows

    def num_released(self) -> int:
        """How many privacy rows there are; it never falls."""
        with self._lock:
            return self._head()[0]

    def spent(self) -> History:
        """What was released with a guarantee so far; also what was undone later, for it may have been seen."""
        with self._lock:
            rows = self._db.execute("SELECT row FROM privacy ORDER BY number").fetchall()
        return merged(history_of(json.loads(row)) for (row,) in rows)

    def adopt_chain(self, count: int, head: bytes, history: History) -> bool:
        """Continues the server's copy of the chain when it is longer than ours (a lost store); says whether it was.

        Args:
            count: How many rows the server holds.
            head: The hash of the last of them.
            history: What they spent, all together.

        Raises:
            Refused: The server's copy is of another chain than ours.
        """
        ours = self.spent()
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            if count > self._head()[0]:
                if spent(history, _DELTA) < spent(ours, _DELTA):
                    raise Refused(
                        "the server tells of more privacy rows than this client has, but of less that they spent: "
                        "one of them was changed; start both with the folders of the same run"
                    )
                row = json.dumps({"history": history})
                self._db.execute("DELETE FROM privacy")
                self._db.execute("INSERT INTO privacy VALUES (?, ?, ?)", (count - 1, row, head))
                return True
            known = self._db.execute("SELECT hash FROM privacy WHERE number = ?", (count - 1,)).fetchone()
        if known and known[0] != head:
            raise Refused(
                f"the server's copy of this client's privacy rows differs from its own at row {count - 1}: one of them "
                "was changed; start both with the folders of the same run"
            )
        return False

    def book(self, rows: ledger.Rows) -> None:
        """Adds rows to the client's ledger of bytes."""
        values = [
            (k.round, k.phase, k.kind, k.direction, k.client, k.attempt, k.aborted, *vars(s).values())
            for k, s in rows.items()
        ]
        with self._lock, self._db:
            self._db.execute("BEGIN")
            self._db.executemany(
                "INSERT INTO bytes VALUES (?,?,?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET "
                "tensor = tensor + excluded.tensor, message = message + excluded.message, "
                "messages = messages + excluded.messages",
                values,
            )

    def booked(self) -> ledger.Rows:
        """The client's ledger of bytes."""
        with self._lock:
            rows = self._db.execute("SELECT * FROM bytes").fetchall()
        return {
            ledger.Key(rnd, phase, kind, direction, client, attempt, bool(aborted)): ledger.Sums(*sums)
            for rnd, phase, kind, direction, client, attempt, aborted, *sums in rows
        }

    def close(self) -> None:
        """Closes the data base."""
        with self._lock:
            self._db.close()
