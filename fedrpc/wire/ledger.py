"""The ledger of bytes: every byte that crosses the wire under one (round, phase, kind, direction, client, attempt)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedrpc.wire.frames import message_bytes
from fedrpc.wire.kinds import DIRECTIONS, Direction, Kind
from fedrpc.wire.message import part
from fedrpc.wire.v1 import coordinator_pb2 as pb

SESSION = "session"  # joins, polls, ledger exchange and privacy rows
EVALUATE = "evaluate"  # the coordinator's own question to clients
_OUTSIDE = frozenset({SESSION, EVALUATE})


@dataclass(frozen=True, order=True)
class Key:
    """What a row of the ledger is about."""

    round: int
    phase: str
    kind: str
    direction: str
    client: int
    attempt: int
    aborted: bool = False


@dataclass
class Sums:
    """What a row of the ledger adds up."""

    tensor_bytes: int = 0
    message_bytes: int = 0
    messages: int = 0

    def add(self, other: Sums) -> None:
        """Adds another row's sums to these."""
        self.tensor_bytes += other.tensor_bytes
        self.message_bytes += other.message_bytes
        self.messages += other.messages


Rows = dict[Key, Sums]


@dataclass
class Attempt:
    """One transfer while it is under way; it reaches a ledger when it is closed."""

    round: int
    phase: str
    direction: Direction
    client: int
    attempt: int = 0
    rows: Rows = field(default_factory=dict)

    def add(self, kind: Kind, serialised_bytes: int, tensor_bytes: int = 0) -> None:
        """Books one message of `serialised_bytes`."""
        key = Key(self.round, self.phase, kind.label, self.direction, self.client, self.attempt)
        self.rows.setdefault(key, Sums()).add(Sums(tensor_bytes, message_bytes(serialised_bytes), 1))

    def closed(self, *, aborted: bool = False) -> Rows:
        """The rows, marked when the transfer did not come to its end."""
        return {replace(key, aborted=aborted): sums for key, sums in self.rows.items()}


def frame_kind(frame: pb.Frame, envelope: pb.Envelope | None) -> tuple[Kind, int]:
    """The kind a frame is booked under, and its tensor bytes."""
    if frame.WhichOneof("body") == "chunk" and envelope is not None and frame.chunk.part < len(envelope.parts):
        kind = envelope.parts[frame.chunk.part].kind
        if kind in Kind._value2member_map_:
            return Kind(kind), len(frame.chunk.data)
    return Kind.ENVELOPE, 0


def merge(into: Rows, rows: Rows) -> None:
    """Adds rows to rows."""
    for key, sums in rows.items():
        into.setdefault(key, Sums()).add(sums)


def to_json(key: Key, sums: Sums) -> str:
    """One line of ledger.jsonl."""
    return json.dumps(vars(key) | vars(sums), separators=(",", ":"))


def from_json(line: str) -> tuple[Key, Sums]:
    """What `to_json` was given."""
    row = json.loads(line)
    sums = Sums(*(row.pop(name) for name in ("tensor_bytes", "message_bytes", "messages")))
    return Key(**row), sums


def read(path: Path) -> Iterator[tuple[Key, Sums]]:
    """The whole rows of a ledger file; a torn last line (a crash) is left out."""
    if path.exists():
        with path.open() as file:
            for line in file:
                if line.endswith("\n"):
                    yield from_json(line)


class LedgerFile:
    """The server's ledger on disk: rows of finished rounds in ledger.jsonl, of the current one in a journal.

    A journal keeps what crossed the wire before a crash; many steps of one phase add up to one row only when the
    round ends.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.jsonl"
        self._journal_path = folder / "ledger.partial.jsonl"
        self.current: Rows = {}
        self.message_bytes: dict[str, int] = dict.fromkeys(DIRECTIONS, 0)  # of the whole run so far
        _drop_torn_line(self.path)
        for key, sums in read(self.path):
            self.message_bytes[key.direction] += sums.message_bytes
        flushed = max((key.round for key, _ in read(self.path)), default=-(10**9))
        for key, sums in read(self._journal_path):
            if key.round > flushed:
                merge(self.current, {key: sums})
                self.message_bytes[key.direction] += sums.message_bytes
        self._rewrite_journal()

    def _rewrite_journal(self) -> None:
        self._journal = self._journal_path.open("w")
        self._write(self._journal, self.current)

    @staticmethod
    def _write(file: Any, rows: Rows) -> None:
        file.writelines(to_json(key, sums) + "\n" for key, sums in rows.items())
        file.flush()

    def book(self, rows: Rows) -> None:
        """Adds the rows of a closed attempt."""
        merge(self.current, rows)
        for key, sums in rows.items():
            self.message_bytes[key.direction] += sums.message_bytes
        self._write(self._journal, rows)

    def end_round(self) -> None:
        """Writes the rows so far, durably, and starts anew."""
        rows = dict(sorted(self.current.items()))
        with self.path.open("a") as file:
            self._write(file, rows)
            os.fsync(file.fileno())
        self.current = {}
        self._journal.close()
        self._rewrite_journal()

    def close(self) -> None:
        """Closes the journal and removes it when it is empty."""
        self._journal.close()
        if not self.current:
            self._journal_path.unlink(missing_ok=True)

    def all_rows(self) -> Rows:
        """Every row of the run so far."""
        rows: Rows = {}
        for key, sums in read(self.path):
            merge(rows, {key: sums})
        merge(rows, self.current)
        return rows


def _drop_torn_line(path: Path) -> None:
    if path.exists() and path.stat().st_size:
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            path.write_bytes(data[: data.rfind(b"\n") + 1])


def totals(rows: Iterable[tuple[Key, Sums]]) -> dict[str, Any]:
    """The byte sums of summary.json: total, the method's own by kind, and what retries cost."""
    total = {d: Sums() for d in DIRECTIONS}
    method = {d: Sums() for d in DIRECTIONS}
    by_kind: dict[str, dict[str, Sums]] = {d: {} for d in DIRECTIONS}
    aborted, redelivered = ({d: Sums() for d in DIRECTIONS} for _ in range(2))
    for key, sums in rows:
        total[_dir(key)].add(sums)
        if key.aborted:
            aborted[_dir(key)].add(sums)
        elif key.phase not in _OUTSIDE:
            method[_dir(key)].add(sums)
            by_kind[key.direction].setdefault(key.kind, Sums()).add(sums)
            if key.attempt:
                redelivered[_dir(key)].add(sums)
    return {
        "total": {d: _brief(total[d]) for d in DIRECTIONS},
        "method": {
            d: _brief(method[d]) | {"by_kind": {k: _brief(s) for k, s in sorted(by_kind[d].items())}}
            for d in DIRECTIONS
        },
        "aborted": {d: _brief(aborted[d]) for d in DIRECTIONS},
        "redelivered": {d: _brief(redelivered[d]) for d in DIRECTIONS},
    }


def _dir(key: Key) -> Direction:
    return "down" if key.direction == "down" else "up"


def _brief(sums: Sums) -> dict[str, int]:
    return {"tensor": sums.tensor_bytes, "message": sums.message_bytes}


@dataclass(frozen=True)
class LedgerQuestion:
    """Asked of every client when the run ends: what did you count?"""

    note: str = part(Kind.ENVELOPE)


@dataclass(frozen=True)
class LedgerAnswer:
    """A client's own rows, one JSON line each, and the kernel's counters of its connection."""

    rows: str = part(Kind.ENVELOPE)
    kernel_sent: int = part(Kind.ENVELOPE)
    kernel_received: int = part(Kind.ENVELOPE)


def compare(server: Rows, client: Rows, client_id: int) -> dict[str, int]:
    """Holds a client's rows against the server's: only completed attempts outside the session can be held.

    Rows that one side saw aborted, or that a client lost when it was killed, are counted and not compared.
    """
    ours = {k: s for k, s in server.items() if k.client == client_id and k.phase != SESSION and not k.aborted}
    theirs = {k: s for k, s in client.items() if k.phase != SESSION and not k.aborted}
    both = ours.keys() & theirs.keys()
    return {
        "compared": len(both),
        "differing": sum(ours[key] != theirs[key] for key in both),
        "only_server": len(ours.keys() - both),
        "only_client": len(theirs.keys() - both),
    }
