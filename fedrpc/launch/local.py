"""Runs one method locally: shows progress while it runs, and its table and page at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedrpc.config import RunConfig, default_run_dir
from fedrpc.launch.launcher import Launcher, LocalRun, Watcher
from fedrpc.launch.progress import LiveWatcher, LogWatcher, describe_place
from fedrpc.launch.trackers import tracking
from fedrpc.process import Stopped


def open_run(
    config: RunConfig,
    out: Path | None,
    data_dir: Path | None,
    log_level: str,
    num_hosts: int | None = None,
    allows_changed_code: bool = False,
    metrics_listen: str | None = None,
) -> LocalRun:
    """A run on this machine, in the default run directory unless it says otherwise."""
    out = out or default_run_dir(config)
    return LocalRun(config, out, data_dir, log_level, num_hosts, allows_changed_code, metrics_listen)


def run_local(
    config: RunConfig,
    out: Path | None,
    data_dir: Path | None,
    log_level: str,
    console: Console,
    num_hosts: int | None = None,
    *,
    strict: bool = False,
    allows_changed_code: bool = False,
    ui: bool = False,
    trackers: Sequence[str] = (),
    metrics_listen: str | None = None,
) -> None:
    """Starts or resumes a run, unless it is finished already; then prints its table and writes its page.

    Args:
        strict: Raise MethodFailed at the end when the measured bytes differ from the method's formula.
        allows_changed_code: Whether it goes on although the user's own code was changed since it began.
        ui: Show a live page while it runs.
        trackers: What else is told of the run: "tensorboard", "mlflow:URI", ...
        metrics_listen: Where the server serves metrics for Prometheus.
    """
    run = open_run(config, out, data_dir, log_level, num_hosts, allows_changed_code, metrics_listen)
    watcher = LiveWatcher(console, config.rounds) if console.is_terminal else LogWatcher(config.rounds)
    with contextlib.ExitStack() as stack:
        if ui:
            from fedrpc.ui.serve import watching  # here, since other runs need no web server

            stack.enter_context(watching(run.out, console, is_run=True))
        stack.enter_context(tracking(trackers, run.out))
        _run(run, watcher, console)
        _show(run.out, console, strict=strict)


def _run(run: LocalRun, watcher: Watcher, console: Console) -> None:
    try:
        Launcher(run, watcher).run()
    except (KeyboardInterrupt, Stopped):
        from fedrpc.server.checkpoint import count_durable_rounds  # here, since it imports torch

        # By the checkpoint, not by events: that of a round comes later, when it is evaluated beside the next one.
        done = min(count_durable_rounds(run.out / "checkpoints"), run.config.rounds)
        place = describe_place(done, run.config.rounds)
        console.print(Text(f"stopped {place}; the same command again goes on from there ({run.out})"), soft_wrap=True)
        raise


def _show(out: Path, console: Console, *, strict: bool) -> None:
    from fedrpc.report.formula import require_formulas  # here, so that the run does not wait for its imports
    from fedrpc.report.page import show_runs

    show_runs([out], console)
    if strict:
        require_formulas([out])
