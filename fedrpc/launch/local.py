"""Runs one method locally: shows progress while it runs, and its table and page at the end."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedrpc.config import RunConfig, default_run_dir
from fedrpc.launch.launcher import Launcher, LocalRun
from fedrpc.launch.progress import LiveWatcher, LogWatcher
from fedrpc.process import Stopped


def run_local(
    config: RunConfig,
    out: Path | None,
    data_dir: Path | None,
    log_level: str,
    console: Console,
    num_hosts: int | None = None,
    *,
    strict: bool = False,
) -> None:
    """Starts or resumes a run, unless it is finished already; then prints its table and writes its page.

    Args:
        strict: Raise MethodFailed at the end when the measured bytes differ from the method's formula.
    """
    out = out or default_run_dir(config)
    if not config.parallel:
        config = config.model_copy(update={"parallel": os.cpu_count() or 1})
    watcher = LiveWatcher(console, config.rounds) if console.is_terminal else LogWatcher(config.rounds)
    try:
        Launcher(LocalRun(config, out, data_dir, log_level, num_hosts), watcher).run()
    except (KeyboardInterrupt, Stopped):
        place = watcher.describe_place()
        console.print(Text(f"stopped {place}; the same command again goes on from there ({out})"), soft_wrap=True)
        raise
    from fedrpc.report.formula import require_formulas  # here, so that the run does not wait for its imports
    from fedrpc.report.page import show_runs

    show_runs([out], console)
    if strict:
        require_formulas([out])
