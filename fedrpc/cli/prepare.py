"""Prepares a data set with a progress bar, and says where it is and how to use it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from fedrpc.data import datasets
from fedrpc.data.prepare import prepare
from fedrpc.report.table import format_size


def prepare_with_progress(name: str, data_dir: Path | None, source: Path | None, console: Console) -> None:
    """Makes a data set's folder, with a bar for each step.

    Args:
        data_dir: Where data sets are; None for the folder that FEDRPC_DATA names.
        source: The publisher's files, if they are downloaded already.
    """
    folder = datasets.find_data_dir(data_dir)
    with show_progress(name, console) as progress:
        target = prepare(name, folder, source, progress)
    console.print(Text(_describe_result(name, folder, target)), soft_wrap=True)


@contextmanager
def show_progress(what: str, console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function of step, done and total that shows a bar for each step; none when nothing takes long."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    tasks: dict[str, TaskID] = {}

    def show(step: str, done: int, total: int) -> None:
        bar.start()
        if step not in tasks:
            tasks[step] = bar.add_task(f"{what}: {step}", total=total)
        bar.update(tasks[step], completed=done, total=total)

    try:
        yield show
    finally:
        if tasks:
            bar.stop()


def _environment_folder() -> Path | None:
    return Path(os.environ["FEDRPC_DATA"]).expanduser() if os.environ.get("FEDRPC_DATA") else None


def _describe_result(name: str, folder: Path, target: Path) -> str:
    if target.parent == datasets.EMBEDDED:
        return f"{name} comes with fedrpc: there is nothing to prepare and nothing to set."
    where = f"{name} is in {target} ({format_size(sum(path.stat().st_size for path in target.iterdir()))})."
    known = _environment_folder()
    if known and known.resolve() == folder.resolve():
        return f"{where} FEDRPC_DATA names that folder already: use it with --dataset {name}."
    return f"{where} Use it with --dataset {name} --data-dir {folder}, or set FEDRPC_DATA={folder.resolve()}."
