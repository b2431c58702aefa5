"""Holds privacy rows against the ledger of bytes: which data-derived parts left a client without a row?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedrpc.wire.kinds import NOT_DATA_DERIVED
from fedrpc.wire.ledger import SESSION, Key, Sums

_WITHOUT_ROWS = {kind.label for kind in NOT_DATA_DERIVED}


@dataclass(frozen=True, order=True)
class Unaccounted:
    """Parts of one kind of which bytes left a client in one phase of a round, and no privacy row tells of them."""

    client: int
    round: int
    phase: str
    kind: str

    def __str__(self) -> str:
        return f"client {self.client}'s {self.kind} went up in round {self.round} ({self.phase}) without a privacy row"


def find_unaccounted(ledger: Iterable[tuple[Key, Sums]], released: Iterable[Mapping[str, Any]]) -> list[Unaccounted]:
    """Finds data-derived bytes that went up without a row of their client, round, phase and kind.

    Aborted attempts count: what they carried had left the client. So does a part of which not one tensor byte came.
    Two things cannot be seen here. A result for a task that was not open (too late, or never asked) is booked under the
    session as envelope, since nobody vouches for what it says of itself; the server kept its rows and none of its
    values. And the ledger does not distinguish the steps of a phase, nor an answer from a client's reason for having
    none: so the rows of one step stand for all, and messages cannot be counted against them.

    Args:
        ledger: The rows of the ledger of bytes.
        released: The privacy rows.
    """
    up = {
        Unaccounted(key.client, key.round, key.phase, key.kind)
        for key, sums in ledger
        if key.direction == "up"
        and key.phase != SESSION
        and key.kind not in _WITHOUT_ROWS
        and (sums.message_bytes or sums.tensor_bytes)
    }
    for row in released:
        if row["parts"]:  # a row without parts charges what stayed at the client, and accounts for nothing that left
            up.discard(Unaccounted(row["client"], row["round"], row["phase"], row["kind"]))
    return sorted(up)


def describe_unaccounted(found: Sequence[Unaccounted]) -> str:
    """Names the first in words, and says how many more there are."""
    return f"{found[0]}" + (f"; and {len(found) - 1} more" if len(found) > 1 else "")
