"""Runs several methods in the same setting, with every seed and at every point of a grid, and has them compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedrpc.errors import ConfigError, FedrpcError
from fedrpc.launch.comparison_progress import LiveDisplay, LogDisplay
from fedrpc.launch.jobs import Interrupted, Workshop, choose_jobs, run_cells
from fedrpc.launch.plan import Plan, Request, plan_runs
from fedrpc.report.comparison import show_comparison
from fedrpc.report.formula import require_formulas
from fedrpc.report.words import pluralize
from fedrpc.study.cells import Failure
from fedrpc.study.comparison import NO_GOALS, Goals
from fedrpc.study.comparison_reading import read_comparison, read_folders


class SomeFailed(FedrpcError):
    """The comparison is done, but some of its runs failed."""

    def __init__(self, failures: Sequence[Failure], count: int, what: str = "method") -> None:
        rows = ", ".join(dict.fromkeys(failure.cell.row for failure in failures))
        super().__init__(f"{len(failures)} of {pluralize(count, what)} failed: {rows}")
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
) -> None:
    """Starts or resumes every run that is not finished, each in a folder of its own, and shows the comparison.

    Args:
        jobs: How many runs are under way at a time; by the number of cores when None.
        goals: What to read off the curves; the byte budget is the plan's.
        strict: Whether bytes that differ from a method's formula are an error.
        figures: Whether to draw figures for papers.

    Raises:
        SomeFailed: At the end, if a run failed; the others are run and shown all the same. Not for a method that was
            refused, if it was not named but is one of all.
        MethodFailed: At the end, if `strict` and the bytes of a run differ from its method's formula.
        Interrupted: By a signal; it says where.
    """
    plan = plan_runs(request)
    folder = _create_folder(out or plan.default_out)
    workshop = Workshop(folder, data_dir, log_level, num_hosts, jobs or choose_jobs(len(plan.runs)))
    failures = _run(plan, workshop, console)
    goals = replace(goals, byte_budget=plan.base.limits.byte_budget)
    found = read_comparison(folder, [planned.cell for planned in plan.runs], failures, goals)
    show_comparison(found, console, figures=figures)
    failed = [failure for failure in found.failures if not (failure.refused and failure.cell.method in plan.unnamed)]
    if failed:
        raise SomeFailed(failed, len(plan.runs), "run" if plan.has_several_runs else "method")
    if strict:
        require_formulas(run.folder for _, run in found.runs)


def _run(plan: Plan, workshop: Workshop, console: Console) -> list[Failure]:
    if console.is_terminal:
        together = f", {workshop.jobs} at a time" if workshop.jobs > 1 else ""
        console.print(f"{pluralize(len(plan.runs), 'run')} in {workshop.folder}{together}", highlight=False)
    display = LiveDisplay(console, plan.runs) if console.is_terminal else LogDisplay(plan.runs)
    try:
        return run_cells(plan.runs, workshop, display)
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


def _create_folder(folder: Path) -> Path:
    if (folder / "config.toml").exists():
        raise ConfigError(f"{folder} holds a single run; a comparison needs a folder of its own: choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}; choose another --out") from None
    return folder
