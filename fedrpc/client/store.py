"""A client's private, transactional store: methods' values, answers until they are durable, and the privacy ledger.

An answer's writes, its outgoing bytes and its privacy rows commit together. Every write carries the number of its
answer, so an answer can be undone with all later ones; versions before a durable point are dropped.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fedrpc import log
from fedrpc.client.byte_ledger import ByteLedger
from fedrpc.client.integrity import WriteMark, explain_sqlite, report_damage, seal
from fedrpc.errors import Damaged, Refused, WireError
from fedrpc.files import explain_full, sync, write_atomically, write_durably
from fedrpc.privacy.accountant import choose_larger, compute_epsilon
from fedrpc.privacy.ledger import GENESIS, TAKEN_OVER, Release, hash_row, parse_history, read_histories
from fedrpc.privacy.mechanisms import Histories, History, add_histories
from fedrpc.wire import stored
from fedrpc.wire.codec import Payload
from fedrpc.wire.envelope import Envelope, build_envelope
from fedrpc.wire.frames import check_digest, fits_frame, load_payload, serialise_file, write_file
from fedrpc.wire.ledger import Rows

T = TypeVar("T")
BYTES_FILE = "bytes.jsonl"
Kept = Path | bytes  # an answer's file, or the bytes of the file when the answer is small
_SMALL_BYTES = 32 << 10  # an answer up to this goes into the database
_LARGE_BYTES = 256 << 10  # a larger value gets a file: SQLite would write it twice and checksum every page
_MAX_ROWS_BYTES = 1 << 20
_DELTA = 1e-5  # for comparing two histories; any value would do
_ADOPTED = "adopted"  # the key of what the server said of a chain, in place of the row that its head belongs to

_VERSION = 2  # of the tables
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER);
INSERT OR IGNORE INTO meta VALUES (1, 0);
CREATE TABLE IF NOT EXISTS entries (key TEXT, number INTEGER, epoch INTEGER, value BLOB, sha256 BLOB, seal BLOB,
                                    PRIMARY KEY (key, number));
CREATE TABLE IF NOT EXISTS answers (task TEXT PRIMARY KEY, number INTEGER, epoch INTEGER, question BLOB, envelope BLOB,
                                    seal BLOB, attempts INTEGER);
CREATE TABLE IF NOT EXISTS bodies (number INTEGER PRIMARY KEY, data BLOB);
CREATE TABLE IF NOT EXISTS privacy (number INTEGER PRIMARY KEY, row TEXT, hash BLOB, seal BLOB);
"""
# What each row's seal is of; a small value is not read for it, but checked when it is used.
_SEALED = (
    "SELECT key, number, epoch, iif(typeof(value) = 'text', value, NULL), sha256, seal FROM entries",
    "SELECT task, number, epoch, question, envelope, seal FROM answers",
    "SELECT number, row, hash, seal FROM privacy",
)
_UNSEALED = ("SELECT number FROM meta", "SELECT number, data FROM bodies", "SELECT attempts FROM answers")


class Transaction:
    """The reads and writes of one answer; nothing is stored until the store commits them."""

    def __init__(self, store: ClientStore) -> None:
        self._store = store
        self.writes: dict[str, bytes | None] = {}

    def get(self, key: str, cls: type[T]) -> T | None:
        """Returns the message under a key, including this answer's own writes."""
        blob = self.writes[key] if key in self.writes else self._store.read_value(key)
        found: T | None = None if blob is None else stored.loads(cls, blob)
        return found

    def put(self, key: str, message: Any) -> None:
        """Stores a message under a key."""
        self.writes[key] = stored.dumps(message)

    def delete(self, key: str) -> None:
        """Deletes a key."""
        self.writes[key] = None


def _hash_envelope(envelope: Envelope) -> bytes:
    return hashlib.sha256(build_envelope(envelope).SerializeToString()).digest()


def _is_whole(kept: Kept, expected: bytes) -> bool:
    try:
        envelope, payload = load_payload(kept)
        check_digest(envelope, [views[0] if views else memoryview(b"") for views in payload.buffers])
    except (OSError, WireError):
        return False  # lost in a power cut, since not every answer is synced; it is computed again
    return _hash_envelope(envelope) == expected


class ClientStore:
    """One client's store in one folder.

    Raises:
        Damaged: It was changed, or has lost values that the client stored.
    """

    def __init__(self, folder: Path) -> None:
        self._answers = folder / "answers"
        self._values = folder / "values"
        for path in (self._answers, self._values):
            with explain_full(path):
                path.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()  # the training thread and the event loop share the store
        self._path = folder / "store.db"
        self._mark = WriteMark(folder / "store.mark")
        # A store is created without waiting for the disk. Until its file is synced, which the first row with a cost
        # waits for, a power cut can only take what was not synced anyway, and at worst all of it.
        self._is_synced = False
        try:
            self._db = self._open_database()
        except Damaged as error:
            if self._mark.number:
                raise
            # Without values it can be done without: the server's copy of the privacy rows is adopted.
            log.get("store").warning("store_torn", error=str(error), kept_as=f"torn-{self._path.name}")
            for path in folder.glob("store.db*"):
                path.replace(folder / f"torn-{path.name}")
            self._db = self._open_database()
        self._bytes = ByteLedger(folder / BYTES_FILE)
        self._syncing = False
        self._unsent: set[str] = set()  # answers that were committed and not yet sent
        self._last_rows: tuple[int, list[str]] = (-1, [])  # the index of the last commit's first row, and its rows
        named = {name for (name,) in self._db.execute("SELECT value FROM entries WHERE typeof(value) = 'text'")}
        self._remove(path.name for path in self._values.iterdir() if path.name not in named)  # left by a crash

    def _open_database(self) -> sqlite3.Connection:
        is_new = not self._path.exists()
        with explain_sqlite(self._path, checking=not is_new):
            db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            try:
                if is_new:
                    db.execute("PRAGMA synchronous=OFF")
                    db.execute(f"PRAGMA user_version={_VERSION}")
                db.execute("PRAGMA journal_mode=WAL")
                if not is_new:
                    self._check_database(db)
                db.executescript(f"BEGIN; {_SCHEMA} COMMIT; PRAGMA synchronous=NORMAL;")
                self._check_number(db)
                return db
            except BaseException:
                db.close()
                raise

    def _check_database(self, db: sqlite3.Connection) -> None:
        """Raises Damaged unless the tables are whole, of this version, and have the rows that were written."""
        (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise report_damage(f"{self._path} is damaged: {' '.join(found.split())}", self._path.parent)
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version != _VERSION:
            raise report_damage(
                f"{self._path} has version {version}, expected {_VERSION}: it is of another fedrpc, or was changed",
                self._path.parent,
            )
        for sql in _UNSEALED:
            db.execute(sql)
        for sql in _SEALED:
            for *values, found in db.execute(sql):
                if seal(*values) != found:
                    raise report_damage(f"{self._path} is damaged: a row does not match its hash", self._path.parent)

    def _check_number(self, db: sqlite3.Connection) -> None:
        (number,) = db.execute("SELECT number FROM meta").fetchone()
        (written,) = db.execute("SELECT MAX(number) FROM (SELECT number FROM entries UNION SELECT number FROM answers)")
        if number < max(written[0] or 0, self._mark.number):
            raise report_damage(
                f"{self._path} has lost values that this client stored: expected those of answer {self._mark.number}, "
                f"got up to answer {number}",
                self._path.parent,
            )

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock, explain_sqlite(self._path):
            yield self._db

    def _sync(self) -> None:
        """Makes the file and its name durable, once; SQLite sees to what is written to it later."""
        if self._is_synced:
            return
        with explain_full(self._path):
            sync(self._path)
            sync(self._path.parent)
        self._is_synced = True

    def _fetch_one(self, sql: str, *args: Any) -> Any:
        with self._using() as db:
            return db.execute(sql, args).fetchone()

    def read_value(self, key: str) -> bytes | None:
        """Reads the latest value under a key, as bytes."""
        row = self._fetch_one("SELECT value, sha256 FROM entries WHERE key = ? ORDER BY number DESC LIMIT 1", key)
        if row is None or row[0] is None:
            return None
        path = self._values / row[0] if isinstance(row[0], str) else None
        if path and not path.exists():
            raise report_damage(f"{path} is missing: the value '{key}' of this client", self._path.parent)
        value: bytes = path.read_bytes() if path else row[0]
        if hashlib.sha256(value).digest() != row[1]:
            raise report_damage(f"{path or self._path} is damaged: the value '{key}' was changed", self._path.parent)
        return value

    def _set_aside(self, value: bytes | None) -> bytes | str | None:
        """Returns what the database holds for a value: itself, or the name of its file, which is already durable."""
        if value is None or len(value) <= _LARGE_BYTES:
            return value
        name = secrets.token_hex(16)
        write_durably(self._values / name, value)
        return name

    def _remove(self, names: Iterable[Any]) -> None:
        for name in names:
            if isinstance(name, str):  # other values were in the database
                (self._values / name).unlink(missing_ok=True)

    def find_answer(self, task: str, question: bytes) -> Kept | None:
        """Finds the kept answer to a question; the same task with another question undoes it and all later answers."""
        row = self._fetch_one(
            "SELECT number, question, data, envelope FROM answers LEFT JOIN bodies USING (number) WHERE task = ?", task
        )
        if row is None:
            return None
        kept: Kept = self._answers / task if row[2] is None else row[2]
        if row[1] == question and _is_whole(kept, row[3]):
            return kept
        with self._using(), self._db:
            self._db.execute("BEGIN")
            undone = self._db.execute(
                "DELETE FROM entries WHERE number >= ? RETURNING iif(typeof(value) = 'text', value, NULL)", (row[0],)
            ).fetchall()
            self._db.execute("DELETE FROM answers WHERE number >= ?", (row[0],))
            self._db.execute("DELETE FROM bodies WHERE number >= ?", (row[0],))
        self._remove(name for (name,) in undone)
        return None

    def commit(
        self,
        envelope: Envelope,
        payload: Payload,
        writes: dict[str, bytes | None],
        released: Iterable[Release],
    ) -> Kept:
        """Commits an answer: its writes, its bytes and its privacy rows, all or none.

        A small answer's bytes go into the database: creating and removing a file would cost more than the answer. The
        commit is synced only when a row has a cost: lost in a power cut, it would be spent twice.
        """
        released = list(released)
        has_cost = any(release.guarantee.history for release in released)
        path, in_database = self._answers / envelope.task_id, payload.size_bytes <= _SMALL_BYTES
        kept: Kept = serialise_file(envelope, payload) if fits_frame(payload) else path
        if isinstance(kept, Path):
            write_file(kept, envelope, payload, sync=has_cost)
        elif not in_database:
            write_atomically(path, kept, sync=has_cost)
        values = {key: (self._set_aside(value), hashlib.sha256(value or b"").digest()) for key, value in writes.items()}
        with self._using():
            if has_cost:
                self._sync()
            if has_cost != self._syncing:
                self._db.execute(f"PRAGMA synchronous={'FULL' if has_cost else 'NORMAL'}")
                self._syncing = has_cost
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                number = self._next_number()
                answer = (envelope.task_id, number, envelope.epoch, envelope.question, _hash_envelope(envelope))
                self._db.execute(
                    "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, 1)",  # its first upload follows
                    (*answer, seal(*answer)),
                )
                if in_database:
                    self._db.execute("INSERT INTO bodies VALUES (?, ?)", (number, kept))
                for key, (value, digest) in values.items():
                    sealed = seal(key, number, envelope.epoch, value if isinstance(value, str) else None, digest)
                    row = (key, number, envelope.epoch, value, digest, sealed)
                    self._db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)", row)
                appended = self._append(released)
            if values:
                self._mark.advance(number)
            self._last_rows = appended
        self._unsent.add(envelope.task_id)
        return kept

    def _next_number(self) -> int:
        # Never reused, even after answers were undone or dropped.
        return int(self._db.execute("UPDATE meta SET number = number + 1 RETURNING number").fetchone()[0])

    def _append(self, released: Iterable[Release]) -> tuple[int, list[str]]:
        """Appends rows to the chain; returns the index of the first, and the rows."""
        first, head = self._get_head()
        rows: list[str] = []
        # The signature of this row is one of all before it. Rows of which this client knows only what the server said
        # are not vouched for: a server could claim a longer chain and put others in the place of the client's own.
        said = {TAKEN_OVER: first} if self._is_adopted(first - 1) else {}
        for count, release in enumerate(released, start=first):
            if said and count == first:
                release = replace(release, where={**release.where, **said})
            rows.append(release.to_row(count, head))
            head = hash_row(head, rows[-1])
            self._insert_row(count, rows[-1], head)
        return first, rows

    def _insert_row(self, number: int, row: str, head: bytes) -> None:
        sealed = seal(number, row, head)
        self._db.execute("INSERT INTO privacy VALUES (?, ?, ?, ?)", (number, row, head, sealed))

    def _is_adopted(self, index: int) -> bool:
        found = self._db.execute("SELECT row FROM privacy WHERE number = ?", (index,)).fetchone()
        return bool(found) and _ADOPTED in json.loads(found[0])

    def _get_head(self) -> tuple[int, bytes]:
        row = self._db.execute("SELECT number, hash FROM privacy ORDER BY number DESC LIMIT 1").fetchone()
        return (row[0] + 1, row[1]) if row else (0, GENESIS)

    def next_attempt(self, task: str) -> int:
        """Returns the number of the next upload of an answer: from 0, also across restarts."""
        if task in self._unsent:
            self._unsent.discard(task)
            return 0
        with self._using() as db:
            row = db.execute(
                "UPDATE answers SET attempts = attempts + 1 WHERE task = ? RETURNING attempts - 1", (task,)
            ).fetchone()
        return int(row[0]) if row else 0

    def fold(self, durable: int) -> None:
        """Drops versions and answers that only a replay from before the last durable point would need."""
        with self._using(), self._db:
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

    def read_privacy_rows(self, first: int) -> list[str]:
        """Reads the chain's rows from index `first` on, up to the limit for one gRPC message."""
        with self._using():
            if self._last_rows[0] == first and sum(map(len, self._last_rows[1])) <= _MAX_ROWS_BYTES:
                return self._last_rows[1]  # what was just committed
            found = self._db.execute("SELECT row FROM privacy WHERE number >= ? ORDER BY number", (first,))
            rows: list[str] = []
            size = 0
            for (row,) in found:
                size += len(row)
                if size > _MAX_ROWS_BYTES:
                    break
                rows.append(row)
        return rows

    def read_hash(self, index: int) -> bytes:
        """Reads the chain's hash after the row at an index."""
        return bytes(self._fetch_one("SELECT hash FROM privacy WHERE number = ?", index)[0])

    def num_released(self) -> int:
        """Returns the number of privacy rows; it never decreases."""
        with self._using():
            return self._get_head()[0]

    def get_histories(self) -> dict[str, History]:
        """Returns what all covered releases spent, by adjacency.

        Undone ones count, since the server may have seen them. Where the server's chain was adopted, the larger counts
        of what it said and what was spent here before.
        """
        with self._using():
            return self._compose()

    def _compose(self) -> dict[str, History]:
        spent: dict[str, History] = {}
        since: list[Histories] = []  # the last adoption; added up at once, since a long run has many rows
        for (text,) in self._db.execute("SELECT row FROM privacy ORDER BY number"):
            row = json.loads(text)
            if _ADOPTED in row:
                said = {adjacency: parse_history(entries) for adjacency, entries in row[_ADOPTED].items()}
                spent, since = choose_larger(add_histories([spent, *since]), said), []
            else:
                since.append(read_histories(row))
        return add_histories([spent, *since])

    def adopt_chain(self, count: int, head: bytes, spent: Histories) -> bool:
        """Adopts the server's copy of the chain when it is longer than ours (the store was lost).

        Our own rows stay, and the larger of the two counts is charged.

        Args:
            count: How many rows the server holds.
            head: The hash of the last of them.
            spent: What all of them spent, by adjacency.

        Returns:
            Whether it was adopted.

        Raises:
            Refused: The server's copy is of another chain than ours.
        """
        with self._using(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            if count > self._get_head()[0]:
                before = self._compose()
                row = json.dumps({_ADOPTED: spent})
                self._insert_row(count - 1, row, head)
                self._warn_if_less(before, spent)
                return True
            known = self._db.execute("SELECT hash FROM privacy WHERE number = ?", (count - 1,)).fetchone()
        if known and known[0] != head:
            raise Refused(
                f"the server's copy of this client's privacy rows differs from its own at row {count - 1}: one was "
                "changed; start both with the folders of the same run"
            )
        return False

    def _warn_if_less(self, before: Histories, spent: Histories) -> None:
        for adjacency, history in before.items():
            ours, theirs = (compute_epsilon(found, _DELTA) for found in (history, spent.get(adjacency, ())))
            if theirs < ours:
                log.get("store").warning(
                    "server_says_less_was_spent",
                    adjacency=adjacency,
                    server_epsilon=theirs,
                    client_epsilon=ours,
                    charged="what this client has recorded",
                )

    def book(self, rows: Rows) -> None:
        """Adds rows to the client's ledger of bytes."""
        self._bytes.book(rows)

    def read_ledger(self) -> Rows:
        """Reads the client's ledger of bytes."""
        return self._bytes.read()

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self._db.close()
        self._bytes.close()
        self._mark.close()
