"""Reads what a run directory's files have gained, while a server writes them, and sums it by round."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedrpc.tail import Tail

LAYERS = ("tensor_bytes", "message_bytes")
_SO_FAR = "message_bytes/so_far"


def read_records(tail: Tail) -> Iterator[dict[str, Any]]:
    """Yields the records that are new, or, of a file that was rewritten, all."""
    for news in tail.read_all():
        yield from map(json.loads, news.lines)


class RoundBytes:
    """Sums the ledger by round: tensors and messages, by direction and kind."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._sums: dict[int, Counter[str]] = {}

    def refresh(self) -> None:
        """Adds the rows that are new."""
        for news in self._tail.read_all():
            if news.restarted:
                self._sums.clear()
            for line in news.lines:
                self._add(json.loads(line))

    def _add(self, row: Mapping[str, Any]) -> None:
        sums = self._sums.setdefault(row["round"], Counter())
        for layer in LAYERS:
            for kind in ("all", row["kind"]):
                sums[f"{layer}/{row['direction']}/{kind}"] += row[layer]

    def sum_until(self, index: float) -> dict[str, int]:
        """The bytes from the start to the end of a round, by name; what is 0 is left out."""
        total: Counter[str] = Counter()
        for found, sums in self._sums.items():
            if found <= index:
                total.update(sums)
        return {name: size for name, size in total.items() if size}


def describe_bytes(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What was booked between two sums, and the messages of the run so far."""
    so_far = sum(now.get(f"message_bytes/{direction}/all", 0) for direction in ("down", "up"))
    return {name: size - before.get(name, 0) for name, size in now.items()} | {_SO_FAR: so_far}


class RoundPrivacy:
    """Composes the rows that clients wrote of their releases, up to a round."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._rows: list[dict[str, Any]] = []

    def refresh(self) -> None:
        """Adds the rows that are new."""
        for news in self._tail.read_all():
            if news.restarted:
                self._rows.clear()
            for row in map(json.loads, news.lines):
                self._rows.append({name: row[name] for name in ("client", "round", "coverage", "history")})

    def describe(self, index: int, delta: float) -> dict[str, float]:
        """What the client that spent most has spent by its own rows; nothing unless every release is covered.

        Whether rows are missing is known when the run ends: the epsilon that counts is the summary's.
        """
        rows = [row for row in self._rows if row["round"] <= index]
        if not any(row["history"] for row in rows):
            return {}
        from fedrpc.privacy.accountant import compute_epsilon  # imports torch, which most runs spare this process
        from fedrpc.privacy.ledger import read_history
        from fedrpc.privacy.mechanisms import merge_histories
        from fedrpc.privacy.summary import is_uncovered

        if any(map(is_uncovered, rows)):
            return {}
        by_client = defaultdict(list)
        for row in rows:
            by_client[row["client"]].append(read_history(row))
        distinct = {merge_histories(found) for found in by_client.values()}
        return {"epsilon/by_rows": max(compute_epsilon(history, delta) for history in distinct)}
