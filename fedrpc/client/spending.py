"""What a client has spent on its data in all runs: a file in its state folder that outlives the stores of the runs."""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedrpc.errors import Damaged
from fedrpc.files import explain_full, sync
from fedrpc.privacy.accountant import choose_larger
from fedrpc.privacy.ledger import parse_history
from fedrpc.privacy.mechanisms import Histories, History, add_histories

SPENDING_FILE = "spending.jsonl"
_SPENT, _AT_LEAST, _UNCOVERED = "spent", "at_least", "uncovered"


@dataclass
class RunSpending:
    """What was spent in one run, by adjacency, and the kinds that left without a guarantee."""

    spent: dict[str, History] = field(default_factory=dict)
    uncovered: set[str] = field(default_factory=set)


@dataclass
class DataSpending:
    """What was spent on one data set, by run."""

    name: str
    runs: dict[str, RunSpending] = field(default_factory=lambda: defaultdict(RunSpending))

    def add_up(self, *, without: str = "") -> dict[str, History]:
        """Adds up the runs, except one."""
        return add_histories(run.spent for name, run in self.runs.items() if name != without)

    def list_uncovered(self) -> list[str]:
        """Lists the kinds that left without a guarantee in any run."""
        return sorted({kind for run in self.runs.values() for kind in run.uncovered})


def read_spending(path: Path) -> dict[str, DataSpending]:
    """Reads a client's file, by the data set's digest; a last line that a crash tore is left out.

    Raises:
        Damaged: Another line cannot be read: leaving it out would forget what was spent.
    """
    found: dict[str, DataSpending] = {}
    for number, line in enumerate(_read_whole_lines(path), start=1):
        try:
            row = json.loads(line)
            data = found.setdefault(row["dataset"], DataSpending(row["name"]))
            _apply(data.runs[row["run"]], row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(
                f"{path}, line {number} cannot be read ({error}), so what this client has spent is not known; "
                "mend the line"
            ) from None
    return found


def _read_whole_lines(path: Path) -> list[bytes]:
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


def _apply(run: RunSpending, row: dict[str, Any]) -> None:
    spent, at_least = (
        {adjacency: parse_history(entries) for adjacency, entries in row.get(key, {}).items()}
        for key in (_SPENT, _AT_LEAST)
    )
    run.spent = add_histories([run.spent, spent])
    if at_least:
        run.spent = choose_larger(run.spent, at_least)
    run.uncovered.update(row.get(_UNCOVERED, ()))


class SpendingFile:
    """A client's file, as one run uses it. It is read when it is first needed, and only ever appended to.

    Lines are written before the answer that they are about is committed, so a crash can only count too much.

    Args:
        dataset: The digest of the data set: what is spent on it adds up, whatever a run makes of it.
        name: Its name.
        run: The run's id.
    """

    def __init__(self, path: Path, dataset: str, name: str, run: str) -> None:
        self._path, self._dataset, self.name, self._run = path, dataset, name, run
        self._lock = threading.Lock()  # the training thread books answers, the event loop what a server says
        self._is_whole = False  # whether the file is known to end with a whole line

    @cached_property
    def _data(self) -> DataSpending:
        return read_spending(self._path).get(self._dataset) or DataSpending(self.name)

    def sum_other_runs(self) -> dict[str, History]:
        """Adds up what other runs spent on the same data, by adjacency."""
        with self._lock:
            return self._data.add_up(without=self._run)

    def get_this_run(self) -> dict[str, History]:
        """Returns what this run spent, by adjacency; after a crash it may be more than the client's store says."""
        with self._lock:
            return self._data.runs[self._run].spent

    def list_uncovered(self) -> list[str]:
        """Lists the kinds of this data that left without a guarantee, in any run."""
        with self._lock:
            return self._data.list_uncovered()

    def add(self, spent: Histories, uncovered: Iterable[str]) -> None:
        """Books an answer before it is committed; the first uncovered release of a kind counts for all of a run.

        A cost is on disk when this returns. The rest may wait: it changes no limit.
        """
        with self._lock:
            new = sorted(set(uncovered) - self._data.runs[self._run].uncovered)
            self._append(({_SPENT: spent} if spent else {}) | ({_UNCOVERED: new} if new else {}), durable=bool(spent))

    def raise_to(self, spent: Histories) -> None:
        """Notes that this run has spent at least so much, as its server says."""
        with self._lock:
            run = self._data.runs[self._run]
            if choose_larger(run.spent, spent) != run.spent:
                self._append({_AT_LEAST: spent}, durable=True)

    def _append(self, values: dict[str, Any], *, durable: bool) -> None:
        if not values:
            return
        row = {"dataset": self._dataset, "name": self.name, "run": self._run} | values
        is_new = not self._path.exists()
        with explain_full(self._path), self._path.open("ab") as file:
            if not self._is_whole:
                file.truncate(sum(map(len, _read_whole_lines(self._path))))
            self._is_whole = False
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            self._is_whole = True
            if durable:
                os.fsync(file.fileno())
        if durable and is_new:
            sync(self._path.parent)
        _apply(self._data.runs[self._run], row)
