"""Reads privacy.jsonl as the privacy part of summary.json: epsilon is null, with the reason, unless all is covered."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedrpc.privacy.accountant import Epsilons, epsilons, merged, spent
from fedrpc.privacy.ledger import NOISE, history_of
from fedrpc.privacy.mechanisms import NO_GUARANTEE, Coverage, History

Row = Mapping[str, Any]
_KEYS = ("client", "covers", "coverage", "history", "adjacency")  # parameters are many, and not needed here


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a privacy file, or none when there is no file."""
    if path.exists():
        with path.open() as file:
            for line in file:
                yield json.loads(line)


def summarise(released: Iterable[Row], delta: float, noise: str = "seeded") -> dict[str, Any]:
    """The privacy part of summary.json.

    Args:
        released: The rows of privacy.jsonl.
        delta: At which epsilons are told.
        noise: Where the run's noise came from.
    """
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in released:
        kinds[row["kind"]].append({key: row[key] for key in _KEYS})
    rows = [row for found in kinds.values() for row in found]
    worst, reason = _judge(kinds, rows, delta)
    out: dict[str, Any] = {
        "epsilon": worst.best[0] if worst else None,
        "delta": delta,
        "accountant": worst.best[1] if worst else None,
        "epsilons": vars(worst) if worst else None,
        "reason": reason,
        "unit": "one record of one client" if worst else None,
        "adjacency": next(row["adjacency"] for row in rows if row["history"]) if worst else None,
        "releases": {kind: _of_kind(found, delta) for kind, found in kinds.items()},
    }
    return out | ({"noise": NOISE[noise]} if any(row["history"] for row in rows) else {})


def bare(row: Row) -> bool:
    """Whether nothing covers a row. One that claims to be covered and has no cost is not believed."""
    coverage = Coverage(row["coverage"])
    return coverage is Coverage.NONE or (coverage is Coverage.COVERED and not row["history"])


def worst_of(rows: Iterable[Row], delta: float) -> Epsilons | None:
    """Composes each client's rows and gives the client that spent most; None when that can not be computed."""
    by_client: dict[int, list[History]] = defaultdict(list)
    for row in rows:
        by_client[row["client"]].append(history_of(row))
    # Clients that did the same are composed once, and the slow accountants look at the worst alone.
    distinct = {merged(found) for found in by_client.values()}
    try:
        return epsilons(max(distinct, key=lambda history: spent(history, delta)), delta)
    except (ArithmeticError, ValueError, MemoryError):  # a run is worth more than its last figure
        return None


def _judge(kinds: Mapping[str, list[Any]], rows: list[Any], delta: float) -> tuple[Epsilons | None, str | None]:
    uncovered = sorted(kind for kind, found in kinds.items() if any(map(bare, found)))
    notions = {row["adjacency"] for row in rows if row["history"]}
    if uncovered:
        return None, f"{NO_GUARANTEE}: {', '.join(uncovered)} left clients uncovered"
    if not rows:
        return None, "nothing left a client"
    if not notions:
        return None, "only what is public left clients"
    if len(notions) > 1:
        return None, f"{NO_GUARANTEE}: releases under {' and '.join(sorted(notions))} neighbours are not added up"
    found = worst_of(rows, delta)
    return found, None if found else f"{NO_GUARANTEE}: epsilon could not be computed"


def _of_kind(rows: list[dict[str, Any]], delta: float) -> dict[str, Any]:
    covers = next((row["covers"] for row in rows if bare(row)), None)
    # What was charged with another kind has its cost there.
    whole = covers is None and all(row["coverage"] != Coverage.CHARGED_ELSEWHERE for row in rows)
    costs = [row for row in rows if row["history"]]
    found = worst_of(costs, delta) if whole and costs else None
    told = covers or next((row["covers"] for row in rows if row["coverage"] != Coverage.PUBLIC), rows[0]["covers"])
    entry = {"count": len(rows), "epsilon": found.best[0] if found else None, "delta": delta if found else None}
    about = {"epsilons": vars(found), "adjacency": costs[0]["adjacency"]} if found else {}
    return entry | {"covers": told} | about
