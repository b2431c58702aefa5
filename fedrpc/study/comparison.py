"""Compares finished runs: what compare.json holds, and all that the table, the page and the exports show.

compare.json (sizes in bytes, accuracies in percent; `null` where a value does not exist):

    schema        2
    version       of fedrpc
    planned       whether the runs were run to be compared, or are finished runs of any folders
    setting       {dataset, partition, model, num_clients, clients_a_round, num_rounds, seed, precision}: null where
                  runs differ
    seeds, grid   the seeds, and the values of each setting that differs by design
    differs       sentences about what else differs between the runs
    same          {partition_sha256, initial_model, cohorts}: why the runs compare like with like. `partition_sha256` is
                  null when there are several seeds or partitions; then runs of one seed and point have the same.
                  `cohorts` is {agree, rounds_apart: {run: [round, ...]}}, read off the ledgers
    baseline      {method, by}: what overheads are measured against; `by` is "run" or "formula"
    targets, byte_budget, link    what was asked for
    pareto        {objectives, front}: the names of the rows that no other dominates
    methods       a list in the order in which they were named: a row for each method, network and point of the grid
      name                    of the row; the method's where that is enough
      labels                  the same in pieces
      method, model           `model` where it is not that of all
      needs_model             whether that is because the method needs it
      point, note             its settings of the grid; what else tells it from another row, or ""
      params                  its own parameters
      shares, raw_data        what leaves a client besides weights and scalars; whether that is raw data
      runs                    a list, by seed (see below)
      baseline                the name of FedAvg's row on the same network and at the same point, or null
      accuracy, bytes, overhead, seconds, parts, privacy, model_sha256, curve, formula
                              as of a run: means over the seeds, but the worst privacy; the hash only of a single run
      statistics              {last, last10, best, tensor, message, kernel, overhead, seconds, cpu_seconds,
                              peak_bytes, num_rounds}: {mean, sd, n} over the seeds; sd by n - 1, null for one seed
      difference              {last, last10}: of the pairs with FedAvg's run of the same seed, in points: {mean, sd, n,
                              low, high, level, better, worse, equal, sign_p}; the interval is Student's, sign_p the
                              sign test's, both null for one seed; null for FedAvg's own rows
      cost                    {communication, computation, memory}: {value, ratio}, against FedAvg's: tensor bytes,
                              client CPU seconds, a client process's peak bytes
      time                    {measured, predicted, link}: seconds of the run, and those predicted over a link when
                              every client has a machine of its own; null when no link is known
      targets                 a list of {target, reached, of, rounds, bytes, seconds, predicted}, the last four {mean,
                              sd, n} over the seeds that reached it
      at_budget               {mean, sd, n} of the accuracy within the byte budget
      pareto                  whether no other row dominates it
    runs of a row
      run, seed               its run directory, relative to this file
      accuracy                {last, last10, best, best_round, best_is} or null; last10 is the mean of the last ten
      bytes.by_kind.<kind>    {down, up}.{measured, predicted}: tensor bytes of the method's own phases
      bytes.tensor            {measured, predicted}: their sums
      bytes.message           the method's own messages, both ways
      bytes.kernel            everything that TCP carried, both ways; null for a run within one process
      bytes.kernel_note       why that is not exact (a run that was resumed: a lower bound), or null; or ""
      overhead                tensor bytes over those of FedAvg's run, or of its formula if that had other rounds
      seconds, cpu_seconds, peak_bytes
      predicted               {link, seconds, until} over that link, or null; `until` has the seconds up to the end of
                              each round of the curve
      parts                   {part: seconds} on the server's path: where the time went; null where it was not measured
      emulated, reproducible  {link, shaper, speed, tcp} of clients, or null; whether the same seed gives the same model
      num_rounds, stopped     the rounds that were run, and why there were no more, or null
      privacy                 {epsilon, delta, reason, text}; `text` is "no guarantee: ..." or the epsilon in full
      model_sha256
      formula                 where measured and predicted bytes differ
      curve                   [[round, message bytes up to its end, accuracy, seconds up to its end], ...] of the
                              evaluated rounds
      targets                 a list of {target, rounds, bytes, seconds, predicted}: null where it was never reached
      at_budget               {accuracy, rounds, bytes} of the last evaluation within the byte budget, or null
    failed        a list of {name, method, model, point, note, seed, run, reason, exit_code, refused}; `refused`: the
                  data, the network or another setting does not suit the method
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import fedrpc
from fedrpc.study.cells import BASELINE, Cell, Failure
from fedrpc.study.comparison_entries import describe_row, describe_run
from fedrpc.study.pareto import OBJECTIVES, find_front
from fedrpc.study.reading import Run
from fedrpc.wire.ledger import EVALUATE, SESSION

SCHEMA = 2


@dataclass(frozen=True)
class Goals:
    """What to read off the curves.

    Args:
        targets: Accuracies, in percent.
        byte_budget: Bytes of a method's own messages.
        link: Over which times are predicted; that of the runs themselves, if they were emulated, when None.
    """

    targets: Sequence[float] = ()
    byte_budget: int | None = None
    link: str | None = None


NO_GOALS = Goals()


@dataclass(frozen=True)
class Comparison:
    """Finished runs side by side.

    Attributes:
        folder: Where compare.json goes.
        runs: In the order in which they are shown.
        differs: What differs between the runs, in words.
        planned: Whether they were run to be compared.
    """

    folder: Path
    runs: Sequence[tuple[Cell, Run]]
    failures: Sequence[Failure] = ()
    goals: Goals = NO_GOALS
    differs: Sequence[str] = ()
    planned: bool = True

    @cached_property
    def document(self) -> dict[str, Any]:
        """What compare.json holds."""
        entries = self._describe_rows()
        front = find_front(entries)
        by_run = all(entry["baseline"] for entry in entries)
        return {
            "schema": SCHEMA,
            "version": fedrpc.__version__,
            "planned": self.planned,
            "setting": self._collect_setting(),
            "seeds": sorted({cell.seed for cell, _ in self.runs}),
            "grid": self._collect_grid(),
            "differs": list(self.differs),
            "same": self._collect_sameness(),
            "baseline": {"method": BASELINE, "by": "run" if by_run else "formula"},
            "targets": list(self.goals.targets),
            "byte_budget": self.goals.byte_budget,
            "link": self.goals.link,
            "pareto": {"objectives": list(OBJECTIVES), "front": front},
            "methods": [entry | {"pareto": entry["name"] in front} for entry in entries],
            "failed": [self._describe_failure(failure) for failure in self.failures],
        }

    def _describe_rows(self) -> list[dict[str, Any]]:
        rows: dict[str, list[tuple[Cell, Run]]] = {}
        for cell, run in self.runs:
            rows.setdefault(cell.row, []).append((cell, run))
        found = {name: [self._describe_run(*each) for each in members] for name, members in rows.items()}
        entries = []
        for name, members in rows.items():
            pairs = [self._find_baseline(cell) for cell, _ in members]
            baseline = next((pair[0].row for pair in pairs if pair), None)
            entries.append(describe_row(*members[0], found[name], baseline, found[baseline] if baseline else ()))
        return entries

    def _describe_run(self, cell: Cell, run: Run) -> dict[str, Any]:
        beside = self._find_baseline(cell)
        goals = (self.goals.targets, self.goals.byte_budget, self.goals.link)
        return describe_run(cell, run, self.folder, beside[1] if beside else None, *goals)

    def _find_baseline(self, cell: Cell) -> tuple[Cell, Run] | None:
        return next((pair for pair in self.runs if pair[0].is_baseline_of(cell)), None)

    def _describe_failure(self, failure: Failure) -> dict[str, Any]:
        cell = failure.cell
        return {
            "name": cell.row,
            "method": cell.method,
            "model": cell.model,
            "point": dict(cell.point),
            "note": cell.note,
            "seed": cell.seed,
            "run": Path(os.path.relpath(self.folder / cell.run, self.folder)).as_posix(),
            "reason": failure.reason,
            "exit_code": failure.exit_code,
            "refused": failure.refused,
        }

    def _collect_setting(self) -> dict[str, Any]:
        """What all runs share; None where they differ."""
        tables = [
            {name: run.summary[name] for name in ("dataset", "partition", "num_clients", "seed")}
            | {"clients_a_round": _get_cohort_size(run), "num_rounds": run.config.get("rounds")}
            | {"precision": run.config.get("train", {}).get("precision", "fp32")}
            | {"validation": run.config.get("validation") or 0.0}
            for _, run in self.runs
        ]
        models = [run.summary["model"] for cell, run in self.runs if not cell.model]
        tables += [{"model": model} for model in models]
        names = [
            *("dataset", "partition", "model", "num_clients", "clients_a_round", "num_rounds", "seed"),
            *("precision", "validation"),
        ]
        values = {name: [table[name] for table in tables if name in table] for name in names}
        return {
            name: found[0] if found and found.count(found[0]) == len(found) else None for name, found in values.items()
        }

    def _collect_grid(self) -> dict[str, list[Any]]:
        grid: dict[str, list[Any]] = {}
        for cell, _ in self.runs:
            for name, value in cell.point.items():
                if value not in grid.setdefault(name, []):
                    grid[name].append(value)
        return grid

    def _collect_sameness(self) -> dict[str, Any]:
        partitions = {run.partition["sha256"] for _, run in self.runs}
        return {
            "partition_sha256": partitions.pop() if len(partitions) == 1 else None,
            "initial_model": "follows from the seed and the network",
            "cohorts": self._compare_cohorts(),
        }

    def _compare_cohorts(self) -> dict[str, Any]:
        """Whether runs of one seed and point asked the same clients; one that was absent counts as a difference."""
        apart: dict[str, list[int]] = {}
        firsts: dict[str, dict[int, set[int]]] = {}
        several = len({cell.seed for cell, _ in self.runs}) > 1
        for cell, run in self.runs:
            cohorts = read_cohorts(run)
            first = firsts.setdefault(cell.shared, cohorts)
            if rounds := [index for index in cohorts if index in first and cohorts[index] != first[index]]:
                apart[f"{cell.row}, seed {cell.seed}" if several else cell.row] = rounds
        return {"agree": not apart, "rounds_apart": apart}


def _get_cohort_size(run: Run) -> int:
    return max(1, round(float(run.config.get("fraction", 1.0)) * int(run.summary["num_clients"])))


def read_cohorts(run: Run) -> dict[int, set[int]]:
    """The clients asked in each round, from the ledger; without set-up and finalisation, which ask all."""
    found: dict[int, set[int]] = {index: set() for index in range(run.summary["num_rounds"])}
    for key, _ in run.ledger():
        if key.direction == "down" and key.phase not in (SESSION, EVALUATE) and key.round in found:
            found[key.round].add(key.client)
    return found
