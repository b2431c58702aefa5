"""Audits a finished run's privacy: are its rows unchanged, does the summary follow, do two accountants agree?"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrpc.errors import ConfigError, WireError
from fedrpc.privacy.accountant import compute_epsilon, compute_epsilons
from fedrpc.privacy.ledger import GENESIS, check_row, read_history
from fedrpc.privacy.mechanisms import Coverage, History, merge_histories
from fedrpc.privacy.second import compute_tight_epsilon, recompute_epsilon
from fedrpc.privacy.summary import is_uncovered, summarise
from fedrpc.study.reading import check_finished

TOLERANCE = 0.01
RUN = "the run"


@dataclass(frozen=True)
class Line:
    """One epsilon of the summary, beside recomputed ones.

    Attributes:
        what: A kind, or the run.
        reported: What summary.json says; None when it promises nothing.
        again: The same accountant, on the rows as they are now.
        second: dp-accounting, by the same kind of accountant.
        tight: dp-accounting, nearly exact; None where it would take too long.
        covers: What the summary promises, or why nothing.
    """

    what: str
    reported: float | None
    again: float | None
    second: float | None
    tight: float | None
    accountant: str | None
    covers: str


@dataclass
class Audit:
    """What an audit found.

    Attributes:
        heads: For each client, how many rows there are and the hash of the last.
        faults: What is wrong, in words; empty when all is well.
    """

    num_rows: int
    heads: dict[int, tuple[int, bytes]]
    lines: list[Line]
    faults: list[str] = field(default_factory=list)


def audit_run(run: Path) -> Audit:
    """Checks the privacy of the finished run in a run directory."""
    reported = _read_summary(run)["privacy"]
    rows, heads, faults = _read_rows(run / "privacy.jsonl")
    found = Audit(len(rows), heads, [], faults + _compare_with_stores(run, heads))
    again = summarise(rows, reported["delta"])
    for kind in sorted({*reported["releases"], *again["releases"]}):
        ours, theirs = reported["releases"].get(kind), again["releases"].get(kind)
        if (ours and ours["count"]) != (theirs and theirs["count"]):
            had, has = (entry["count"] if entry else 0 for entry in (ours, theirs))
            found.faults.append(f"{kind}: summary.json counts {had} releases, privacy.jsonl has {has}")
    for what, ours, theirs in _pair_promises(reported, again):
        mine = rows if what == RUN else [row for row in rows if row["kind"] == what]
        line = _recompute(what, ours, theirs, mine, reported["delta"])
        found.lines.append(line)
        found.faults += _find_disagreements(line)
    return found


def _read_summary(run: Path) -> dict[str, Any]:
    check_finished(run, ("config.toml", "summary.json", "privacy.jsonl"))
    path = run / "summary.json"
    try:
        return json.loads(path.read_text())  # type: ignore[no-any-return]
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], dict[int, tuple[int, bytes]], list[str]]:
    """The rows, every client's head, and where a chain breaks; a broken chain is followed no further."""
    rows: list[dict[str, Any]] = []
    heads: dict[int, tuple[int, bytes]] = {}
    broken: dict[int, str] = {}
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                client = row["client"]
                if client not in broken:
                    heads[client] = check_row(row, *heads.get(client, (0, GENESIS)))
                read_history(row)
                Coverage(row["coverage"])
                rows.append(row)
            except WireError as error:
                broken[client] = f"privacy.jsonl, line {number}: {error}"
                if _is_readable(row):
                    rows.append(row)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                broken[-number] = f"privacy.jsonl, line {number} cannot be read: {error}"
    return rows, heads, list(broken.values())


def _is_readable(row: dict[str, Any]) -> bool:
    try:
        read_history(row)
    except (ValueError, KeyError, TypeError):
        return False
    return {"client", "kind", "covers", "coverage", "adjacency"} <= set(row)


def _compare_with_stores(run: Path, heads: dict[int, tuple[int, bytes]]) -> list[str]:
    """Compares with the chains that local clients keep: only there can missing last rows be seen."""
    faults = []
    run_id = (run / "run_id").read_text().strip() if (run / "run_id").is_file() else ""
    for folder in sorted((run / "clients").glob(f"*/{run_id}")) if run_id else []:
        database = folder / "store.db"
        if not database.is_file():
            continue
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as db:
            last = db.execute("SELECT number, hash FROM privacy ORDER BY number DESC LIMIT 1").fetchone()
        db.close()
        client = int(folder.parent.name)
        theirs = (last[0] + 1, last[1]) if last else (0, GENESIS)
        ours = heads.get(client, (0, GENESIS))
        if theirs != ours:
            faults.append(
                f"client {client}: its own chain ends with row {theirs[0] - 1}, privacy.jsonl's copy differs "
                f"(it has {ours[0]} whole rows)"
            )
    return faults


def _pair_promises(
    reported: dict[str, Any], again: dict[str, Any]
) -> Iterable[tuple[str, dict[str, Any], dict[str, Any]]]:
    """For each kind and the run: its name, its entry in the summary, and the same recomputed."""
    nothing = {"epsilon": None, "covers": "nothing left"}
    for kind in sorted({*reported["releases"], *again["releases"]}):
        yield kind, reported["releases"].get(kind, nothing), again["releases"].get(kind, nothing)
    yield RUN, reported | {"covers": reported["reason"] or "all that left"}, again


def _recompute(
    what: str, ours: dict[str, Any], theirs: dict[str, Any], rows: list[dict[str, Any]], delta: float
) -> Line:
    if ours["epsilon"] is None:
        return Line(what, None, theirs["epsilon"], None, None, None, ours["covers"])
    history = _worst_history(rows, delta)
    about, accountant = compute_epsilons(history, delta).best
    second = recompute_epsilon(history, delta, accountant)
    return Line(
        what,
        ours["epsilon"],
        theirs["epsilon"],
        second,
        compute_tight_epsilon(history, delta, about),
        accountant,
        ours["covers"],
    )


def _worst_history(rows: list[dict[str, Any]], delta: float) -> History:
    by_client: dict[int, list[History]] = defaultdict(list)
    for row in rows:
        if not is_uncovered(row):
            by_client[row["client"]].append(read_history(row))
    return max(
        (merge_histories(found) for found in by_client.values()),
        key=lambda history: compute_epsilon(history, delta),
        default=(),
    )


def _find_disagreements(line: Line) -> list[str]:
    if line.reported is None:
        return [f"{line.what}: summary.json promises nothing, the rows give {line.again}"] if line.again else []
    faults = []
    for name, value in (("privacy.jsonl", line.again), ("dp-accounting", line.second)):
        if value is None or abs(value - line.reported) > TOLERANCE * max(line.reported, 1e-3):
            faults.append(f"{line.what}: summary.json says epsilon {line.reported:.6g}, {name} gives {value}")
    if line.tight is not None and line.tight > line.reported * (1 + TOLERANCE):
        faults.append(f"{line.what}: epsilon {line.reported:.6g} is less than the {line.tight:.6g} that it must be")
    return faults
