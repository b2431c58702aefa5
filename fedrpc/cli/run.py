"""`fedrpc run`: a local run of one method."""

from __future__ import annotations

from typing import Any

from fedrpc import config
from fedrpc.cli.options import (
    AllowChangedCode,
    DataDir,
    Hosts,
    LogFormat,
    LogLevel,
    Method,
    MetricsListen,
    Out,
    Strict,
    Tracker,
    Ui,
    add_run_options,
    announce,
    console,
)
from fedrpc.errors import ConfigError
from fedrpc.launch.values import merge_values
from fedrpc.tracking import check_trackers


@add_run_options
def run(
    method: Method = None,
    *,
    data_dir: DataDir = None,
    out: Out = None,
    hosts: Hosts = None,
    strict: Strict = False,
    allow_changed_code: AllowChangedCode = False,
    ui: Ui = False,
    tracker: Tracker = None,
    metrics_listen: MetricsListen = None,
    log_level: LogLevel = "warning",
    log_format: LogFormat = "text",
    **options: Any,
) -> None:
    """Run one method: a server and all its clients as processes on this machine.

    The same command again resumes a run that was stopped. `fedrpc list settings` has the defaults.
    """
    announce("run", method or "a run")
    settings = config.build(merge_values(options | {"method": method}))
    check_trackers(tracker or ())
    if metrics_listen and settings.shaper == "tun":
        raise ConfigError(
            "--metrics-listen: with --shaper tun the server is in a network of its own; use another shaper"
        )
    from fedrpc.launch.local import run_local

    how: dict[str, Any] = {"strict": strict, "allows_changed_code": allow_changed_code, "ui": ui}
    how |= {"trackers": tracker or (), "metrics_listen": metrics_listen}
    run_local(settings, out, data_dir, log_level, console, hosts, **how)
