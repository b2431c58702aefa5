"""Runs an experiment of a paper with every seed, and has it judged."""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from fedrpc import __version__
from fedrpc.errors import UnknownName
from fedrpc.launch.compare import SomeFailed, create_folder, run_and_show
from fedrpc.launch.jobs import Interrupted, Workshop, choose_jobs, is_finished
from fedrpc.launch.plan import Planned, parse_seeds, read_params, refuse_unknown
from fedrpc.launch.studies import study_finished
from fedrpc.launch.usage import sum_usage
from fedrpc.registry import METHODS
from fedrpc.report.paper_table import show_results, write_results
from fedrpc.study.cells import Cell, Failure
from fedrpc.study.experiment import (
    Experiment,
    Row,
    judge,
    list_measures,
    measure_run,
    read_experiment,
    summarize_rows,
)
from fedrpc.study.experiment_curves import choose_curves, read_curves
from fedrpc.study.reading import Run, read_run


@dataclass(frozen=True)
class PaperRequest:
    """Which experiment to run, and how.

    Attributes:
        size: The paper's own, or one for two cores.
        seeds: Such as "0-2".
        changes: Values that differ from the experiment's; the results name them.
        words: The same as on the command line.
        rows: Only these, and those whose generators they take; when there are none, all, in small but the extra ones.
    """

    name: str
    size: Literal["paper", "small"]
    seeds: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    words: Sequence[str] = ()
    rows: Sequence[str] = ()

    @property
    def command(self) -> str:
        """The command that runs it again."""
        small = ["--small"] if self.size == "small" else []
        changed = [word for item in self.words for word in ("--set", item)]
        chosen = [word for row in self.rows for word in ("--row", row)]
        return shlex.join(["fedrpc", "paper", self.name, *small, "--seeds", self.seeds, *changed, *chosen])


def plan_experiment(experiment: Experiment, request: PaperRequest, folder: Path = Path()) -> list[Planned]:
    """A run for each seed and row: all rows of a seed come before the next seed, so that a part already tells.

    Args:
        folder: Holds the run directories, which rows that take another row's generator name.

    Raises:
        UnknownName: There is no such row, or a change is of a parameter that no row's method has.
    """
    rows = _choose_rows(experiment, request)
    refuse_unknown(read_params(request.changes, ""), sorted({row.method for row in rows}))
    return [
        Planned(
            Cell(row.method, seed, _name_run(row.name, seed), note=row.name),
            experiment.build_config(row, seed, request.size, _choose_changes(request.changes, row, seed, folder)),
            f"{row.name}, seed {seed}",
        )
        for seed in parse_seeds(request.seeds)
        for row in rows
    ]


def _choose_rows(experiment: Experiment, request: PaperRequest) -> list[Row]:
    """The rows that are asked for, in the experiment's order, with those whose generators they take."""
    known = {row.name: row for row in experiment.rows}
    if unknown := [name for name in request.rows if name not in known]:
        raise UnknownName("row", unknown[0], known)
    names = request.rows or [row.name for row in experiment.rows if request.size == "paper" or not row.extra]
    taken = {known[name].gan for name in names}
    return [row for row in experiment.rows if row.name in names or row.name in taken]


def _name_run(row: str, seed: int) -> Path:
    return Path(f"{re.sub(r'[^a-z0-9.=]+', '-', row.lower()).strip('-')}-seed={seed}")


def _choose_changes(changes: Mapping[str, Any], row: Row, seed: int, folder: Path) -> dict[str, Any]:
    """The changes that are for a row: parameters that its method has, and the generator that it takes."""
    known = METHODS[row.method].Params.model_fields
    params = {name: value for name, value in read_params(changes, "").items() if name in known}
    if row.gan is not None:
        params["gan"] = str(folder / _name_run(row.gan, seed))
    return {**changes, "params": params}


def divide_stages(experiment: Experiment, runs: Sequence[Planned]) -> list[list[Planned]]:
    """The runs that need no other run, then those that take a generator from one of these."""
    later = {row.name for row in experiment.rows if row.gan}
    stages = [[run for run in runs if (run.cell.note in later) is late] for late in (False, True)]
    return [stage for stage in stages if stage]


def run_experiment(
    request: PaperRequest,
    out: Path | None,
    data_dir: Path | None,
    log_level: str,
    console: Console,
    num_hosts: int | None = None,
    *,
    jobs: int | None = None,
    show: bool = False,
) -> None:
    """Starts or resumes every run that is not finished, shows the paper's figures beside ours, and writes results.json.

    Whatever is missing in the end, since a run failed or a signal came, the others are shown and written.

    Args:
        show: Whether to start nothing, and tell of the runs that are finished.

    Raises:
        ConfigError: There is no such experiment, or a value is wrong, before anything is started.
        SomeFailed: At the end, if a run failed.
        Interrupted: By a signal; it says where.
    """
    experiment = read_experiment(request.name)
    where = out or Path("runs") / f"paper-{request.name}-{request.size}"
    runs = plan_experiment(experiment, request, where)
    folder = create_folder(where)
    workshop = Workshop(folder, data_dir, log_level, num_hosts, jobs or choose_jobs(len(runs)))

    def tell() -> None:
        results = collect_results(experiment, request, workshop, runs)
        if not results["seeds"]:
            console.print(f"no run in {folder} is finished", highlight=False, soft_wrap=True)
            return
        write_results(folder, results)
        show_results(results, console)
        console.print(f"results: {folder / 'results.json'}", highlight=False, soft_wrap=True)

    if show:
        tell()
        return
    try:
        failures = play_stages(experiment, request, workshop, runs, console)
    except Interrupted:
        tell()
        raise
    tell()
    if failures:
        raise SomeFailed(failures, len(runs), "run")


def play_stages(
    experiment: Experiment, request: PaperRequest, workshop: Workshop, runs: Sequence[Planned], console: Console
) -> list[Failure]:
    """Plays all runs, those first that others take a generator from, and has the finished ones studied."""
    stages = divide_stages(experiment, runs)
    failures = [failure for stage in stages for failure in run_and_show(stage, workshop, console)]
    failed = {failure.cell.run for failure in failures}
    if experiment.study:
        study_runs(experiment, request, workshop, [run for run in runs if run.cell.run not in failed], console)
    return failures


def study_runs(
    experiment: Experiment, request: PaperRequest, workshop: Workshop, runs: Sequence[Planned], console: Console
) -> None:
    """Has every run studied that has not been."""
    assert experiment.study is not None
    rows = {row.name: row for row in experiment.rows}
    for number, run in enumerate(runs, 1):
        options = experiment.choose_options(rows[run.cell.note], request.size)
        if study_finished(workshop.folder / run.cell.run, experiment.study.name, options, workshop.data_dir):
            done = f"{experiment.study.name} of {run.label}: {number} of {len(runs)}"
            console.print(done, highlight=False, soft_wrap=True)


def collect_results(
    experiment: Experiment, request: PaperRequest, workshop: Workshop, runs: Sequence[Planned]
) -> dict[str, Any]:
    """What the finished ones of the runs come to: rows, claims with verdicts, curves, and how it was obtained."""
    names, curves = list_measures(experiment), choose_curves(list_measures(experiment))
    values: dict[str, dict[int, dict[str, float | None]]] = {}
    drawn: dict[str, dict[str, Any]] = {}
    finished = [planned for planned in runs if is_finished(workshop.open_run(planned))]
    found = [read_run(workshop.folder / planned.cell.run) for planned in finished]
    for planned, run in zip(finished, found, strict=True):
        values.setdefault(planned.cell.note, {})[planned.cell.seed] = measure_run(run, names)
        if curves:
            drawn.setdefault(planned.cell.note, {})[str(planned.cell.seed)] = read_curves(run, curves)
    return {
        "name": request.name,
        "size": request.size,
        "command": request.command,
        "version": __version__,
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "seeds": sorted({planned.cell.seed for planned in finished}),
        "missing": [planned.label for planned in runs if planned not in finished],
        "cost": sum_cost(workshop.folder, found),
        "changes": dict(request.changes),
        "title": experiment.title,
        "paper": experiment.paper,
        "where": experiment.where,
        "reduced": experiment.reduced if request.size == "small" else "",
        "notes": experiment.notes,
        "explanations": experiment.explanations,
        "measures": experiment.measures,
        "rows": summarize_rows(experiment.papers, names, values),
        "claims": [judge(claim, values) for claim in experiment.claims],
        "curves": drawn,
    }


def sum_cost(folder: Path, runs: Sequence[Run]) -> dict[str, float | int | None]:
    """What the runs took: hours by the clock and of cores, and the memory of the largest process."""
    usage = sum_usage(folder, [run.folder for run in runs])
    tasks = [run.summary["time"]["tasks"] for run in runs]
    return {
        "hours": round(sum(run.summary["seconds"] for run in runs) / 3600, 5),
        "core_hours": round(usage.cpu_s / 3600, 5) if usage else None,
        "client_core_hours": round(sum(each["cpu"] for each in tasks) / 3600, 5),
        "peak_bytes": usage.peak_bytes
        if usage
        else max((each["peak_bytes"] or 0 for each in tasks), default=0) or None,
    }
