"""The privacy ledger: one row for each release, in a hash chain that each client keeps and the server copies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrpc.errors import WireError
from fedrpc.wire.kinds import NOT_DATA_DERIVED, Kind
from fedrpc.wire.v1 import coordinator_pb2 as pb

GENESIS = b"\0" * 32
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
}
UNCOVERED = "no guarantee: released without noise"


@dataclass(frozen=True)
class Guarantee:
    """What a mechanism promises for one kind of an answer; without one a release is uncovered."""

    mechanism: str
    parameters: Mapping[str, Any]
    covers: str


@dataclass(frozen=True)
class Release:
    """Something data-derived that leaves a client."""

    kind: Kind
    parts: tuple[str, ...]
    guarantee: Guarantee | None = None
    where: Mapping[str, Any] = field(default_factory=dict)  # client, round, phase, step, task

    def row(self, index: int, previous: bytes) -> str:
        """The release as one line of the chain."""
        values = dict(self.where) | {
            "kind": self.kind.label,
            "parts": list(self.parts),
            "mechanism": self.guarantee.mechanism if self.guarantee else None,
            "parameters": dict(self.guarantee.parameters) if self.guarantee else {},
            "covers": self.guarantee.covers if self.guarantee else UNCOVERED,
        }
        return _written({"index": index, "previous": previous.hex()} | values)


def releases(parts: Iterable[pb.Part], guarantees: Mapping[str, Guarantee], where: Mapping[str, Any]) -> list[Release]:
    """The releases among the parts of an answer: uncovered parts of a kind together, each covered part for itself.

    Args:
        guarantees: By part name; what covers one part covers no other.
    """
    found: list[Release] = []
    bare: dict[Kind, list[str]] = {}
    for part in parts:
        kind = Kind(part.kind)
        if kind in NOT_DATA_DERIVED:
            continue
        if part.name in guarantees:
            found.append(Release(kind, (part.name,), guarantees[part.name], where))
        else:
            bare.setdefault(kind, []).append(part.name)
    return found + [Release(kind, tuple(names), None, where) for kind, names in bare.items()]


def chained(previous: bytes, row: str) -> bytes:
    """The chain's next hash."""
    return hashlib.sha256(previous + row.encode()).digest()


class PrivacyFile:
    """The server's copy of every client's chain: privacy.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._heads: dict[int, tuple[int, bytes]] = {}
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
            with path.open("ab") as file:
                file.truncate(whole)
        self._file = path.open("a")

    def head(self, client: int) -> tuple[int, bytes]:
        """How many rows of a client are here, and the hash of the last."""
        return self._heads.get(client, (0, GENESIS))

    def extend(self, client: int, first: int, rows: Iterable[str]) -> int:
        """Adds the rows that are new; raises WireError when they do not continue the chain.

        Returns:
            How many rows of this client are here now.
        """
        count, digest = self.head(client)
        lines = []
        for index, row in enumerate(rows, start=first):
            if index < count:
                continue
            values = _parsed(row, client)
            if index != count or values["index"] != count or values["previous"] != digest.hex():
                raise WireError(f"client {client}'s privacy row {index} does not continue the chain at row {count}")
            digest = chained(digest, row)
            lines.append(_written(values | {"hash": digest.hex()}) + "\n")
            count += 1
        # All of them or none: only now is it known that every row is right.
        self._file.write("".join(lines))
        self._file.flush()
        self._heads[client] = (count, digest)
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
        if values["kind"] not in _LABELS:
            raise ValueError(f"there is no kind '{values['kind']:.40}'")
        if _written(values) != row:
            raise ValueError("its hash could not be computed again from privacy.jsonl")
        return values
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"client {client} sent a privacy row that can not be read: {error}") from None


def summarise(path: Path, delta: float) -> dict[str, Any]:
    """The privacy part of summary.json: epsilon is null, with the reason, while anything leaves uncovered."""
    kinds: dict[str, dict[str, Any]] = {}
    if path.exists():
        with path.open() as file:
            for line in file:
                row = json.loads(line)
                entry = kinds.setdefault(
                    row["kind"], {"count": 0, "epsilon": None, "delta": None, "covers": row["covers"]}
                )
                entry["count"] += 1
                if row["covers"].startswith("no guarantee"):
                    entry["covers"] = row["covers"]  # one bare release uncovers its kind
    bare = sorted(kind for kind, entry in kinds.items() if entry["covers"].startswith("no guarantee"))
    reason = f"no guarantee: {', '.join(bare)} left clients uncovered" if bare else "nothing left a client"
    return {"epsilon": None, "delta": delta, "accountant": None, "reason": reason, "releases": kinds}
