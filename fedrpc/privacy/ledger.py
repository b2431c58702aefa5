"""The privacy ledger: one row for each release, in a hash chain that its client keeps and the server copies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedrpc.errors import ConfigError, WireError
from fedrpc.files import Appended, explain_damage, measure_whole_lines, read_lines
from fedrpc.privacy.mechanisms import LEAST_NOISE, MAX_ENTRIES, Coverage, Guarantee, History, add_histories
from fedrpc.wire.kinds import NOT_DATA_DERIVED, Kind

GENESIS = b"\0" * 32
TAKEN_OVER = "taken_over"  # in a client's first row after rows that it did not keep: how many of them there are
MAX_ROW = 16 << 10  # characters of a row
MAX_NOTIONS = 8  # of neighbours, under which a client spends: each has a history of its own
BACKLOG_BYTES = 1 << 20  # of new rows that a client may send at a time, whatever it was asked ...
TASK_BYTES = 64 << 10  # ... and for each task that it gets
_MAX_ANSWERS = 64  # of a client whose parts are remembered: it has a few tasks at a time
_LABELS = {kind.label for kind in Kind}
_ROW: dict[str, Any] = {  # the keys and types that every row has
    "client": int,
    "index": int,
    "previous": str,
    "round": int,
    "phase": str,
    "task": str,
    "answer": str,
    "kind": str,
    "parts": list,
    "mechanism": (str, type(None)),
    "parameters": dict,
    "covers": str,
    "coverage": str,
    "history": list,
    "adjacency": str,
}
UNCOVERED = Guarantee(None, {}, "released without noise", coverage=Coverage.NONE)
NOISE = {
    "seeded": "reproducible noise: no protection against anyone who knows the seed",
    "secret": "secret noise: from the system's entropy",
}


@dataclass(frozen=True)
class Release:
    """Data-derived parts of one kind that leave a client in one answer."""

    kind: Kind
    parts: tuple[str, ...]
    guarantee: Guarantee = UNCOVERED
    where: Mapping[str, Any] = field(default_factory=dict)  # client, round, phase, step, task, digest of the answer

    def to_row(self, index: int, previous: bytes) -> str:
        """Serialises the release as the row after `previous` in the chain."""
        guarantee = self.guarantee
        values = dict(self.where) | {
            "kind": self.kind.label,
            "parts": list(self.parts),
            "mechanism": guarantee.mechanism,
            "parameters": dict(guarantee.parameters),
            "covers": guarantee.covers,
            "coverage": guarantee.coverage,
            "history": [list(entry) for entry in guarantee.history],
            "adjacency": guarantee.adjacency,
        }
        return _serialise({"index": index, "previous": previous.hex()} | values)


def list_releases(
    kinds: Mapping[str, Kind],
    guarantees: Mapping[str, Guarantee],
    where: Mapping[str, Any],
    noise: str = "seeded",
    trained: Guarantee | None = None,
) -> list[Release]:
    """Lists the releases in an answer: one for each guarantee and kind; uncovered parts of a kind are one release.

    Args:
        kinds: The kind of each part of the answer, by part name.
        guarantees: By part name. A guarantee that several parts share is charged once.
        where: The client, round, phase, step, task and the answer's digest, for the rows.
        noise: The source of the run's noise: "seeded" or "secret".
        trained: The guarantee of the answer's private trainings. If no part is released under it, they are charged by
            themselves: what they made may stay in the client's store, and leave later.

    Raises:
        ConfigError: A guarantee has a longer history than a row may have.
    """
    found: dict[tuple[int, Kind], Release] = {}
    if unknown := set(guarantees) - set(kinds):
        raise TypeError(f"released {', '.join(sorted(unknown))}, but the answer's parts are {', '.join(sorted(kinds))}")
    charged: set[int] = set()
    for part, kind in kinds.items():
        guarantee = guarantees.get(part, UNCOVERED)
        if kind in NOT_DATA_DERIVED:
            continue
        key = (id(guarantee), kind)
        if key in found:
            found[key] = replace(found[key], parts=(*found[key].parts, part))
            continue
        if guarantee.history:
            is_charged = id(guarantee) in charged
            charged.add(id(guarantee))
            guarantee = _add_noise_source(guarantee, noise)
            if is_charged:
                guarantee = _charge_elsewhere(guarantee)
        found[key] = Release(kind, (part,), guarantee, where)
    releases = list(found.values())
    if trained and trained.history and id(trained) not in charged:
        releases.append(Release(Kind.WEIGHTS, (), _add_noise_source(_charge_as_kept(trained), noise), where))
    for release in releases:
        if len(release.guarantee.history) > MAX_ENTRIES:
            raise ConfigError(
                f"phase '{where.get('phase')}' trained with {len(release.guarantee.history)} different sampling rates "
                f"or noise multipliers in one answer, expected {MAX_ENTRIES} at most, as a privacy row holds; "
                "train on fewer parts of the data, or in several phases"
            )
    return releases


def _add_noise_source(guarantee: Guarantee, noise: str) -> Guarantee:
    return replace(guarantee, parameters=dict(guarantee.parameters) | {"noise": NOISE[noise]})


def _charge_elsewhere(guarantee: Guarantee) -> Guarantee:
    parameters = dict(guarantee.parameters) | {"charged": "with another kind"}
    return replace(guarantee, parameters=parameters, history=(), coverage=Coverage.CHARGED_ELSEWHERE)


def _charge_as_kept(trained: Guarantee) -> Guarantee:
    about = f"{trained.about}; kept at the client, and charged when it was trained"
    return replace(trained, about=about, coverage=Coverage.COVERED)


def hash_row(previous: bytes, row: str) -> bytes:
    """Computes the chain's hash after a row."""
    return hashlib.sha256(previous + row.encode()).digest()


@dataclass(frozen=True)
class Stages:
    """What the rows of a run can be about.

    Args:
        phases: The phases that have releases.
        rounds: The number of rounds.
    """

    phases: frozenset[str]
    rounds: int

    def check(self, row: Mapping[str, Any]) -> None:
        """Raises ValueError when a row is about nothing that the run asks."""
        if row["phase"] not in self.phases:
            raise ValueError(f"the run has no phase '{row['phase']:.40}'; it has {', '.join(sorted(self.phases))}")
        if not -1 <= row["round"] <= self.rounds:  # set-up is round -1, and what follows the last has its number
            raise ValueError(f"the run has {self.rounds} rounds, got a row of round {row['round']}")


class PrivacyFile:
    """The server's copy of every client's chain: privacy.jsonl.

    A client can send rows for as long as it is connected, so what it may send is bounded: by what it is asked.

    Args:
        stages: What rows can be about; None for anything.
    """

    def __init__(self, path: Path, stages: Stages | None = None) -> None:
        self._path, self._stages = path, stages
        self._allowed: dict[int, int] = {}  # bytes that a client may still send
        self._heads: dict[int, tuple[int, bytes]] = {}
        self._spent: dict[int, dict[str, History]] = {}  # by client and adjacency
        self._answers: dict[int, dict[tuple[str, str], set[str]]] = {}
        for number, row in enumerate(read_lines(path), start=1):
            with explain_damage(path, f"line {number}"):
                self._take_up(row)
        # A line that a crash tore was not acknowledged, so the client sends it again.
        self._file = Appended(path, measure_whole_lines(path))

    def _take_up(self, row: Mapping[str, Any]) -> None:
        client = row["client"]
        try:
            self._heads[client] = check_row(row, *self.get_head(client))
        except WireError as error:
            raise ValueError(str(error)) from None
        self._spent[client] = add_histories([self.get_histories(client), read_histories(row)])
        self._note_parts(client, row)

    def get_head(self, client: int) -> tuple[int, bytes]:
        """Returns how many of a client's rows are in the file, and the hash of the last one."""
        return self._heads.get(client, (0, GENESIS))

    def get_histories(self, client: int) -> dict[str, History]:
        """Returns the composed histories of a client's covered releases in the file, by adjacency."""
        return self._spent.get(client, {})

    def expect_rows(self, client: int) -> None:
        """Notes that a client gets a task, for which it may send rows."""
        self._allowed[client] = min(BACKLOG_BYTES, self._allowed.get(client, BACKLOG_BYTES) + TASK_BYTES)

    def _note_parts(self, client: int, row: Mapping[str, Any]) -> None:
        """Notes which parts of which answer a row is about; of the last few answers, since older ones are done with."""
        answers = self._answers.setdefault(client, {})
        answers.setdefault((row["task"], row["answer"]), set()).update(row["parts"])
        if len(answers) > _MAX_ANSWERS:
            del answers[next(iter(answers))]

    def find_parts_without_row(self, client: int, task_id: str, digest: bytes, kinds: Mapping[str, int]) -> list[str]:
        """Finds the data-derived parts of an answer that no row in the file is about.

        Args:
            task_id: Of the task that it answers: the same bytes in another round are another release.
            digest: The answer's.
            kinds: The number of the kind of each of its parts, by name.
        """
        known = self._answers.get(client, {}).get((task_id, digest.hex()), set())
        return [part for part, kind in kinds.items() if kind not in NOT_DATA_DERIVED and part not in known]

    def extend(
        self,
        client: int,
        first: int,
        rows: Iterable[str],
        accept: Callable[[int, bytes], None] = lambda *_: None,
    ) -> int:
        """Adds the rows that are new, all or none.

        Args:
            first: The index of the first of `rows` in the client's chain.
            accept: Called before anything is written, with the number of rows and the hash of the last as they will be;
                raises WireError to refuse them.

        Returns:
            How many rows of this client the file now has.

        Raises:
            WireError: The rows do not continue the chain, one is malformed, or they are more than the client may send.
        """
        count, digest = self.get_head(client)
        lines, spent, parsed = [], [self.get_histories(client)], []
        new = [(index, row) for index, row in enumerate(rows, start=first) if index >= count]
        allowed, size = self._allowed.get(client, BACKLOG_BYTES), sum(len(row) for _, row in new)
        if size > allowed:
            raise WireError(
                f"client {client} sent privacy rows of {size} bytes, expected {allowed} at most: it may send "
                f"{TASK_BYTES} for each task"
            )
        for index, row in new:
            values = _parse_row(row, client, self._stages)
            if index != count or values["index"] != count or values["previous"] != digest.hex():
                raise WireError(f"client {client}'s privacy row {index} does not continue the chain at row {count}")
            digest = hash_row(digest, row)
            lines.append(_serialise(values | {"hash": digest.hex()}) + "\n")
            spent.append(read_histories(values))
            parsed.append(values)
            count += 1
        if not parsed:
            return count
        composed = add_histories(spent)
        if len(composed) > MAX_NOTIONS:
            raise WireError(
                f"client {client}'s privacy rows are about {len(composed)} notions of neighbours, expected "
                f"{MAX_NOTIONS} at most"
            )
        accept(count, digest)
        self._file.add("".join(lines))
        self._allowed[client] = allowed - size
        self._heads[client] = (count, digest)
        self._spent[client] = composed
        for values in parsed:
            self._note_parts(client, values)
        return count

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _serialise(row: Mapping[str, Any]) -> str:
    """The one way to write a row, so that its hash can be recomputed."""
    return json.dumps(row, separators=(",", ":"))


def _parse_row(row: str, client: int, stages: Stages | None) -> dict[str, Any]:
    try:
        if len(row) > MAX_ROW:
            raise ValueError(f"it has {len(row)} characters, expected {MAX_ROW} at most")
        values: dict[str, Any] = json.loads(row)
        check_types(values)
        if values["client"] != client:
            raise ValueError("it is of another client")
        if not all(isinstance(part, str) for part in values["parts"]):
            raise ValueError(f"'parts' is {values['parts']!r:.40}")
        if "hash" in values:
            raise ValueError("it has a hash, which the server computes")
        if values["kind"] not in _LABELS:
            raise ValueError(f"there is no kind '{values['kind']:.40}'")
        if not all(map(str.isprintable, _list_texts(values))):
            raise ValueError("it has control characters")
        if stages is not None:
            stages.check(values)
        if _serialise(values) != row:
            raise ValueError("its hash could not be recomputed from privacy.jsonl")
        return values
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"client {client} sent a privacy row that cannot be read: {error}") from None


def check_types(row: Any, *, optional: Iterable[str] = ()) -> None:
    """Raises ValueError or KeyError unless a row has what every row has, each of its type, and a readable history.

    Args:
        optional: Names that may be missing, as in rows of an earlier version.
    """
    if not isinstance(row, dict):
        raise ValueError("it is no row")
    for name, types in _ROW.items():
        if (name in row or name not in optional) and not isinstance(row[name], types):
            raise ValueError(f"'{name}' is {row[name]!r:.40}")
    read_history(row)
    Coverage(row["coverage"])


def _list_texts(value: Any) -> Iterator[str]:
    """All texts in a row, with which reports and logs are written."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _list_texts(pair)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _list_texts(item)


def check_row(row: Mapping[str, Any], count: int, head: bytes) -> tuple[int, bytes]:
    """Checks that a row of privacy.jsonl continues its client's chain.

    Args:
        count: How many rows of the client come before it.
        head: The hash of the last of them.

    Returns:
        Count and head after this row.

    Raises:
        WireError: This row, or one before it, was changed.
    """
    values = {key: value for key, value in row.items() if key != "hash"}
    after = hash_row(head, _serialise(values))
    if (values["index"], values["previous"], row["hash"]) != (count, head.hex(), after.hex()):
        raise WireError(
            f"client {values['client']}'s row {values['index']} breaks the chain: it, or one before, changed"
        )
    return count + 1, after


def read_history(row: Mapping[str, Any]) -> History:
    """Reads a row's history; raises ValueError when it is malformed or out of an accountant's range."""
    if len(row["history"]) > MAX_ENTRIES:
        raise ValueError(f"'history' has {len(row['history'])} entries, expected {MAX_ENTRIES} at most")
    return parse_history(row["history"])


def read_histories(row: Mapping[str, Any]) -> dict[str, History]:
    """Reads a row's history as `read_history` does, by adjacency."""
    history = read_history(row)
    return {row["adjacency"]: history} if history else {}


def parse_history(entries: Iterable[Any]) -> History:
    """Reads a history from JSON, of one row or of many; raises ValueError as `read_history` does."""
    found = []
    for entry in entries:
        noise, rate, steps = entry
        numbers = all(type(value) in (int, float) for value in (noise, rate)) and type(steps) is int
        # Beyond these limits accountants overflow or never return; no real training comes near them. What has no step
        # has no cost, and must not look as if it had.
        if not (numbers and (noise == 0 or LEAST_NOISE <= noise <= 1e6) and 1e-6 <= rate <= 1 and 1 <= steps <= 10**9):
            raise ValueError(f"'history' has {entry!r:.60}")
        found.append((float(noise), float(rate), steps))
    return tuple(found)
