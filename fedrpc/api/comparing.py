"""`fedrpc.compare`: methods side by side in the same setting, or finished runs of any folders."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fedrpc.api import frames
from fedrpc.api.arguments import (
    StrPath,
    read_count,
    read_names,
    read_optional_path,
    read_path,
    read_targets,
    read_text,
    refuse,
    write_grid,
    write_seeds,
)
from fedrpc.api.finished import Run
from fedrpc.api.markup import draw_table
from fedrpc.api.progress import ComparisonDisplay, choose_display
from fedrpc.api.settings import Settings, Table, collect_settings, read_sources, show_settings
from fedrpc.emulation.conditions import check_links
from fedrpc.errors import ConfigError
from fedrpc.launch.apart import launch_apart
from fedrpc.launch.compare import find_failed, open_workshop, read_planned
from fedrpc.launch.jobs import Workshop, is_finished
from fedrpc.launch.plan import Plan, Request, plan_runs
from fedrpc.launch.values import read_methods
from fedrpc.log import check_level
from fedrpc.report.comparison import write_comparison
from fedrpc.report.comparison_cells import tabulate_outcome
from fedrpc.report.comparison_words import describe_setup, make_title
from fedrpc.report.formula import require_formulas
from fedrpc.study import comparison as study
from fedrpc.study.cells import Failure
from fedrpc.study.comparison_reading import read_folders

if TYPE_CHECKING:
    from pandas import DataFrame

_STATISTICS = {  # in compare.json, and in the data frame
    "last": "accuracy",
    "last10": "accuracy_last10",
    "best": "accuracy_best",
    "tensor": "tensor_bytes",
    "message": "message_bytes",
    "kernel": "kernel_bytes",
    "overhead": "overhead",
    "seconds": "seconds",
    "cpu_seconds": "cpu_seconds",
}


class Comparison:
    """Finished runs side by side; `fedrpc.compare` returns it.

    Args:
        found: The runs, and what was asked of them.
        is_written: Whether the folder has the comparison's files.
    """

    def __init__(self, found: study.Comparison, *, is_written: bool) -> None:
        self._found, self._is_written = found, is_written

    @property
    def folder(self) -> Path | None:
        """The comparison's folder; None for runs of other folders that were only read."""
        return self._found.folder if self._is_written else None

    @property
    def values(self) -> Mapping[str, Any]:
        """What compare.json holds."""
        return self._found.document

    @cached_property
    def runs(self) -> Mapping[str, Run]:
        """The runs by the names of their run directories, in the order in which they are shown."""
        found = [(cell.run.name, Run(run)) for cell, run in self._found.runs]
        names = [name for name, _ in found]
        return {name if names.count(name) == 1 else str(run.folder): run for name, run in found}

    @property
    def failed(self) -> Mapping[str, str]:
        """Why the runs failed that did, by name."""
        return {failure.cell.run.name: failure.reason for failure in self._found.failures}

    @cached_property
    def table(self) -> DataFrame:
        """A row for each method, network and point of the grid: means over the seeds, with deviations if several.

        Accuracies are in percent, sizes in bytes. `pareto` says that no other row is as good in accuracy, bytes,
        seconds and epsilon, and better in one of them.
        """
        rows = [_flatten_entry(entry) for entry in self.values["methods"]]
        frame = frames.make_frame(rows)
        return frame.set_index("name") if rows else frame

    def page(self, out: StrPath | None = None) -> Path:
        """The path of the comparison's page, compare.html, which is written into `out` if it has no folder yet."""
        if self._is_written:
            return self._found.folder / "compare.html"
        path = read_optional_path("out", out)
        if path is None:
            raise ConfigError("these runs were only read, and have no folder for a page: say page(out=...)")
        self._found, self._is_written = dataclasses.replace(self._found, folder=path), True
        return write_comparison(self._found)

    def _tabulate(self) -> tuple[Sequence[str], list[list[str]]]:
        sheet = tabulate_outcome(self.values)
        rows = [
            [entry["name"], *(cell if isinstance(cell, str) else cell.text for cell in cells)]
            for entry, cells in sheet.rows
        ]
        return sheet.head, rows

    def _list_notes(self) -> list[str]:
        where = [f"folder: {self.folder}"] if self.folder else []
        return [*(f"{name} failed: {reason}" for name, reason in self.failed.items()), *self._found.differs, *where]

    def __repr__(self) -> str:
        if not self._found.runs:
            return "\n".join(["no run is finished", *self._list_notes()])
        head, rows = self._tabulate()
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in (list(head), *rows)
        ]
        return "\n".join([make_title(self.values), describe_setup(self.values), *lines, *self._list_notes()])

    def _repr_html_(self) -> str:
        if not self._found.runs:
            return draw_table("no run is finished", ["method"], [], self._list_notes())
        notes = [describe_setup(self.values), *self._list_notes()]
        return draw_table(make_title(self.values), *self._tabulate(), notes)


def _flatten_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    found = {"name": entry["name"], "method": entry["method"], "seeds": len(entry["runs"])} | dict(entry["point"])
    for statistic, name in _STATISTICS.items():
        spread = entry["statistics"][statistic]
        found[name] = spread["mean"] if spread else None
        if spread and name.endswith("_bytes") and float(spread["mean"]).is_integer():
            found[name] = int(spread["mean"])
        if len(entry["runs"]) > 1:
            found[f"{name}_sd"] = spread["sd"] if spread else None
    return found | {"epsilon": entry["privacy"]["epsilon"], "pareto": entry["pareto"]}


@show_settings
def compare(
    methods: StrPath | Sequence[StrPath] | None = None,
    *,
    folders: Iterable[StrPath | Run] | None = None,
    seeds: str | Sequence[int] | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    target: float | Sequence[float] = (),
    whatif: str | None = None,
    baseline: bool = True,
    jobs: int | None = None,
    recipe: str | None = None,
    config: StrPath | None = None,
    out: StrPath | None = None,
    data_dir: StrPath | None = None,
    hosts: int | None = None,
    allow_changed_code: bool = False,
    strict: bool = False,
    progress: bool = True,
    log_level: str = "warning",
    **settings: Unpack[Settings],
) -> Comparison:
    """Runs several methods as `fedrpc compare` does: same partition, same initial model, same cohorts.

    The same call again skips finished runs and resumes the rest. One that fails stops no other: it is in `failed`.

    Args:
        methods: Their names, or "all".
        folders: Finished runs, or folders of runs and comparisons, to hold side by side; nothing is run.
        seeds: Run every method with each of these: range(5), [0, 3, 7] or "0-4".
        grid: Run with each of these values of a setting, in every combination: {"params.mu": [0.1, 1]}.
        target: Accuracies in percent: `values` then tells what they cost in rounds, bytes and seconds.
        whatif: Predict the time over this link, too.
        baseline: Whether to add FedAvg, on every network that the methods run on.
        jobs: Runs at a time, which share the cores; one per four cores when not given.
        recipe: Start from a recipe, which may name the methods.
        config: Start from a TOML file.
        out: Holds a run directory for each; runs/compare-<dataset>-<hash> when not given.
        data_dir: Where data sets are; $FEDRPC_DATA when not given.
        hosts: Run all clients of a run in this many processes.
        allow_changed_code: Go on although a file of your own was changed since.
        strict: Raise MethodFailed at the end when what a method sent differs from its formula.
        progress: Whether to show progress.
        log_level: debug, info, warning or error, of all processes.
        settings: Any setting by its name in TOML; `params` goes to every method that has such a parameter.

    Raises:
        ConfigError: A name, a value or a file is wrong, before anything is started. SomeFailed: every run failed.
    """
    layers = read_sources(recipe, config)
    named = read_names("methods", () if methods is None else methods) or read_methods(layers)
    finished = _read_folders(folders, named)
    place, goals = read_optional_path("out", out), _make_goals(target, whatif)
    if finished:
        return _compare_folders(finished, place, goals, strict=strict)
    shape = write_seeds(seeds), write_grid({} if grid is None else grid)
    request = Request(named, baseline, layers, collect_settings(settings), [], *shape)
    plan = plan_runs(request)
    level, data = check_level(read_text("log_level", log_level)), read_optional_path("data_dir", data_dir)
    where = (place, data, level, read_count("hosts", hosts), read_count("jobs", jobs), allow_changed_code)
    return _compare_methods(plan, open_workshop(plan, *where), request, goals, strict=strict, progress=progress)


def _read_folders(value: Any, methods: Sequence[str]) -> list[Path]:
    """The folders, of which there are none if and only if there are methods."""
    if isinstance(value, str | os.PathLike | Run | Comparison) or not isinstance(value, Iterable | None):
        raise refuse("folders", 'several run directories or runs, such as ["runs/a", "runs/b"]', value)
    found = [
        each.folder if isinstance(each, Run) else read_path("folders", each)
        for each in (() if value is None else value)
    ]
    if bool(found) == bool(methods):
        raise ConfigError(f"expected methods or folders of finished runs, got {'both' if found else 'neither'}")
    return found


def _make_goals(target: float | Sequence[float], whatif: str | None) -> study.Goals:
    if whatif is not None:
        check_links(read_text("whatif", whatif))
    return study.Goals(read_targets(target), link=whatif)


def _compare_methods(
    plan: Plan, workshop: Workshop, request: Request, goals: study.Goals, *, strict: bool, progress: bool
) -> Comparison:
    failures: list[Failure] = []
    if not all(is_finished(workshop.open_run(planned)) for planned in plan.runs):
        hearing = _Hearing(plan, choose_display(plan.runs, is_shown=progress))
        try:
            launch_apart(_make_order(request, workshop), hearing)
        finally:
            hearing.display.close()
        failures = hearing.failures
    found = read_planned(plan, workshop.folder, failures, goals)
    if failed := find_failed(plan, found):
        if not found.runs:
            raise failed
        warnings.warn(str(failed), stacklevel=3)
    write_comparison(found)
    if strict:
        require_formulas(run.folder for _, run in found.runs)
    return Comparison(found, is_written=True)


def _make_order(request: Request, workshop: Workshop) -> Table:
    return {
        "compare": dataclasses.asdict(request),
        "out": str(workshop.folder),
        "data_dir": str(workshop.data_dir) if workshop.data_dir else None,
        "hosts": workshop.num_hosts,
        "jobs": workshop.jobs,
        "log_level": workshop.log_level,
        "allows_changed_code": workshop.allows_changed_code,
    }


class _Hearing:
    """Passes what happens in the other process to a display, and collects the failures."""

    def __init__(self, plan: Plan, display: ComparisonDisplay) -> None:
        self._plan, self.display = plan, display
        self.failures: list[Failure] = []

    def receive(self, message: dict[str, Any]) -> None:
        """Passes one message on."""
        run, what, values = self._plan.runs[message["run"]], message["what"], message["values"]
        if what == "failure":
            self.failures.append(Failure(run.cell, **values))
        elif what == "announce":
            self.display.announce(run, values.pop("event"), **values)
        elif what == "event":
            self.display.event(run, values.pop("name"), values)
        else:
            self.display.end(run)

    def refresh(self) -> None:
        """Has the display draw."""
        self.display.refresh()


def _compare_folders(folders: Sequence[Path], out: Path | None, goals: study.Goals, *, strict: bool) -> Comparison:
    found = read_folders(folders, out or Path(), goals)
    if len(found.runs) + len(found.failures) < 2:
        raise ConfigError("a comparison needs two runs or more; fedrpc.load reads a single one")
    for failure in found.failures:
        raise ConfigError(failure.reason)
    if strict:
        require_formulas(run.folder for _, run in found.runs)
    if out:
        write_comparison(found)
    return Comparison(found, is_written=out is not None)
