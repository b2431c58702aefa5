"""Reads the runs of a comparison: those that were planned together, or finished runs of any folders."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedrpc.config import flatten
from fedrpc.errors import ConfigError
from fedrpc.files import explain_damage
from fedrpc.study.cells import OWN, Cell, Failure, format_setting
from fedrpc.study.comparison import NO_GOALS, Comparison, Goals
from fedrpc.study.reading import Run, read_run

# What may differ between runs that are compared: the method, and what does not change the result.
_CODE = "code."  # settings of this table are the user's own files
MAY_DIFFER = frozenset({"method", "params", "parallel", "device", "limits"})


def read_comparison(
    folder: Path, cells: Iterable[Cell], failures: Sequence[Failure] = (), goals: Goals = NO_GOALS
) -> Comparison:
    """The runs of a planned comparison, without those that failed, cannot be read, or were run in another setting."""
    runs: list[tuple[Cell, Run]] = []
    failed = {failure.cell.run: failure for failure in failures}
    for cell in cells:
        if cell.run in failed:
            continue
        try:
            run = read_run(folder / cell.run)
            _check_alike(runs, cell, run)
            runs.append((cell, run))
        except ConfigError as error:
            failed[cell.run] = Failure(cell, str(error), error.exit_code)
    return Comparison(folder, runs, list(failed.values()), goals)


def _check_alike(runs: Sequence[tuple[Cell, Run]], cell: Cell, run: Run) -> None:
    """Raises ConfigError unless a run is in the setting of the others, but for its seed, network and point."""
    remedy = f"remove {run.folder} and run the comparison again"
    if run.config.get("seed", 0) != cell.seed:
        raise ConfigError(f"its seed is {run.config.get('seed')}, expected {cell.seed}; {remedy}")
    for other, first in runs[:1]:
        by_design = {"seed", *(_find_setting(name) for name in (*cell.point, *other.point))}
        by_design |= {"model"} if cell.model != other.model else set()
        one, two = (_flatten_shared(each.config) for each in (first, run))
        for name in sorted(_find_differing([one, two])):
            if name not in by_design:
                raise ConfigError(
                    f"its {name} is {two.get(name)!r}, that of {first.summary['method']} {one.get(name)!r}: not the "
                    f"same setting; {remedy}"
                )
    for other, first in runs:
        if other.shared == cell.shared and first.partition["sha256"] != run.partition["sha256"]:
            raise ConfigError(
                f"its partition {run.partition['sha256'][:16]} is not that of {first.summary['method']}, "
                f"{first.partition['sha256'][:16]}: was it run on other data? {remedy.capitalize()}"
            )


def _find_setting(name: str) -> str:
    """The setting that a name of the grid is part of."""
    return "partition" if name.startswith("partition.") else name


def _flatten_shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that all methods have, by dotted name."""
    found = flatten({name: value for name, value in config.items() if name not in MAY_DIFFER})
    return {name: value[:16] if name.startswith(_CODE) else value for name, value in found.items()}


# What a comparison has written


def read_again(folder: Path) -> Comparison:
    """The comparison that is in a folder already, from its runs as they are now."""
    cells, goals, planned = read_written(folder)
    if planned:
        return read_comparison(folder, cells, goals=goals)
    return read_folders([Path(os.path.normpath(folder / cell.run)) for cell in cells], folder, goals)


def read_written(folder: Path) -> tuple[list[Cell], Goals, bool]:
    """The cells of the comparison in a folder, what was asked of it, and whether they were planned together."""
    path = folder / "compare.json"
    with explain_damage(path, remedy="run the comparison again, which writes it anew"):
        written = json.loads(path.read_bytes())
        rows = [(entry, run) for entry in written["methods"] for run in entry["runs"]]
        rows += [(failure, failure) for failure in written["failed"]]
        cells = [
            Cell(row["method"], run["seed"], Path(run["run"]), row["point"], row["model"], row["note"])
            for row, run in rows
        ]
        return cells, Goals(written["targets"], written["byte_budget"], written.get("link")), bool(written["planned"])


# Finished runs of any folders


def read_folders(folders: Sequence[Path], out: Path, goals: Goals) -> Comparison:
    """Finished runs side by side, whatever they are of; a folder of a comparison stands for all its finished runs.

    Args:
        out: Where compare.json is to go.
    """
    runs, failures = [], []
    for folder in _list_runs(folders):
        try:
            runs.append(read_run(folder))
        except ConfigError as error:
            failures.append(Failure(Cell(folder.name, 0, folder.absolute()), str(error), error.exit_code))
    return Comparison(out, _name_cells(runs), failures, goals, _describe_differences(runs), planned=False)


def _list_runs(folders: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for folder in folders:
        if (folder / "compare.json").is_file():
            cells, _, _ = read_written(folder)
            found += [folder / cell.run for cell in cells if (folder / cell.run / "summary.json").exists()]
        else:
            found.append(folder)
    return list(dict.fromkeys(found))


def _name_cells(runs: Sequence[Run]) -> list[tuple[Cell, Run]]:
    """Names each run after all in which it differs from others; runs that differ only in their seed share a row."""
    tables = [_flatten_shared(run.config) for run in runs]
    shared = _find_differing(tables) - {"seed", "model"}
    several_models = len({run.summary["model"] for run in runs}) > 1
    found = []
    for run, table in zip(runs, tables, strict=True):
        own = [flatten(each.config.get("params", {}), OWN) for each in runs if _is_same_method(each, run)]
        mine = table | flatten(run.config.get("params", {}), OWN)
        point = {name: mine.get(name) for name in sorted(shared | _find_differing(own))}
        model = run.summary["model"] if several_models else ""
        found.append(Cell(run.summary["method"], run.summary["seed"], run.folder.absolute(), point, model))
    times = Counter((cell.row, cell.seed) for cell in found)
    named = [
        replace(cell, note=str(run.folder)) if times[cell.row, cell.seed] > 1 else cell
        for cell, run in zip(found, runs, strict=True)
    ]
    return list(zip(named, runs, strict=True))


def _is_same_method(one: Run, other: Run) -> bool:
    return bool(one.summary["method"] == other.summary["method"])


def _find_differing(tables: Sequence[Mapping[str, Any]]) -> set[str]:
    names = {name for table in tables for name in table}
    return {name for name in names if len({json.dumps(value) for value in _list_values(tables, name)}) > 1}


def _list_values(tables: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """A setting's value in each run; an own file only where the run has it: a method brings its own."""
    return [table.get(name) for table in tables if name in table or not name.startswith(_CODE)]


def _describe_differences(runs: Sequence[Run]) -> list[str]:
    """One sentence for each shared setting in which the runs differ, and for partitions that differ by themselves."""
    tables = [_flatten_shared(run.config) for run in runs]
    found = []
    for name in sorted(_find_differing(tables) - {"seed"}):
        values = list(dict.fromkeys(str(table.get(name, "none")) for table in tables))
        caveat = "; their accuracies are of different tasks" if name in ("dataset", "validation") else ""
        found.append(f"different {name}: {', '.join(values)}{caveat}")
    partitions: dict[str, set[str]] = {}
    dealt = ("dataset", "partition", "clients", "train_size", "validation", "seed", "channels")
    for run, table in zip(runs, tables, strict=True):
        key = ", ".join(format_setting((name, table[name])) for name in dealt if name in table)
        partitions.setdefault(key, set()).add(run.partition["sha256"])
    found += [
        f"partitions differ though their settings do not ({key})" for key, own in partitions.items() if len(own) > 1
    ]
    return found
