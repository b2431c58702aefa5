"""One local run as a person sees it: progress while it goes on, the table at the end."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich.console import Console

from fedrpc import log
from fedrpc.config import RunConfig
from fedrpc.launch import Launcher, LocalRun
from fedrpc.progress import LiveWatcher, LogWatcher
from fedrpc.report.table import render


def run_local(config: RunConfig, out: Path, data_dir: Path | None, log_level: str, console: Console) -> None:
    """Runs, or goes on, or says that all is done already; then prints the table."""
    if not config.parallel:
        config = config.model_copy(update={"parallel": os.cpu_count() or 1})
    log.set_up("info", role="run")
    watcher = LiveWatcher(console, config.rounds) if console.is_terminal else LogWatcher()
    Launcher(LocalRun(config, out, data_dir, log_level), watcher).run()
    render(json.loads((out / "summary.json").read_text()), console)
    console.print(f"run directory: {out}")
