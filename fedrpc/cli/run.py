"""`fedrpc run`: a local run of one method."""

from __future__ import annotations

from typing import Any

from fedrpc import config
from fedrpc.cli.options import (
    DataDir,
    Hosts,
    LogFormat,
    LogLevel,
    Method,
    Out,
    Strict,
    add_run_options,
    announce,
    console,
    merge_values,
)


@add_run_options
def run(
    method: Method = None,
    *,
    data_dir: DataDir = None,
    out: Out = None,
    hosts: Hosts = None,
    strict: Strict = False,
    log_level: LogLevel = "warning",
    log_format: LogFormat = "text",
    **options: Any,
) -> None:
    """Run one method: a server and all its clients as processes on this machine.

    The same command again resumes a run that was stopped.
    """
    announce("run", method or "a run")
    settings = config.build(merge_values(options | {"method": method}))
    from fedrpc.launch.local import run_local

    run_local(settings, out, data_dir, log_level, console, hosts, strict=strict)
