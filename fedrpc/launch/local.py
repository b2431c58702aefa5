"""One local run as a person sees it: progress while it goes on, the table and the page at the end."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from fedrpc import log
from fedrpc.config import RunConfig
from fedrpc.launch.launcher import Launcher, LocalRun
from fedrpc.launch.progress import LiveWatcher, LogWatcher
from fedrpc.report.page import show_runs


def run_local(config: RunConfig, out: Path, data_dir: Path | None, log_level: str, console: Console) -> None:
    """Runs, or goes on, or says that all is done already; then prints the table and writes the page."""
    if not config.parallel:
        config = config.model_copy(update={"parallel": os.cpu_count() or 1})
    log.set_up("info", role="run")
    watcher = LiveWatcher(console, config.rounds) if console.is_terminal else LogWatcher()
    Launcher(LocalRun(config, out, data_dir, log_level), watcher).run()
    show_runs([out], console)
