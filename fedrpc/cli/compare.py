"""`fedrpc compare`: local runs of several methods, or finished runs of any folders, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedrpc import config
from fedrpc.cli import complete
from fedrpc.cli.options import (
    AllowChangedCode,
    DataDir,
    Hosts,
    LogFormat,
    LogLevel,
    Strict,
    Tracker,
    Ui,
    add_run_options,
    announce,
    console,
)
from fedrpc.errors import ConfigError
from fedrpc.launch.values import collect_options, read_layers, read_methods
from fedrpc.tracking import check_trackers

Folders = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[DIR...]",
        autocompletion=complete.complete_run,
        help="Finished runs or comparisons to hold side by side; nothing is run.",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        autocompletion=complete.complete_methods,
        help="The methods, separated by commas, or all; see `fedrpc list methods`. May be repeated. Some recipes, such "
        "as demo, name methods themselves.",
    ),
]
Seeds = Annotated[str | None, typer.Option(help='Run every method with each of these seeds: "0-4", "0,3,7".')]
Grid = Annotated[
    list[str] | None,
    typer.Option(
        autocompletion=complete.complete_setting,
        help="Run with each of these values of a setting: params.mu=0.1,1, partition.alpha=0.1,1, "
        "METHOD.params.NAME=... Repeated, every combination is run.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Runs at a time, one per four cores when not given. They share cores: time with 1."),
]
Target = Annotated[
    list[float] | None,
    typer.Option(help="An accuracy in percent: show the rounds, bytes and seconds to reach it. May be repeated."),
]
Whatif = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete.complete_link,
        help="Predict the time over this link, as `fedrpc whatif` does; with --link the runs really take that long.",
    ),
]
SetForSome = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        autocompletion=complete.complete_setting,
        help="Any setting, such as --set train.lr=0.1. A parameter params.NAME goes to every method that has it, "
        "METHOD.params.NAME to that method only.",
    ),
]
OutFolder = Annotated[
    Path | None, typer.Option(help="The folder of all run directories; runs/compare-<dataset>-<hash> when not given.")
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
    allow_changed_code: AllowChangedCode = False,
    ui: Ui = False,
    figures: Figures = False,
    tracker: Tracker = None,
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
    check_trackers(tracker or ())
    announce("compare", f"a comparison of {', '.join(map(str, folders or methods))}")
    from fedrpc.launch.compare import compare_folders, compare_local
    from fedrpc.launch.plan import Request
    from fedrpc.study.comparison import Goals

    if whatif:
        from fedrpc.emulation.conditions import check_links

        check_links(whatif)
    values: dict[str, Any] = collect_options(options)
    shown: dict[str, Any] = {"strict": strict, "figures": figures}
    if folders:
        goals = Goals(target or (), config.build(values).limits.byte_budget, whatif)
        return compare_folders(folders, out, console, goals, **shown)
    request = Request(methods, baseline, layers, values, set_ or [], seeds or "", grid or [])
    goals = Goals(target or (), link=whatif)
    how: dict[str, Any] = {"jobs": jobs, "goals": goals, "ui": ui, "allows_changed_code": allow_changed_code}
    how["trackers"] = tracker or ()
    compare_local(request, out, data_dir, log_level, console, hosts, **how, **shown)
