"""The ledger of bytes: every byte that crosses the wire under one (round, phase, kind, direction, client, attempt)."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedrpc.errors import WireError
from fedrpc.files import Appended, explain_damage, read_lines, sync, write_atomically, write_durably
from fedrpc.wire.frames import Inline, count_field_bytes, count_message_bytes
from fedrpc.wire.kinds import DIRECTIONS, Direction, Kind
from fedrpc.wire.message import part
from fedrpc.wire.sealing import SEAL_BYTES
from fedrpc.wire.v2 import coordinator_pb2 as pb

SESSION = "session"  # joins, receipts, heartbeats, ledger exchange, privacy rows and timings
EVALUATE = "evaluate"  # the coordinator's own question to clients
_OUTSIDE = frozenset({SESSION, EVALUATE})
_SESSION_FIELDS = frozenset({"privacy", "receipt", "grant", "cancel", "attach", "heartbeat", "finished", "timing"})
_to_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, order=True)
class Key:
    """Identifies a row of the ledger.

    Args:
        aborted: The attempt brought nothing whole, or only the reason why there is no answer.
        repeated: The same message had come whole before, and was lost on one side.
    """

    round: int
    phase: str
    kind: str
    direction: str
    client: int
    attempt: int
    aborted: bool = False
    repeated: bool = False


@dataclass
class Sums:
    """The sums in a row of the ledger."""

    tensor_bytes: int = 0
    message_bytes: int = 0
    messages: int = 0

    def is_less_than(self, other: Sums) -> bool:
        """Whether some of these are smaller than another row's, and none is larger."""
        mine, theirs = vars(self).values(), vars(other).values()
        return self != other and all(a <= b for a, b in zip(mine, theirs, strict=True))

    def add(self, other: Sums) -> None:
        """Adds another row's sums to these."""
        self.tensor_bytes += other.tensor_bytes
        self.message_bytes += other.message_bytes
        self.messages += other.messages


Rows = dict[Key, Sums]


@dataclass
class Attempt:
    """Counts the bytes of one transfer; its rows are booked when it is closed."""

    round: int
    phase: str
    direction: Direction
    client: int
    attempt: int = 0
    rows: Rows = field(default_factory=dict)

    def add(self, kind: Kind, serialised_bytes: int, tensor_bytes: int = 0) -> None:
        """Counts one message of `serialised_bytes`."""
        self._count(kind, Sums(tensor_bytes, count_message_bytes(serialised_bytes), 1))

    def add_first(self, serialised_bytes: int, inline: Iterable[Inline], other_bytes: int = 0) -> Rows:
        """Counts the first frame of a message.

        Args:
            inline: The chunks in it, which count under their own kinds.
            other_bytes: The bytes of the fields in it that belong to the session, without the seal, which does so, too.

        Returns:
            The session's rows.
        """
        session = Attempt(self.round, SESSION, self.direction, self.client)
        own = count_message_bytes(serialised_bytes)
        own -= session._add_inline(Kind.ENVELOPE, other_bytes + SEAL_BYTES, 0)
        for kind, size, tensor_bytes in inline:
            own -= self._add_inline(kind, size, tensor_bytes)
        self._count(Kind.ENVELOPE, Sums(0, own, 1))
        return session.rows

    def _add_inline(self, kind: Kind, size: int, tensor_bytes: int) -> int:
        self._count(kind, Sums(tensor_bytes, size, 0))
        return size

    def _count(self, kind: Kind, sums: Sums) -> None:
        if self.phase == SESSION:
            sums.tensor_bytes = 0  # it carries text, such as the ledgers that are compared at the end
        key = Key(self.round, self.phase, kind.label, self.direction, self.client, self.attempt)
        self.rows.setdefault(key, Sums()).add(sums)

    def close(self, *, aborted: bool = False) -> Rows:
        """Returns the rows, marked as aborted when the transfer did not complete."""
        return {replace(key, aborted=True): sums for key, sums in self.rows.items()} if aborted else self.rows


def count_session(round_index: int, direction: Direction, client: int, serialised_bytes: int) -> Rows:
    """The rows of a message that belongs to no task."""
    attempt = Attempt(round_index, SESSION, direction, client)
    attempt.add(Kind.ENVELOPE, serialised_bytes)
    return attempt.rows


def count_other_fields(frame: pb.Frame) -> int:
    """Counts the bytes of the fields in a frame that belong to the session and not to its message; not the seal's."""
    return sum(count_field_bytes(value) for field, value in frame.ListFields() if field.name in _SESSION_FIELDS)


def list_inline(frame: pb.Frame) -> list[Inline]:
    """Lists the chunks that came with an envelope."""
    found = []
    for chunk in frame.chunks:
        kind, tensor_bytes = classify_chunk(chunk.part, len(chunk.data), frame.envelope)
        found.append((kind, count_field_bytes(chunk), tensor_bytes))
    return found


def classify_chunk(part: int, size: int, envelope: pb.Envelope) -> tuple[Kind, int]:
    """Returns the kind that a chunk is booked under, and its tensor bytes."""
    if part < len(envelope.parts):
        kind = envelope.parts[part].kind
        if kind in Kind._value2member_map_:
            return Kind(kind), size
    return Kind.ENVELOPE, 0


def merge(into: Rows, rows: Rows) -> None:
    """Adds `rows` to the rows in `into`."""
    for key, sums in rows.items():
        into.setdefault(key, Sums()).add(sums)


def to_json(key: Key, sums: Sums) -> str:
    """Writes a row as one line of ledger.jsonl."""
    return _to_json(_to_row(key, sums))


def _to_row(key: Key, sums: Sums) -> dict[str, Any]:
    row = vars(key) | vars(sums)
    if not key.repeated:
        del row["repeated"]  # it is rare
    return row


def from_json(line: str) -> tuple[Key, Sums]:
    """Reads a row from a line that `to_json` wrote."""
    return _from_row(json.loads(line))


def _from_row(row: dict[str, Any]) -> tuple[Key, Sums]:
    sums = Sums(*(row.pop(name) for name in ("tensor_bytes", "message_bytes", "messages")))
    return Key(**row), sums


def read_rows(path: Path) -> Iterator[tuple[Key, Sums]]:
    """Reads the rows of a ledger file; a last line that a crash tore is left out. Raises Damaged."""
    for row in read_lines(path):
        with explain_damage(path):
            found = _from_row(row)
        yield found


class LedgerFile:
    """The server's ledger on disk: rows of finished rounds in ledger.jsonl, of the current one in a journal.

    The journal's first line says how many bytes of ledger.jsonl are valid, so a crash at any moment neither loses a row
    nor counts one twice. Each further line is one booking, whole or not at all. Late rows of a round that was written
    before (a late answer, a resumed run) get there by a new file in the old one's place, for readers who follow it.

    Attributes:
        kernel: The kernel's bytes (sent, received) of the whole run, as they were last noted.
        num_resumed: How often the current round was taken up again.
        own_bytes: The message bytes of the whole run so far that are the method's own cost.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.jsonl"
        self._journal_path = folder / "ledger.partial.jsonl"
        self.current: Rows = {}
        self.kernel, self.num_resumed = [0, 0], 0
        self._whole: set[str] = set()  # the messages of this round that came whole, by direction and task
        self._size = self._recover()
        self._last_round = -(10**9)  # the last round that ledger.jsonl has rows of
        self.sums: dict[tuple[str, str], Sums] = {}  # of the whole run so far, by direction and kind
        self.own_bytes = 0
        for key, sums in [*read_rows(self.path), *self.current.items()]:
            self._count(key, sums)
        for key, _ in read_rows(self.path):
            self._last_round = max(self._last_round, key.round)
        self._start_journal()

    def _recover(self) -> int:
        """Replays the journal after a crash, and undoes a write to ledger.jsonl that the crash interrupted."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if self._journal_path.exists():
            with explain_damage(self._journal_path):
                first, *lines = read_lines(self._journal_path)
                self._read_header(first)
                for line in lines:
                    self._replay(line)
                valid = int(first["ledger_bytes"])
            size = self._check_size(size, valid)
        if self.path.exists():
            os.truncate(self.path, size)
        return size

    def _check_size(self, size: int, valid: int) -> int:
        """Returns how much of ledger.jsonl counts; raises Damaged unless it is there, and ends with a whole line."""
        with explain_damage(self.path):
            if size < valid:
                raise ValueError(f"it has {size} bytes, and {self._journal_path.name} expects {valid}")
            if valid:
                with self.path.open("rb") as file:
                    file.seek(valid - 1)
                    if file.read(1) != b"\n":
                        raise ValueError(f"no line ends at byte {valid}, as {self._journal_path.name} says")
        return valid

    def _read_header(self, first: Mapping[str, Any]) -> None:
        self.kernel = [int(size) for size in first["kernel"]]
        self.num_resumed = int(first["num_resumed"]) + 1
        self._whole.update(first["whole"])

    def _replay(self, line: dict[str, Any]) -> None:
        merge(self.current, dict(_from_row(row) for row in line.get("rows", ())))
        self.kernel = line.get("kernel", self.kernel)
        if "whole" in line:
            self._whole.add(line["whole"])

    def _start_journal(self) -> None:
        first = {"ledger_bytes": self._size, "num_resumed": self.num_resumed, "kernel": self.kernel}
        lines = [_to_json(first | {"whole": sorted(self._whole)})]
        if self.current:
            lines.append(_to_json({"rows": [_to_row(key, sums) for key, sums in self.current.items()]}))
        write_atomically(self._journal_path, "".join(line + "\n" for line in lines), sync=True)
        self._journal = Appended(self._journal_path)

    def book(self, rows: Rows, whole: str = "") -> None:
        """Adds the rows of a closed attempt, all of one direction.

        Args:
            whole: The id of the task whose question or answer came whole with this attempt. When it came whole before,
                its rows are marked as repeated.
        """
        line: dict[str, Any] = {}
        if whole:
            line["whole"] = f"{next(iter(rows)).direction}/{whole}"
            if line["whole"] in self._whole:
                rows = {replace(key, repeated=key.phase != SESSION): sums for key, sums in rows.items()}
        line["rows"] = [_to_row(key, sums) for key, sums in rows.items()]
        self._journal.add(_to_json(line) + "\n")
        if whole:
            self._whole.add(line["whole"])
        merge(self.current, rows)
        for key, sums in rows.items():
            self._count(key, sums)

    def note_kernel(self, sent: int, received: int) -> None:
        """Notes the kernel's bytes of the whole run so far, which a kill would take with it."""
        if [sent, received] != self.kernel:
            self.kernel = [sent, received]
            self._journal.add(_to_json({"kernel": self.kernel}) + "\n")

    def forget_tasks(self) -> None:
        """Forgets which messages came whole: there is a durable point, and none of them is asked for again."""
        self._whole.clear()

    def _count(self, key: Key, sums: Sums) -> None:
        self.sums.setdefault((key.direction, key.kind), Sums()).add(sums)
        self.own_bytes += sums.message_bytes if _is_own(key) else 0

    @property
    def message_bytes(self) -> dict[str, int]:
        """The message bytes of the whole run so far, by direction."""
        return {d: sum(sums.message_bytes for key, sums in self.sums.items() if key[0] == d) for d in DIRECTIONS}

    def end_round(self) -> None:
        """Writes the current rows to ledger.jsonl, durably, and starts a new journal."""
        if any(key.round <= self._last_round for key in self.current):
            self._write_anew()
        else:
            self._journal.sync()
            with contextlib.closing(Appended(self.path, self._size)) as file:
                file.add(text := self._list_lines(), sync=True)
                self._size += len(text)
        self._last_round = max((key.round for key in self.current), default=self._last_round)
        self.current, self.num_resumed = {}, 0
        self._whole.clear()
        self._journal.close()
        self._start_journal()

    def _write_anew(self) -> None:
        """Replaces ledger.jsonl by one that has the current rows where they belong."""
        self.current = self.read_all_rows()
        self._size = 0
        self._journal.close()
        self._start_journal()
        sync(self.path.parent)  # until ledger.jsonl is replaced, whoever recovers must find all rows in the journal
        write_durably(self.path, text := self._list_lines())
        self._size = len(text)

    def _list_lines(self) -> bytes:
        return "".join(to_json(key, sums) + "\n" for key, sums in sorted(self.current.items())).encode()

    def find_next_attempts(self, round_index: int) -> Callable[[str, int], int]:
        """Returns what gives the number of the next delivery of a phase to a client.

        In a round that the server takes up again it is above those in the journal, and above one that a kill kept from
        being booked.
        """
        found: dict[tuple[str, int], int] = {}
        for key in self.current:
            if key.round == round_index and key.direction == "down" and key.phase != SESSION:
                where = (key.phase, key.client)
                found[where] = max(found.get(where, 0), key.attempt + 1)
        least = self.num_resumed
        return lambda phase, client: max(least, found.get((phase, client), 0))

    def close(self) -> None:
        """Closes the journal and removes it when it is empty."""
        self._journal.close()
        if not self.current:
            self._journal_path.unlink(missing_ok=True)

    def read_all_rows(self) -> Rows:
        """Reads every row of the run so far."""
        rows: Rows = {}
        for key, sums in read_rows(self.path) if self._size else ():
            merge(rows, {key: sums})
        merge(rows, self.current)
        return rows


def find_other_rows(rows: Mapping[Key, Sums]) -> set[Key]:
    """Finds the rows that are no cost of the method: session, evaluation, aborted attempts and repetitions."""
    return {key for key in rows if not _is_own(key)}


def _is_own(key: Key) -> bool:
    return not (key.aborted or key.repeated or key.phase in _OUTSIDE)


def compute_totals(rows: Mapping[Key, Sums]) -> dict[str, Any]:
    """Computes the byte sums of summary.json: all, the method's own by kind, and those of retries."""
    total = {d: Sums() for d in DIRECTIONS}
    method = {d: Sums() for d in DIRECTIONS}
    by_kind: dict[str, dict[str, Sums]] = {d: {} for d in DIRECTIONS}
    aborted, redelivered = ({d: Sums() for d in DIRECTIONS} for _ in range(2))
    others = find_other_rows(rows)
    for key, sums in rows.items():
        total[_get_direction(key)].add(sums)
        if key not in others:
            method[_get_direction(key)].add(sums)
            by_kind[key.direction].setdefault(key.kind, Sums()).add(sums)
        elif key.aborted:
            aborted[_get_direction(key)].add(sums)
        elif key.phase not in _OUTSIDE:
            redelivered[_get_direction(key)].add(sums)
    return {
        "total": {d: _to_dict(total[d]) for d in DIRECTIONS},
        "method": {
            d: _to_dict(method[d]) | {"by_kind": {k: _to_dict(s) for k, s in sorted(by_kind[d].items())}}
            for d in DIRECTIONS
        },
        "aborted": {d: _to_dict(aborted[d]) for d in DIRECTIONS},
        "redelivered": {d: _to_dict(redelivered[d]) for d in DIRECTIONS},
    }


def _get_direction(key: Key) -> Direction:
    return "down" if key.direction == "down" else "up"


def _to_dict(sums: Sums) -> dict[str, int]:
    return {"tensor": sums.tensor_bytes, "message": sums.message_bytes}


@dataclass(frozen=True)
class LedgerQuestion:
    """Down: asks a client for its ledger when the run ends."""

    note: str = part(Kind.ENVELOPE)


@dataclass(frozen=True)
class LedgerAnswer:
    """Up: the client's rows, one JSON line each."""

    rows: str = part(Kind.ENVELOPE)


def parse_rows(text: str, client: int, most: int) -> Rows:
    """Parses the rows that a client sent.

    Args:
        client: Whose rows they must be.
        most: The most rows that it can have.

    Raises:
        WireError: One is malformed, of another client, or there are too many.
    """
    if (count := text.count("\n") + 1) > most:
        raise WireError(f"client {client} sent a ledger of {count} rows, expected {most} at most")
    rows: Rows = {}
    for line in text.split("\n") if text else ():
        try:
            key, sums = from_json(line)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise WireError(f"client {client} sent a ledger row that cannot be read: {line[:100]!r}") from None
        if not _is_row_of(client, key, sums):
            raise WireError(f"client {client} sent a ledger row that cannot be its own: {line[:200]!r}")
        rows[key] = sums
    return rows


def _is_row_of(client: int, key: Key, sums: Sums) -> bool:
    """Whether a row that was received has the types of a row, and values that can be."""
    numbers = (key.round, key.client, key.attempt, *vars(sums).values())
    return (
        all(type(number) is int for number in numbers)
        and all(type(text) is str for text in (key.phase, key.kind, key.direction))
        and type(key.aborted) is bool
        and key.client == client
        and all(0 <= number < 2**63 for number in vars(sums).values())
    )


def group_by_client(rows: Mapping[Key, Sums]) -> dict[int, Rows]:
    """Groups rows by client, in one pass."""
    groups: dict[int, Rows] = {}
    for key, sums in rows.items():
        groups.setdefault(key.client, {})[key] = sums
    return groups


def compare(server: Rows, client: Rows, *, interrupted: bool = False, resumed: bool = False) -> dict[str, int]:
    """Compares both sides' rows of one client's completed attempts; the session is left out.

    Rows that only one side has (it saw them aborted, or was killed before it wrote them) are counted, not compared.

    Args:
        interrupted: The client's stream broke and came back. What was under way then may be complete for the server
            alone, so a row of several messages of which the client has less counts as the server's alone, too.
        resumed: The server was killed and came back. It books a question when it is sent, so the last one may be
            complete for the client alone.
    """
    ours, theirs = _select_completed(server), _select_completed(client)
    both = ours.keys() & theirs.keys()
    short = {key for key in both if interrupted and theirs[key].is_less_than(ours[key])}
    lost = {key for key in both if resumed and key.direction == "down" and ours[key].is_less_than(theirs[key])}
    compared = both - short - lost
    return {
        "compared": len(compared),
        "differing": sum(ours[key] != theirs[key] for key in compared),
        "only_server": len(ours.keys() - both) + len(short),
        "only_client": len(theirs.keys() - both) + len(lost),
    }


def _select_completed(rows: Rows) -> Rows:
    """The rows of what came whole; a client does not know what the server has lost, and asks for again."""
    found: Rows = {}
    for key, sums in rows.items():
        if key.phase != SESSION and not key.aborted:
            merge(found, {replace(key, repeated=False): sums})
    return found
