"""`fedrpc run` and `fedrpc compare`: local runs of one method or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

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
    collect_options,
    console,
    merge_values,
    read_layers,
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


@add_run_options
def compare(
    methods: Annotated[str, typer.Option(help="The methods, separated by commas; see `fedrpc list methods`.")],
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any setting, such as --set train.lr=0.1. A parameter params.NAME goes to every method that has it, "
            "METHOD.params.NAME to that method only.",
        ),
    ] = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="Holds a run directory for each; runs/compare-<dataset>-<hash> when not given.")
    ] = None,
    baseline: Annotated[bool, typer.Option(help="Add FedAvg to the methods.")] = True,
    hosts: Hosts = None,
    strict: Strict = False,
    log_level: LogLevel = "warning",
    log_format: LogFormat = "text",
    **options: Any,
) -> None:
    """Run several methods on the same partition, from the same initial model, with the same cohorts, and compare them.

    They run one after the other, each in a run directory of its own under --out; a failure does not stop the others.

    The same command again skips finished runs and resumes the rest.

    The table's values, and plots of them, are in compare.json and compare.html.
    """
    announce("compare", f"a comparison of {methods}")
    from fedrpc.launch.compare import Request, compare_local

    request = Request(methods, baseline, read_layers(options), collect_options(options), set_ or [])
    compare_local(request, out, data_dir, log_level, console, hosts, strict=strict)
