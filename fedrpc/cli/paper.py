"""`fedrpc paper`: experiments of the papers, with a verdict on each claim."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedrpc import config
from fedrpc.cli import complete
from fedrpc.cli.compare import Jobs
from fedrpc.cli.options import DataDir, Hosts, LogFormat, LogLevel, announce, console

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        autocompletion=complete.complete_experiment,
        help="The experiment; without one, all are listed.",
    ),
]
Small = Annotated[bool, typer.Option("--small", help="At a size for two cores; the table says what was reduced.")]
Seeds = Annotated[
    str, typer.Option(help='Run every row with each of these seeds: "0-2" (three of them), "0,3,7", "3" (that one).')
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a setting of all runs, such as --set rounds=3; params.NAME goes to every row whose method has it. "
        "A row whose generator others take keeps its model, rounds and the classifier's train.NAME. The results tell "
        "what was changed.",
    ),
]
Rows = Annotated[
    list[str] | None,
    typer.Option(
        "--row",
        help="Only this row of the table; repeat it for more. When none is given, all; in small, those that claims "
        "are about.",
    ),
]
Show = Annotated[bool, typer.Option("--show", help="Start nothing; show what the finished runs give so far.")]
Out = Annotated[
    Path | None, typer.Option(help="The folder of all run directories; runs/paper-NAME-SIZE when not given.")
]


def paper(
    name: Name = None,
    *,
    small: Small = False,
    seeds: Seeds = "0-2",
    set_: Changes = None,
    row: Rows = None,
    data_dir: DataDir = None,
    out: Out = None,
    show: Show = False,
    hosts: Hosts = None,
    jobs: Jobs = None,
    log_level: LogLevel = "warning",
    log_format: LogFormat = "text",
) -> None:
    """Run an experiment of a paper, and say which of its claims are reproduced.

    The paper's figures stand beside ours, as mean and deviation over the seeds, and each claim gets a verdict. It is
    reproduced if the mean difference is as claimed, by more than the margin that is asked, and its 95 % interval over
    three seeds or more excludes that margin, partly if only the mean is as claimed, else not.

    The same command again skips finished runs and resumes the rest. The folder's results.json has the results of all
    that are finished, also when others failed or were stopped.
    """
    if name is None:
        from fedrpc.cli.listing import list_experiments

        console.print(list_experiments())
        return
    announce("paper", f"the experiment {name}")
    from fedrpc.launch.paper import PaperRequest, run_experiment

    items = set_ or []
    request = PaperRequest(name, "small" if small else "paper", seeds, config.parse_set(items), items, row or ())
    run_experiment(request, out, data_dir, log_level, console, hosts, jobs=jobs, show=show)
