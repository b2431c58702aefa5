"""Runs several methods in the same setting, with every seed and at every point of a grid, and has them compared."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedrpc.errors import ConfigError, FedrpcError
from fedrpc.launch.comparison_progress import LiveDisplay, LogDisplay
from fedrpc.launch.jobs import Interrupted, Workshop, choose_jobs, run_cells
from fedrpc.launch.plan import Plan, Planned, Request, plan_runs
from fedrpc.report.comparison import show_comparison
from fedrpc.report.formula import require_formulas
from fedrpc.report.words import pluralize
from fedrpc.study.cells import Failure
from fedrpc.study.comparison import NO_GOALS, Comparison, Goals
from fedrpc.study.comparison_reading import read_comparison, read_folders


class SomeFailed(FedrpcError):
    """The comparison is done, but some of its runs failed."""

    def __init__(self, failures: Sequence[Failure], count: int, what: str = "method") -> None:
        rows = dict.fromkeys(failure.cell.row for failure in failures)
        told = ("; " if any(", " in row for row in rows) else ", ").join(rows)
        super().__init__(f"{len(failures)} of {pluralize(count, what)} failed: {told}")
        self.exit_code = failures[0].exit_code


def compare_local(
    request: Request,
    out: Path | None,
    data_dir: Path | None,
    log_level: str,
    console: Console,
    num_hosts: int | None = None,
    *,
    jobs: int | None = None,
    goals: Goals = NO_GOALS,
    strict: bool = False,
    figures: bool = False,
    allows_changed_code: bool = False,
    ui: bool = False,
    trackers: Sequence[str] = (),
) -> None:
    """Starts or resumes every run that is not finished, each in a folder of its own, and shows the comparison.

    Args:
        jobs: How many runs are under way at a time; by the number of cores when None.
        goals: What to read off the curves; the byte budget is the plan's.
        strict: Whether bytes that differ from a method's formula are an error.
        figures: Whether to draw figures for papers.
        allows_changed_code: Whether runs go on although the user's own code was changed since they began.
        ui: Whether to show a live page meanwhile.
        trackers: What else is told of every run.

    Raises:
        SomeFailed: At the end, if a run failed; the others are run and shown all the same. Not for a method that was
            refused, if it was not named but is one of all.
        MethodFailed: At the end, if `strict` and the bytes of a run differ from its method's formula.
        Interrupted: By a signal; it says where.
    """
    plan = plan_runs(request)
    workshop = open_workshop(plan, out, data_dir, log_level, num_hosts, jobs, allows_changed_code, trackers)
    with contextlib.ExitStack() as stack:
        if ui:
            from fedrpc.ui.serve import watching  # here, since other comparisons need no web server

            stack.enter_context(watching(workshop.folder, console, is_run=False))
        failures = run_and_show(plan.runs, workshop, console)
        found = read_planned(plan, workshop.folder, failures, goals)
        show_comparison(found, console, figures=figures)
    if failed := find_failed(plan, found):
        raise failed
    if strict:
        require_formulas(run.folder for _, run in found.runs)


def open_workshop(
    plan: Plan,
    out: Path | None,
    data_dir: Path | None,
    log_level: str,
    num_hosts: int | None = None,
    jobs: int | None = None,
    allows_changed_code: bool = False,
    trackers: Sequence[str] = (),
) -> Workshop:
    """Creates the folder of a comparison, and says how its runs are run there."""
    folder = create_folder(out or plan.default_out)
    jobs = jobs or choose_jobs(len(plan.runs))
    return Workshop(folder, data_dir, log_level, num_hosts, jobs, allows_changed_code, trackers)


def read_planned(plan: Plan, folder: Path, failures: Sequence[Failure], goals: Goals) -> Comparison:
    """Reads the runs of a plan once they are over."""
    goals = replace(goals, byte_budget=plan.base.limits.byte_budget)
    return read_comparison(folder, [planned.cell for planned in plan.runs], failures, goals)


def find_failed(plan: Plan, found: Comparison) -> SomeFailed | None:
    """The error of a comparison in which a run failed; a method that was refused counts if it was named."""
    failed = [failure for failure in found.failures if not (failure.refused and failure.cell.method in plan.unnamed)]
    return SomeFailed(failed, len(plan.runs), "run" if plan.has_several_runs else "method") if failed else None


def run_and_show(runs: Sequence[Planned], workshop: Workshop, console: Console) -> list[Failure]:
    """Runs every cell that is not finished yet, and shows the progress."""
    if console.is_terminal:
        together = f", {workshop.jobs} at a time" if workshop.jobs > 1 else ""
        console.print(f"{pluralize(len(runs), 'run')} in {workshop.folder}{together}", highlight=False)
    jobs = workshop.jobs
    display = LiveDisplay(console, runs, jobs) if console.is_terminal else LogDisplay(runs, jobs)
    try:
        return run_cells(runs, workshop, display)
    except Interrupted as stopped:
        display.close()
        console.print(Text(stopped.place), soft_wrap=True)
        raise
    finally:
        display.close()


def compare_folders(
    folders: Sequence[Path],
    out: Path | None,
    console: Console,
    goals: Goals,
    *,
    strict: bool = False,
    figures: bool = False,
) -> None:
    """Shows finished runs of any folders side by side, and writes the comparison if there is a folder for it.

    Raises:
        ConfigError: There are fewer than two.
        SomeFailed: At the end, if a folder has no finished run.
    """
    if figures and out is None:
        raise ConfigError("--figures needs a folder to draw into; add --out DIR")
    found = read_folders(folders, out or Path(), goals)
    if len(found.runs) + len(found.failures) < 2:
        raise ConfigError("a comparison needs two runs or more; `fedrpc report DIR` shows a single one")
    show_comparison(found, console, write=out is not None, figures=figures)
    if found.failures:
        raise SomeFailed(found.failures, len(found.runs) + len(found.failures), "run")
    if strict:
        require_formulas(run.folder for _, run in found.runs)


def create_folder(folder: Path) -> Path:
    """Makes the folder of several runs; raises ConfigError where there cannot be one."""
    if (folder / "config.toml").exists():
        raise ConfigError(f"{folder} holds a single run; a comparison needs a folder of its own: choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}; choose another --out") from None
    return folder
