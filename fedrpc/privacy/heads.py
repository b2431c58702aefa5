"""The file of signed heads: each client's key, and its signature of its chain after every answer.

With it, rows that are missing at the end of privacy.jsonl, or were rewritten and chained anew, are found by anyone who
has the run directory and knows the clients' keys.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedrpc.errors import WireError
from fedrpc.files import Appended, explain_damage, measure_whole_lines, read_lines
from fedrpc.privacy.signing import is_signed

HEADS_FILE = "heads.jsonl"
REGISTERED = "registered at Join"


class HeadsFile:
    """heads.jsonl: a line for each key that a client joins with, and one for each head that it signs."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._run_id = run_id
        self._keys: dict[int, bytes] = {}
        self._counts: dict[int, int] = {}
        for number, entry in enumerate(read_lines(path), start=1):
            with explain_damage(path, f"line {number}"):
                if "key" in entry:
                    self._keys[entry["client"]] = bytes.fromhex(entry["key"])
                else:
                    self._counts[entry["client"]] = int(entry["rows"])
        # What a line that a crash tore was about was not accepted, and comes again.
        self._file = Appended(path, measure_whole_lines(path))

    def get_key(self, client: int) -> bytes | None:
        """The key with which a client joined last, or None."""
        return self._keys.get(client)

    def register(self, client: int, key: bytes, rows: int, source: str = REGISTERED) -> bool:
        """Registers the key with which a client joins.

        Args:
            rows: How many of its privacy rows the server holds.
            source: How the server knows that the key is the client's.

        Returns:
            Whether the client had another key before.
        """
        before = self._keys.get(client)
        if before == key:
            return False
        self._write({"client": client, "rows": rows, "key": key.hex(), "source": source})
        self._keys[client] = key
        return before is not None

    def add(self, client: int, count: int, head: bytes, signature: bytes) -> None:
        """Files a signed head; raises WireError unless it is signed with the client's key."""
        key = self._keys.get(client)
        if key is None or not is_signed(key, signature, self._run_id, client, count, head):
            raise WireError(
                f"client {client}'s privacy rows up to row {count - 1} are not signed with the key that it joined with"
            )
        if count > self._counts.get(client, 0):
            self._write({"client": client, "rows": count, "head": head.hex(), "signature": signature.hex()})
            self._counts[client] = count

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.add(json.dumps(entry, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_keys(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Reads the keys that each client joined with, in order: `key`, its `source`, and from which of its `rows` on."""
    keys: dict[int, list[dict[str, Any]]] = {}
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # `find_forged_heads` names such a line
                entry = json.loads(line)
                if "key" in entry:
                    keys.setdefault(entry["client"], []).append(entry)
    return keys


def find_forged_heads(path: Path, run_id: str, chains: Mapping[int, list[bytes]]) -> Iterator[str]:
    """Holds the rows of privacy.jsonl against what the clients signed, and yields what does not fit.

    Args:
        path: heads.jsonl.
        chains: For each client, the hash after each of its rows.
    """
    keys: dict[int, bytes] = {}
    signed: dict[int, int] = {}
    found: dict[int, str] = {}  # the first fault of each client: those that follow have the same cause
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                entry = json.loads(line)
                client, rows = entry["client"], entry["rows"]
                if "key" in entry:
                    keys[client] = bytes.fromhex(entry["key"])
                    continue
                head, signature = bytes.fromhex(entry["head"]), bytes.fromhex(entry["signature"])
                fault = _check_head(entry, head, chains.get(client, []))
                if not fault and not is_signed(keys[client], signature, run_id, client, rows, head):
                    fault = (
                        f"client {client}'s row {rows - 1} is not signed with its key: it, or one before, was rewritten"
                    )
            except (ValueError, KeyError, TypeError, WireError) as error:
                yield f"{path.name}, line {number} cannot be read: {error}"
                continue
            if fault:
                found.setdefault(client, f"{fault} ({path.name}, line {number})")
            signed[client] = max(rows, signed.get(client, 0))
    yield from found.values()
    for client, hashes in sorted(chains.items()):
        if client not in found and signed.get(client, 0) < len(hashes):
            yield f"client {client}'s rows from row {signed.get(client, 0)} on are signed by nobody"


def _check_head(entry: Mapping[str, Any], head: bytes, chain: list[bytes]) -> str:
    client, rows = entry["client"], entry["rows"]
    if rows > (held := len(chain)):
        return f"client {client} signed {rows} rows, privacy.jsonl has {held}: row {held} and later are missing"
    if rows < 1 or chain[rows - 1] != head:
        return f"client {client} signed another row {rows - 1} than privacy.jsonl has: it, or one before, was rewritten"
    return ""
