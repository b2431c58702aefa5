"""Reads a run directory as a tool would: only by the contract of its files."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMING_KEYS = {
    "task": ("round", "phase", "step", "client", "attempt"),
    "phase": ("round", "phase", "epoch", "resumed"),
}
CLOCK_S = 2e-3  # between two clocks that are read one after the other
LEDGER_KEY = ("round", "phase", "kind", "direction", "client", "attempt", "aborted", "repeated")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class RunDir:
    """One run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        return json.loads((self.path / "summary.json").read_text())

    @property
    def model_sha256(self) -> str:
        """The final model's hash."""
        return self.summary["model_sha256"]

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """ledger.jsonl."""
        return read_rows(self.path / "ledger.jsonl")

    @property
    def privacy(self) -> list[dict[str, Any]]:
        """privacy.jsonl."""
        return read_rows(self.path / "privacy.jsonl")

    @property
    def timing(self) -> list[dict[str, Any]]:
        """timing.jsonl."""
        return read_rows(self.path / "timing.jsonl")

    @property
    def journal(self) -> list[dict[str, Any]]:
        """The ledger's rows of the current round, as they were booked."""
        lines = (self.path / "ledger.partial.jsonl").read_text().splitlines(keepends=True)
        bookings = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for booking in bookings for row in booking.get("rows", ())]

    @property
    def durable_round(self) -> int:
        """The last round with a checkpoint; -2 before the first."""
        path = self.path / "checkpoints" / "manifest.json"
        return json.loads(path.read_text())["round"] if path.exists() else -2

    def count_spooled(self) -> int:
        """Counts the complete replies of the current round on disk: files, and small ones that share a file."""
        files = [path for path in self.path.glob("spool/*/*") if path.suffix != ".part"]
        return sum(_count_small(path) if path.suffix == ".log" else 1 for path in files)

    def sums(self, **where: Any) -> dict[str, int]:
        """Sums the bytes of the ledger rows that match."""
        out = Counter({"tensor_bytes": 0, "message_bytes": 0, "messages": 0})
        for row in self.ledger:
            if all(row[name] == value for name, value in where.items()):
                out.update({name: row[name] for name in out})
        return dict(out)

    def attempts(self, **where: Any) -> list[int]:
        """Lists the attempts of the matching ledger rows."""
        return sorted({row["attempt"] for row in self.ledger if all(row[k] == v for k, v in where.items())})


def _count_small(path: Path) -> int:
    """Counts the complete replies in a file of small ones, each after a line of its task and size."""
    data, at, count = path.read_bytes(), 0, 0
    while (end := data.find(b"\n", at)) >= 0:
        at = end + 1 + int(data[at:end].split()[1])
        count += at <= len(data)
    return count


def find_repeated_ledger_keys(run: RunDir) -> list[tuple[Any, ...]]:
    """Finds keys that more than one row of the ledger has."""
    counts = Counter(tuple(row.get(name) for name in LEDGER_KEY) for row in run.ledger)
    return [key for key, count in counts.items() if count > 1]


def find_repeated_timing_keys(run: RunDir) -> list[tuple[Any, ...]]:
    """Finds keys that more than one row of timing.jsonl has."""
    counts = Counter(tuple(row[name] for name in ("row", *TIMING_KEYS[row["row"]])) for row in run.timing)
    return [key for key, count in counts.items() if count > 1]


def list_answered(run: RunDir) -> set[tuple[Any, ...]]:
    """The tasks that have a row of their answer in timing.jsonl, whatever the attempt."""
    names = ("round", "phase", "step", "client")
    return {tuple(row[name] for name in names) for row in run.timing if row.get("outcome") == "answered"}


def find_phases_that_do_not_add_up(run: RunDir) -> list[dict[str, Any]]:
    """Finds rows of phases whose parts differ from their seconds by more than 1 %, and by more than clocks may."""
    parts = ("queue", "download", "compute", "upload", "encode", "read", "aggregate", "evaluate", "checkpoint")

    def adds_up(row: dict[str, Any]) -> bool:
        rest = sum(row[f"{part}_s"] for part in parts) - row["seconds"]
        return abs(rest) <= 0.01 * row["seconds"] + CLOCK_S

    return [row for row in run.timing if row["row"] == "phase" and not adds_up(row)]


def find_repeated_releases(run: RunDir) -> list[tuple[Any, ...]]:
    """Finds releases that were charged more than once; parts of one kind may have rows of their own."""
    names = ("client", "round", "phase", "step", "kind")
    counts = Counter((*(row[name] for name in names), *row["parts"]) for row in run.privacy)
    return [key for key, count in counts.items() if count > 1]


def find_broken_links(run: RunDir) -> Iterator[str]:
    """Yields what is wrong with the hash chains of privacy.jsonl, recomputed from the rows alone."""
    heads: dict[int, tuple[int, bytes]] = {}
    for row in run.privacy:
        count, head = heads.get(row["client"], (0, bytes(32)))
        body = {name: value for name, value in row.items() if name != "hash"}
        digest = hashlib.sha256(head + json.dumps(body, separators=(",", ":")).encode()).digest()
        if row["index"] != count:
            yield f"client {row['client']}: index {row['index']}, expected {count}"
        if row["previous"] != head.hex():
            yield f"client {row['client']}: row {count} does not name its predecessor"
        if row["hash"] != digest.hex():
            yield f"client {row['client']}: row {count} has a wrong hash"
        heads[row["client"]] = (count + 1, digest)
