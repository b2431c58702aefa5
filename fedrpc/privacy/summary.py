"""Summarises privacy.jsonl for summary.json: epsilon is null, with the reason, unless everything is covered."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrpc.privacy.accountant import Epsilons, compute_epsilon, compute_epsilons
from fedrpc.privacy.ledger import NOISE, read_history
from fedrpc.privacy.mechanisms import NO_GUARANTEE, Coverage, History, merge_histories
from fedrpc.privacy.statement import state_epsilon
from fedrpc.privacy.unaccounted import Unaccounted, describe_unaccounted

Row = Mapping[str, Any]
_KEYS = ("client", "covers", "coverage", "history", "adjacency")  # parameters are many, and not needed here


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Reads the rows of a privacy file; none when there is no file."""
    if path.exists():
        with path.open() as file:
            for line in file:
                yield json.loads(line)


def summarise(
    released: Iterable[Row], delta: float, noise: str = "seeded", unaccounted: Sequence[Unaccounted] = ()
) -> dict[str, Any]:
    """Builds the privacy part of summary.json: each epsilon, of the run and of kinds, with all that it depends on.

    Args:
        released: The rows of privacy.jsonl.
        delta: The delta at which epsilons are reported.
        noise: The source of the run's noise: "seeded" or "secret".
        unaccounted: What left clients without a row: neither the run nor such a kind has an epsilon then.
    """
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in released:
        kinds[row["kind"]].append({key: row[key] for key in _KEYS})
    rows = [row for found in kinds.values() for row in found]
    worst, reason = _compose_run(kinds, rows, delta, unaccounted)
    nothing = dict.fromkeys(("epsilon", "accountant", "second", "unit", "adjacency", "sampling", "trust", "epsilons"))
    out: dict[str, Any] = nothing | {"delta": delta}
    if worst:
        out |= _state(worst, rows, delta, noise)
    if any(row["history"] for row in rows):
        out["noise"] = NOISE[noise]
    releases = {
        kind: _summarise_kind(found, delta, noise, [entry for entry in unaccounted if entry.kind == kind])
        for kind, found in kinds.items()
    }
    return out | {"reason": reason, "releases": releases}


def is_uncovered(row: Row) -> bool:
    """Whether nothing covers a row; a row that claims coverage without a cost counts as uncovered."""
    coverage = Coverage(row["coverage"])
    return coverage is Coverage.NONE or (coverage is Coverage.COVERED and not row["history"])


def compose_worst_client(rows: Iterable[Row], delta: float) -> tuple[History, Epsilons] | None:
    """Composes the rows of each client and returns what the one that spent most spent; None if that fails."""
    by_client: dict[int, list[History]] = defaultdict(list)
    for row in rows:
        by_client[row["client"]].append(read_history(row))
    # Clients with equal histories are composed once, and only the worst goes to the slow accountants.
    distinct = {merge_histories(found) for found in by_client.values()}
    try:
        worst = max(distinct, key=lambda history: compute_epsilon(history, delta))
        return worst, compute_epsilons(worst, delta)
    except (ArithmeticError, ValueError, MemoryError):  # a finished run must not fail over its summary
        return None


def _state(worst: tuple[History, Epsilons], rows: list[Any], delta: float, noise: str) -> dict[str, Any]:
    history, epsilons = worst
    adjacency = next(row["adjacency"] for row in rows if row["history"])
    return state_epsilon(history, delta, adjacency, noise) | {"epsilons": vars(epsilons)}


def _compose_run(
    kinds: Mapping[str, list[Any]], rows: list[Any], delta: float, unaccounted: Sequence[Unaccounted]
) -> tuple[tuple[History, Epsilons] | None, str | None]:
    uncovered = sorted(kind for kind, found in kinds.items() if any(map(is_uncovered, found)))
    notions = {row["adjacency"] for row in rows if row["history"]}
    if uncovered:
        return None, f"{NO_GUARANTEE}: {', '.join(uncovered)} left clients uncovered"
    if unaccounted:
        return None, f"{NO_GUARANTEE}: {describe_unaccounted(unaccounted)}"
    if not rows:
        return None, "nothing left a client"
    if not notions:
        return None, "only what is public left clients"
    if len(notions) > 1:
        return None, f"{NO_GUARANTEE}: releases under {' and '.join(sorted(notions))} neighbours are not added up"
    found = compose_worst_client(rows, delta)
    return found, None if found else f"{NO_GUARANTEE}: epsilon could not be computed"


def _summarise_kind(
    rows: list[dict[str, Any]], delta: float, noise: str, unaccounted: Sequence[Unaccounted]
) -> dict[str, Any]:
    covers = next((row["covers"] for row in rows if is_uncovered(row)), None)
    if unaccounted:
        covers = f"{NO_GUARANTEE}: {describe_unaccounted(unaccounted)}"
    # The cost of a release that was charged with another kind is not in these rows.
    has_all_costs = covers is None and all(row["coverage"] != Coverage.CHARGED_ELSEWHERE for row in rows)
    costs = [row for row in rows if row["history"]]
    is_alike = len({row["adjacency"] for row in costs}) == 1  # other notions of neighbours are not added up
    found = compose_worst_client(costs, delta) if has_all_costs and is_alike else None
    covers = covers or next((row["covers"] for row in rows if row["coverage"] != Coverage.PUBLIC), rows[0]["covers"])
    stated = _state(found, costs, delta, noise) if found else {"epsilon": None, "delta": None}
    return {"count": len(rows)} | stated | {"covers": covers}
