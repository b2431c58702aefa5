"""`fedrpc compare`: local runs of several methods, or finished runs of any folders, side by side."""

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
    Strict,
    add_run_options,
    announce,
    collect_options,
    console,
    read_layers,
    read_methods,
)
from fedrpc.errors import ConfigError

Folders = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[DIR...]", help="Finished runs or comparisons to hold side by side; nothing is run."),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        help="The methods, separated by commas, or all; see `fedrpc list methods`. Repeated, it adds up. A recipe of a "
        "comparison names some itself."
    ),
]
Seeds = Annotated[str | None, typer.Option(help='Run every method with each of these seeds: "0-4", "0,3,7".')]
Grid = Annotated[
    list[str] | None,
    typer.Option(
        help="Run with each of these values of a setting: params.mu=0.1,1, partition.alpha=0.1,1, "
        "METHOD.params.NAME=... Repeated, every combination is run."
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Runs at a time, which share the cores: use 1 to measure time. One per four cores."),
]
Target = Annotated[
    list[float] | None,
    typer.Option(help="An accuracy in percent: tell what it cost in rounds, bytes and seconds. May be repeated."),
]
Whatif = Annotated[
    str | None,
    typer.Option(
        help="Predict the time over this link, as `fedrpc whatif` does; --link has the runs themselves take that long."
    ),
]
SetForSome = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any setting, such as --set train.lr=0.1. A parameter params.NAME goes to every method that has it, "
        "METHOD.params.NAME to that method only.",
    ),
]
OutFolder = Annotated[
    Path | None, typer.Option(help="Holds a run directory for each; runs/compare-<dataset>-<hash> when not given.")
]
Baseline = Annotated[bool, typer.Option(help="Add FedAvg to the methods, on every network that they run on.")]
Figures = Annotated[bool, typer.Option("--figures", help="Draw figures for papers, as PDF and SVG.")]


@add_run_options
def compare(
    folders: Folders = None,
    *,
    methods: Methods = None,
    seeds: Seeds = None,
    grid: Grid = None,
    jobs: Jobs = None,
    target: Target = None,
    whatif: Whatif = None,
    set_: SetForSome = None,
    data_dir: DataDir = None,
    out: OutFolder = None,
    baseline: Baseline = True,
    hosts: Hosts = None,
    strict: Strict = False,
    figures: Figures = False,
    log_level: LogLevel = "warning",
    log_format: LogFormat = "text",
    **options: Any,
) -> None:
    """Run several methods on the same partition, from the same initial model, with the same cohorts, and compare them.

    With --seeds and --grid there is a run for each method, seed and point of the grid, each in a run directory of its
    own under --out; one that fails does not stop the others. Differences to FedAvg are paired by seed.

    The same command again skips finished runs and resumes the rest.

    `fedrpc compare DIR DIR ...` holds finished runs of any folders side by side instead.

    The values are in compare.json, compare.csv and compare.tex, plots of them in compare.html.
    """
    layers = read_layers(options)
    methods = methods or read_methods(layers)
    if bool(folders) == bool(methods):
        got = "both" if folders else "neither"
        raise ConfigError(f"expected --methods to run, or folders of finished runs to compare, got {got}")
    announce("compare", f"a comparison of {', '.join(map(str, folders or methods))}")
    from fedrpc.launch.compare import compare_folders, compare_local
    from fedrpc.launch.plan import Request
    from fedrpc.study.comparison import Goals

    if whatif:
        from fedrpc.emulation.conditions import check_links

        check_links(whatif)
    values, shown = collect_options(options), {"strict": strict, "figures": figures}
    if folders:
        goals = Goals(target or (), config.build(values).limits.byte_budget, whatif)
        return compare_folders(folders, out, console, goals, **shown)
    request = Request(methods, baseline, layers, values, set_ or [], seeds or "", grid or [])
    goals = Goals(target or (), link=whatif)
    compare_local(request, out, data_dir, log_level, console, hosts, jobs=jobs, goals=goals, **shown)
