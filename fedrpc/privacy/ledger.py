"""The privacy ledger: one row for each release, in a hash chain that each client keeps and the server copies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedrpc.errors import WireError
from fedrpc.privacy.accountant import merged
from fedrpc.privacy.mechanisms import Coverage, Guarantee, History
from fedrpc.wire.kinds import NOT_DATA_DERIVED, Kind

GENESIS = b"\0" * 32
_MAX_ENTRIES = 64  # of a row's history
_LABELS = {kind.label for kind in Kind}
_ROW: dict[str, Any] = {  # what every row has
    "index": int,
    "previous": str,
    "round": int,
    "phase": str,
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
    """Something data-derived that leaves a client."""

    kind: Kind
    parts: tuple[str, ...]
    guarantee: Guarantee = UNCOVERED
    where: Mapping[str, Any] = field(default_factory=dict)  # client, round, phase, step, task

    def row(self, index: int, previous: bytes) -> str:
        """The release as one line of the chain."""
        told = self.guarantee
        values = dict(self.where) | {
            "kind": self.kind.label,
            "parts": list(self.parts),
            "mechanism": told.mechanism,
            "parameters": dict(told.parameters),
            "covers": told.covers,
            "coverage": told.coverage,
            "history": [list(entry) for entry in told.history],
            "adjacency": told.adjacency,
        }
        return _written({"index": index, "previous": previous.hex()} | values)


def releases(
    kinds: Mapping[str, Kind], guarantees: Mapping[str, Guarantee], where: Mapping[str, Any], noise: str = "seeded"
) -> list[Release]:
    """The releases among the parts of an answer, one for each guarantee and kind; uncovered parts are together.

    Args:
        kinds: The kind of each part of the answer, by part name.
        guarantees: By part name; what covers one part covers no other. What several parts share is charged once.
        noise: Where the run's noise comes from.
    """
    found: dict[tuple[int, Kind], Release] = {}
    if unknown := set(guarantees) - set(kinds):
        raise TypeError(f"released {', '.join(sorted(unknown))}, but the answer's parts are {', '.join(sorted(kinds))}")
    charged: set[int] = set()
    for part, kind in kinds.items():
        told = guarantees.get(part, UNCOVERED)
        if kind in NOT_DATA_DERIVED:
            continue
        key = (id(told), kind)
        if key in found:
            found[key] = replace(found[key], parts=(*found[key].parts, part))
            continue
        if told.history:
            paid = id(told) in charged
            charged.add(id(told))
            told = _add_noise_source(told, noise)
            if paid:
                told = _charge_elsewhere(told)
        found[key] = Release(kind, (part,), told, where)
    return list(found.values())


def _add_noise_source(guarantee: Guarantee, noise: str) -> Guarantee:
    return replace(guarantee, parameters=dict(guarantee.parameters) | {"noise": NOISE[noise]})


def _charge_elsewhere(guarantee: Guarantee) -> Guarantee:
    parameters = dict(guarantee.parameters) | {"charged": "with another kind"}
    return replace(guarantee, parameters=parameters, history=(), coverage=Coverage.CHARGED_ELSEWHERE)


def chained(previous: bytes, row: str) -> bytes:
    """The chain's next hash."""
    return hashlib.sha256(previous + row.encode()).digest()


class PrivacyFile:
    """The server's copy of every client's chain: privacy.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._heads: dict[int, tuple[int, bytes]] = {}
        self._spent: dict[int, History] = {}
        whole = 0
        if path.exists():
            with path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # torn by a crash: the client was not told that we have it, and sends it again
                    whole += len(line)
                    row = json.loads(line)
                    client, digest = row["client"], bytes.fromhex(row["hash"])
                    self._heads[client] = (self.head(client)[0] + 1, digest)
                    self._spent[client] = merged([self.spent(client), history_of(row)])
            with path.open("ab") as file:
                file.truncate(whole)
        self._file = path.open("a")

    def head(self, client: int) -> tuple[int, bytes]:
        """How many rows of a client are here, and the hash of the last."""
        return self._heads.get(client, (0, GENESIS))

    def spent(self, client: int) -> History:
        """What a client released with a guarantee, as far as is known here."""
        return self._spent.get(client, ())

    def extend(self, client: int, first: int, rows: Iterable[str]) -> int:
        """Adds the rows that are new; raises WireError when they do not continue the chain.

        Returns:
            How many rows of this client are here now.
        """
        count, digest = self.head(client)
        lines, spent = [], [self.spent(client)]
        for index, row in enumerate(rows, start=first):
            if index < count:
                continue
            values = _parsed(row, client)
            if index != count or values["index"] != count or values["previous"] != digest.hex():
                raise WireError(f"client {client}'s privacy row {index} does not continue the chain at row {count}")
            digest = chained(digest, row)
            lines.append(_written(values | {"hash": digest.hex()}) + "\n")
            spent.append(history_of(values))
            count += 1
        # All of them or none: only now is it known that every row is right.
        self._file.write("".join(lines))
        self._file.flush()
        self._heads[client] = (count, digest)
        self._spent[client] = merged(spent)
        return count

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _written(row: Mapping[str, Any]) -> str:
    """The one way to write a row, so that its hash can be computed again."""
    return json.dumps(row, separators=(",", ":"))


def _parsed(row: str, client: int) -> dict[str, Any]:
    try:
        values = json.loads(row)
        if not isinstance(values, dict) or values["client"] != client:
            raise ValueError("it is not this client's")
        for name, types in _ROW.items():
            if not isinstance(values[name], types):
                raise ValueError(f"'{name}' is {values[name]!r:.40}")
        history_of(values)
        Coverage(values["coverage"])
        if values["kind"] not in _LABELS:
            raise ValueError(f"there is no kind '{values['kind']:.40}'")
        if _written(values) != row:
            raise ValueError("its hash could not be computed again from privacy.jsonl")
        return values
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"client {client} sent a privacy row that can not be read: {error}") from None


def check_filed(row: Mapping[str, Any], count: int, head: bytes) -> tuple[int, bytes]:
    """Follows a chain by one row of privacy.jsonl; raises WireError where it was changed.

    Args:
        count: How many rows of the client came before.
        head: The hash of the last of them.

    Returns:
        The two after this row.
    """
    values = {key: value for key, value in row.items() if key != "hash"}
    after = chained(head, _written(values))
    if (values["index"], values["previous"], row["hash"]) != (count, head.hex(), after.hex()):
        raise WireError(
            f"client {values['client']}'s row {values['index']} breaks the chain: it, or one before, changed"
        )
    return count + 1, after


def history_of(row: Mapping[str, Any]) -> History:
    """What accountants compose of a row; raises ValueError when it is no history."""
    found = []
    if len(row["history"]) > _MAX_ENTRIES:
        raise ValueError(f"'history' has {len(row['history'])} entries, expected {_MAX_ENTRIES} at most")
    for entry in row["history"]:
        noise, rate, steps = entry
        numbers = all(type(value) in (int, float) for value in (noise, rate)) and type(steps) is int
        # Beyond these ends accountants overflow or never return, and nobody trains there.
        if not (numbers and (noise == 0 or 1e-3 <= noise <= 1e6) and 1e-6 <= rate <= 1 and 0 <= steps <= 10**9):
            raise ValueError(f"'history' has {entry!r:.60}")
        found.append((float(noise), float(rate), steps))
    return tuple(found)
