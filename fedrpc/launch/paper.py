"""Runs an experiment of a paper with every seed, and has it judged."""

from __future__ import annotations

import contextlib
import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from fedrpc import __version__
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.launch.compare import SomeFailed, create_folder, run_and_show
from fedrpc.launch.jobs import Interrupted, Workshop, choose_jobs, is_finished
from fedrpc.launch.plan import Planned, parse_seeds, read_params, refuse_unknown
from fedrpc.launch.studies import study_finished
from fedrpc.launch.usage import sum_usage
from fedrpc.registry import METHODS
from fedrpc.report.paper_table import RESULTS_FILE, show_results, write_results
from fedrpc.report.paper_words import describe_changes
from fedrpc.study.cells import Cell
from fedrpc.study.experiment import (
    Experiment,
    Row,
    judge,
    list_measures,
    measure_run,
    name_folder,
    read_experiment,
    summarize_rows,
)
from fedrpc.study.experiment_curves import choose_curves, read_curves
from fedrpc.study.experiment_union import format_seeds
from fedrpc.study.reading import Run, read_run

# What a generator does not depend on. Changes of these do not apply to a row whose generator others take: its run has
# the same configuration with any of them, so that a finished one can be copied into the folder of another call.
_OF_THE_CLASSIFIER = ("model", "rounds")
_OF_ITS_TRAINING = frozenset(
    ["optimizer", "lr", "momentum", "weight_decay", "lr_decay", "lr_decay_every", "lr_min", "epochs", "batch_size"]
)


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
    return [_plan_run(experiment, request, row, seed, folder) for seed in parse_seeds(request.seeds) for row in rows]


def _plan_run(experiment: Experiment, request: PaperRequest, row: Row, seed: int, folder: Path) -> Planned:
    changes = _choose_changes(request.changes, row, seed, folder)
    config = experiment.build_config(row, seed, request.size, changes)  # raises for any value that is wrong
    if row.name in {other.gan for other in experiment.rows}:
        config = experiment.build_config(row, seed, request.size, _choose_generators(changes))
    cell = Cell(row.method, seed, _name_run(row.name, seed), note=row.name)
    return Planned(cell, config, f"{row.name}, seed {seed}", after=_name_run(row.gan, seed) if row.gan else None)


def _choose_rows(experiment: Experiment, request: PaperRequest) -> list[Row]:
    """The rows that are asked for, in the experiment's order, with those whose generators they take."""
    known = {row.name: row for row in experiment.rows}
    if unknown := [name for name in request.rows if name not in known]:
        raise UnknownName("row", unknown[0], known)
    names = request.rows or experiment.list_usual_rows(request.size)
    taken = {known[name].gan for name in names}
    return [row for row in experiment.rows if row.name in names or row.name in taken]


def _name_run(row: str, seed: int) -> Path:
    return Path(f"{name_folder(row)}-seed={seed}")


def _choose_changes(changes: Mapping[str, Any], row: Row, seed: int, folder: Path) -> dict[str, Any]:
    """The changes that are for a row: parameters that its method has, and the generator that it takes."""
    known = METHODS[row.method].Params.model_fields
    params = {name: value for name, value in read_params(changes, "").items() if name in known}
    if row.gan is not None:
        params["gan"] = str(folder / _name_run(row.gan, seed))
    return {**changes, "params": params}


def _choose_generators(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes on which a generator depends."""
    left = {name: value for name, value in changes.items() if name not in _OF_THE_CLASSIFIER}
    if "train" in left:
        left["train"] = {name: value for name, value in left["train"].items() if name not in _OF_ITS_TRAINING}
    return left


def _list_unchanged(experiment: Experiment, request: PaperRequest) -> list[str]:
    """The rows to which some of the changes do not apply, since others take their generators."""
    if _choose_generators(request.changes) == request.changes:
        return []
    givers = {row.gan for row in experiment.rows}
    return [row.name for row in experiment.rows if row.name in givers]


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
    refuse_folder(where, request)
    folder = where if show else create_folder(where)
    workshop = Workshop(folder, data_dir, log_level, num_hosts, jobs or choose_jobs(len(runs)))

    def tell() -> None:
        further = find_further_runs(experiment, request, workshop, runs)
        wide = widen_request(experiment, request, runs, further)
        results = collect_results(experiment, wide, workshop, runs, further)
        if not results["seeds"]:
            console.print(f"no run in {folder} is finished", highlight=False, soft_wrap=True)
            return
        write_results(folder, results)
        show_results(results, console)
        console.print(f"results: {folder / RESULTS_FILE}", highlight=False, soft_wrap=True)

    if show:
        tell()
        return
    try:
        failures = run_and_show(runs, workshop, console)
        if experiment.study:
            failed = {failure.cell.run for failure in failures}
            study_runs(experiment, request, workshop, [run for run in runs if run.cell.run not in failed], console)
    except Interrupted:
        tell()
        raise
    tell()
    if failures:
        raise SomeFailed(failures, len(runs), "run")


def refuse_folder(folder: Path, request: PaperRequest) -> None:
    """Raises ConfigError if a folder has runs of another experiment, or of this one with other settings."""
    try:
        found = json.loads((folder / RESULTS_FILE).read_bytes())
        told = (str(found["name"]), str(found["size"]), dict(found["changes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return  # nothing is known of it; each run is held against its own folder
    asked = (request.name, request.size, dict(request.changes))
    if told != asked and any(folder.glob("*-seed=*")):
        raise ConfigError(
            f"{folder} has results of {_describe_kind(*told)}, not of {_describe_kind(*asked)}; "
            "give the same settings, or another --out"
        )


def _describe_kind(name: str, size: str, changes: Mapping[str, Any]) -> str:
    told = f"{name}, small" if size == "small" else f"{name} at the paper's size"
    return f"{told}, with {describe_changes(changes)}" if changes else told


def find_further_runs(
    experiment: Experiment, request: PaperRequest, workshop: Workshop, runs: Sequence[Planned]
) -> list[Planned]:
    """The finished runs that the folder has of other rows or seeds, from earlier commands."""
    asked = {run.cell.run for run in runs}
    further = []
    for row in experiment.rows:
        for path in sorted(workshop.folder.glob(f"{name_folder(row.name)}-seed=*")):
            seed = path.name.rpartition("=")[2]
            if Path(path.name) in asked or not seed.isdecimal():
                continue
            with contextlib.suppress(ConfigError):  # with these changes there is no such run
                run = _plan_run(experiment, request, row, int(seed), workshop.folder)
                further += [run] if is_finished(workshop.open_run(run)) else []
    return further


def widen_request(
    experiment: Experiment, request: PaperRequest, runs: Sequence[Planned], further: Sequence[Planned]
) -> PaperRequest:
    """The request for all runs that are told of: as it was given, unless earlier commands ran more."""
    if not further:
        return request
    told = {run.cell.note for run in (*runs, *further)}
    seeds = sorted({run.cell.seed for run in (*runs, *further)})
    rows = [row.name for row in experiment.rows if row.name in told]
    return replace(
        request, seeds=format_seeds(seeds), rows=[] if rows == experiment.list_usual_rows(request.size) else rows
    )


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
    experiment: Experiment,
    request: PaperRequest,
    workshop: Workshop,
    runs: Sequence[Planned],
    further: Sequence[Planned] = (),
) -> dict[str, Any]:
    """What the finished ones of the runs come to: rows, claims with verdicts, curves, and how it was obtained.

    Args:
        further: Finished runs of earlier commands.
    """
    names, curves = list_measures(experiment), choose_curves(list_measures(experiment))
    values: dict[str, dict[int, dict[str, float | None]]] = {}
    drawn: dict[str, dict[str, Any]] = {}
    ranks = {row.name: rank for rank, row in enumerate(experiment.rows)}
    finished = [*further, *(planned for planned in runs if is_finished(workshop.open_run(planned)))]
    finished.sort(key=lambda planned: (planned.cell.seed, ranks[planned.cell.note]))
    found = [read_run(workshop.folder / planned.cell.run) for planned in finished]
    for planned, run in zip(finished, found, strict=True):
        values.setdefault(planned.cell.note, {})[planned.cell.seed] = measure_run(run, names)
        if curves:
            drawn.setdefault(planned.cell.note, {})[str(planned.cell.seed)] = read_curves(run, curves)
    return {
        "name": request.name,
        "size": request.size,
        "command": request.command,
        "version": " and ".join(sorted({describe_version(run.summary) for run in found})) or __version__,
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "seeds": sorted({planned.cell.seed for planned in finished}),
        "missing": [planned.label for planned in runs if planned not in finished],
        "cost": sum_cost(workshop.folder, found),
        "changes": dict(request.changes),
        "unchanged": _list_unchanged(experiment, request),
        "title": experiment.title,
        "paper": experiment.paper,
        "where": experiment.where,
        "reduced": experiment.reduced if request.size == "small" else "",
        "notes": experiment.notes,
        "explanations": experiment.explanations,
        "measures": experiment.measures,
        "methods": experiment.methods,
        "rows": summarize_rows(experiment.papers, names, values),
        "claims": [judge(claim, values) for claim in experiment.claims],
        "curves": drawn,
    }


def describe_version(summary: Mapping[str, Any]) -> str:
    """The version that played a run, with its commit where that is known."""
    commit = summary.get("commit")
    return f"{summary['version']} ({commit})" if commit else str(summary["version"])


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
