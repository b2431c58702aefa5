"""Shows what clients have spent on their data in all their runs, and what their own limits leave them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedrpc.privacy.mechanisms import REPLACE_ONE
from fedrpc.privacy.statement import UNIT
from fedrpc.privacy.words import ACCOUNTANTS
from fedrpc.report.words import pluralize
from fedrpc.study.spending import AllSpending, Spending

MAX_SHOWN = 20
_WIDTHS = {"neighbours": len(REPLACE_ONE), "uncovered": len("uncovered")}  # at least
_ABOUT = (
    f"Every ε is for {UNIT}, over all its runs on the data set, at the δ and for the neighbours of its row (costs for "
    f"different neighbours are not added up); by {ACCOUNTANTS['rdp']}, or the {ACCOUNTANTS['gdp']} where nothing was "
    "sampled; second: by dp-accounting; Poisson sampling of batches, assuming that nobody sees the samples; trust "
    "model: local, noise added at each client; noise: no protection against anyone who knows the seed, if it had one."
)


def show_spending(all_: AllSpending, console: Console) -> None:
    """Prints a table of the clients that gave away most, and how many more there are."""
    if not all_.found:
        there = f"{all_.folder}: {pluralize(all_.num_clients, 'client')}"
        console.print(f"{there}, and nothing that depends on data has left yet", highlight=False)
        return
    shown = all_.found[:MAX_SHOWN]
    console.print(_tabulate(shown))
    console.print(_ABOUT, highlight=False)
    if len(shown) < len(all_.found):
        rest = all_.found[MAX_SHOWN:]
        console.print(_describe_rest(rest), highlight=False)
    silent = all_.num_clients - len({spending.client for spending in all_.found})
    if silent:
        console.print(f"{pluralize(silent, 'more client')}, of which nothing has left yet", highlight=False)


def _tabulate(shown: list[Spending]) -> Table:
    table = Table(title="Spent in all runs", title_justify="left", header_style="bold", box=None, padding=(0, 1, 0, 0))
    for name in ("client", "data set", "runs", "ε", "second", "δ", "neighbours", "limit", "left", "uncovered"):
        is_text = name in ("data set", "neighbours", "uncovered")
        is_whole = name not in ("neighbours", "uncovered")  # numbers and names are never broken over lines
        table.add_column(name, justify="left" if is_text else "right", no_wrap=is_whole, min_width=_WIDTHS.get(name))
    for one in shown:
        costs = _list_costs(one)
        limit, left = (_format(value, "-") for value in (one.policy.max_epsilon, one.left))
        uncovered = Text(", ".join(one.uncovered) or "-", style="red" if one.uncovered else "")
        about = (str(one.client), Text(one.dataset), str(one.num_runs))
        table.add_row(*about, *(costs[0] if costs else "----"), limit, left, uncovered)
        for further in costs[1:]:
            table.add_row("", "", "", *further)
    return table


def _list_costs(one: Spending) -> list[tuple[str, ...]]:
    second, delta = one.ask_second(), f"{one.policy.delta:g}"
    return [
        (f"{epsilon:.4g}", _format(second[adjacency], "failed"), delta, adjacency)
        for adjacency, epsilon in one.epsilons.items()
    ]


def _format(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.4g}"


def _describe_rest(rest: list[Spending]) -> str:
    most = max(one.most for one in rest)
    uncovered = sum(bool(one.uncovered) for one in rest)
    return (
        f"and {len(rest):,} more lines: ε of {most:.4g} at most, "
        f"{f'{uncovered:,} with uncovered releases' if uncovered else 'all covered'}"
    )
