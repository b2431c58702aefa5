"""`fedrpc report`, `track`, `whatif`, `audit`, `privacy`, `synthetic` and `attack`: what is made of what runs left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedrpc import log
from fedrpc.cli.complete import complete_run, one_of
from fedrpc.cli.options import DataDir, FinishedRun, Link, LogFormat, Speed, Tracker, console
from fedrpc.cli.progress import StepDisplay
from fedrpc.errors import ConfigError


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", autocompletion=complete_run, help="Directories of finished runs or comparisons."
        ),
    ],
) -> None:
    """Show finished runs and comparisons again: print each one's table and write its page."""
    from fedrpc.report.comparison import show_finished

    show_finished(folders, console)


def track(
    run: Annotated[Path, typer.Argument(metavar="DIR", autocompletion=complete_run, help="A run directory.")],
    tracker: Tracker = None,
) -> None:
    """Log a run to trackers afterwards: the rounds that they lack, and its summary if it is finished."""
    from fedrpc.tracking.follow import track_run

    for spec in tracker or ():
        num_rounds = track_run(run, spec)
        console.print(f"{spec}: {num_rounds} rounds of {run}", highlight=False, soft_wrap=True)
    if not tracker:
        raise ConfigError("expected --tracker, such as --tracker tensorboard, got none")


def audit(run: FinishedRun) -> None:
    """Check a run's privacy rows against what it did, and recompute every epsilon with a second accountant.

    Finds rows that were changed or are missing, and rows that claim less than the configuration makes an answer cost.

    Exits with 1 when something is wrong; writes audit.json into the run directory.
    """
    from fedrpc.report.audit import show_audit
    from fedrpc.study.audit import audit_run

    found = audit_run(run)
    show_audit(run, found, console)
    if found.faults:
        raise typer.Exit(1)


def whatif(
    folder: FinishedRun,
    link: Link = None,
    speed: Speed = None,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Clients that compute at a time on one machine; the run's when not given.")
    ] = None,
    target: Annotated[list[float] | None, typer.Option(help="Also show the time to this accuracy, in percent.")] = None,
) -> None:
    """Predict how long a finished run takes over other links, without running it again.

    Replays its bytes and its measured computing on a virtual clock: as if each client had a machine of its own, and as
    if all shared this one.

    Without --link and --speed it takes the run's own, so that the prediction can be held against the measurement.
    """
    from fedrpc.emulation.conditions import assign_conditions
    from fedrpc.report.whatif import show_prediction
    from fedrpc.study.reading import read_run
    from fedrpc.study.whatif import read_conditions

    run = read_run(folder)
    conditions = read_conditions(run)
    if link or speed:
        conditions = assign_conditions(link, speed, len(conditions), int(run.summary["seed"]))
    show_prediction(run, conditions, console, cores, target or [])


def privacy(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            autocompletion=complete_run,
            help="A folder of clients' state (--state-dir), or a run directory.",
        ),
    ],
) -> None:
    """Show what clients have spent on their data in all their runs, and what their own limits leave them."""
    from fedrpc.report.spending import show_spending
    from fedrpc.study.spending import collect_spending

    show_spending(collect_spending(folder), console)


def synthetic(
    folder: FinishedRun,
    per_class: Annotated[int, typer.Option(min=1, help="Number of inputs made of each class.")] = 64,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Iterations of the inversion; the run's own when not given.")
    ] = None,
    oracle_epochs: Annotated[int, typer.Option(min=1, help="Epochs of training of the oracle.")] = 5,
    data_dir: DataDir = None,
) -> None:
    """Make inputs from a finished run's model alone, and evaluate them with an oracle trained on all the data.

    By class: how often the oracle sees the wanted class, beside the model's own accuracy on real test data.

    Writes synthetic.json and, for images, the contact sheet synthetic.png into DIR.

    If the method generates images itself (feddpms, mpgan), those are shown instead: generated.json says how close they
    come to training images and how far the oracle agrees with their labels, generated.png and progress.png show them.
    """
    from fedrpc.report.synthetic import show_synthetic
    from fedrpc.study.synthetic import study_synthetic

    show_synthetic(study_synthetic(folder, per_class, iterations, oracle_epochs, data_dir), console)


def attack(
    folder: FinishedRun,
    aux: Annotated[int, typer.Option(min=1, help="Number of auxiliary examples that the attacker has.")] = 4000,
    samples: Annotated[int, typer.Option(min=1, help="Rebuild and evaluate at most this many shared items.")] = 256,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of training of the attackers' networks.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same values.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A first look, with less data and fewer epochs.")] = False,
    device: Annotated[
        str,
        typer.Option(
            autocompletion=one_of("auto", "cpu", "cuda"),
            help="auto, cpu, cuda or cuda:N: give the one that the run's clients used.",
        ),
    ] = "auto",
    data_dir: DataDir = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Where clients that were started by hand kept their stores.")
    ] = None,
    log_format: LogFormat = "text",
) -> None:
    """Attack what a finished run has shared of clients' data: rebuild inputs from it, and detect a mark in it.

    Every value stands beside its controls; tables, pictures and a page are written into the run directory.

    An attack that fails is evidence, not a guarantee.
    """
    from fedrpc.report.attack import show_attack
    from fedrpc.study.attack import Request, attack_run

    log.set_up("info", role="attack")
    request = Request(folder, data_dir, state_dir, aux, samples, epochs, seed, device, quick)
    with StepDisplay(console, "attack") as display:
        found = attack_run(request, display.show)
    show_attack(folder, found.values, found.rebuilt, console)
