"""Follows what a run's clients have spent: an epsilon as it grows, or why there is none.

Epsilons come from the accountant that the summary uses, in a process of its own: it needs torch, and the page does not.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Mapping
from functools import cache
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path
from typing import Any

from fedrpc.tail import Tail

_LOWEST = 19  # the priority of a process that never takes a core from others

Entries = tuple[tuple[float, float, int], ...]  # (noise multiplier, sampling rate, steps)


class Spending:
    """What is known of privacy.jsonl, which has what clients claim of their releases."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._restart()
        self._asked: tuple[frozenset[Entries], float] | None = None
        self._answer: AsyncResult[float] | None = None
        self.epsilon: float | None = None  # of the client that has spent most, as far as it is computed

    def _restart(self) -> None:
        self.uncovered: set[str] = set()
        self.notions: set[str] = set()
        self.num_rows = 0
        self._spent: dict[int, dict[tuple[float, float], int]] = {}
        self._first_round: int | None = None
        self._is_settled = False

    def refresh(self) -> None:
        """Reads new rows; once it is clear that there is no guarantee, later rounds need not be read."""
        if self._is_settled:
            return
        news = self._tail.read()
        if news.restarted:
            self._restart()
        for line in news.lines:
            try:
                self._add(json.loads(line))
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                continue  # the audit says what is wrong with it

    def _add(self, row: Mapping[str, Any]) -> None:
        history = row["history"]
        if self._first_round is None:
            self._first_round = row["round"]
        if row["coverage"] == "none" or (row["coverage"] == "covered" and not history):
            self.uncovered.add(str(row["kind"]))
        if history:
            self.notions.add(str(row["adjacency"]))
        spent = self._spent.setdefault(row["client"], {})
        for noise, rate, steps in history:
            spent[float(noise), float(rate)] = spent.get((float(noise), float(rate)), 0) + int(steps)
        self.num_rows += 1
        self._is_settled = bool(self.uncovered) and row["round"] > self._first_round

    def ask_epsilon(self, delta: float) -> float | None:
        """The last epsilon that was computed; asks for a newer one, if there are new rows, and does not wait."""
        if self._answer and self._answer.ready():
            answer, self._answer = self._answer, None
            self.epsilon = answer.get() if answer.successful() else self.epsilon
        spent = frozenset(
            tuple((noise, rate, steps) for (noise, rate), steps in sorted(found.items()))
            for found in self._spent.values()
            if found
        )
        if self._answer is None and spent and self._asked != (spent, delta):
            self._asked = (spent, delta)
            self._answer = _open_accountant().apply_async(compute_largest, (spent, delta))
        return self.epsilon


@cache
def _open_accountant() -> Pool:
    """One process, which ends with this one, however that ends: it is a daemon, and reads a pipe that closes then."""
    return multiprocessing.get_context("spawn").Pool(1, initializer=_set_up)


def _set_up() -> None:
    os.nice(_LOWEST)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and is the page's to obey


def compute_largest(spent: frozenset[Entries], delta: float) -> float:
    """The epsilon of the client that has spent most."""
    from fedrpc.privacy.accountant import compute_epsilon
    from fedrpc.privacy.mechanisms import merge_histories

    return max(compute_epsilon(merge_histories([found]), delta) for found in spent)
