"""Shows how long a finished run takes over other links, beside how long it took."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedrpc.emulation.conditions import Conditions
from fedrpc.emulation.link import PRESETS, UNLIMITED
from fedrpc.report.words import format_duration, pluralize
from fedrpc.study.reading import Run
from fedrpc.study.whatif import PARTS, Prediction, count_cores, measure, predict, read_conditions

_MAX_HEAD = 20  # characters of a link's name that leave room for the other columns on a narrow terminal
_WORDS = {
    "queue": "waiting",
    "download": "download",
    "compute": "computing",
    "upload": "upload",
    "server": "the server",
}


def show_prediction(
    run: Run, conditions: Sequence[Conditions], console: Console, cores: int | None, targets: Sequence[float]
) -> None:
    """Prints a table of a round on average and of the whole run: as measured, and as predicted.

    Args:
        cores: How many clients compute at a time on this machine; the run's own number when None.
        targets: Accuracies in percent whose times are wanted.
    """
    cores = cores or count_cores(run)
    was = read_conditions(run)
    columns = {
        f"measured,\n{_shorten(describe_links(was))}": measure(run),
        "predicted, each\non its own machine": predict(run, conditions, cores=None),
        f"predicted, on\n{pluralize(cores, 'core')} here": predict(run, conditions, cores=cores),
    }
    console.print(Text(f"{run.title} over {describe_links(conditions)}", style="bold"))
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("", vertical="bottom")
    for name in columns:
        table.add_column(name, justify="right", vertical="bottom", no_wrap=True)
    times = list(columns.values())
    table.add_row("a round", *(format_duration(found.mean_round.seconds) for found in times), style="bold")
    for part in PARTS:
        table.add_row(f"  {_WORDS[part]}", *(format_duration(found.mean_round.parts[part]) for found in times))
    table.add_row("all rounds", *(format_duration(found.seconds) for found in times), style="bold")
    for target in targets:
        table.add_row(f"to {target:g} %", *(_describe_target(run, found, target) for found in times))
    console.print(table)
    console.print(
        Text(
            "Parts are those of the client that ends a question. Computing is as it was measured, divided by a "
            "client's speed; slow start, lost connections and clients that are away are not in it.",
            style="dim",
        )
    )


def _describe_target(run: Run, found: Prediction, target: float) -> str:
    reached = next((index for index, value in run.curve("accuracy") if value >= target), None)
    return "never reached" if reached is None else format_duration(found.until(reached))


def _shorten(links: str) -> str:
    return links if len(links) <= _MAX_HEAD else "on its own links"


def describe_links(conditions: Sequence[Conditions]) -> str:
    """The links of all clients in a few words."""
    links = list(dict.fromkeys(each.link for each in conditions))
    slower = "" if all(each.speed == 1 for each in conditions) else ", slower machines"
    if len(links) > 1:
        return f"{len(links)} kinds of links{slower}"
    names = {link: name for name, link in PRESETS.items()}
    return names.get(links[0] or UNLIMITED, str(links[0] or "loopback")) + slower
