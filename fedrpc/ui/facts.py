"""Puts what is known of a run into the words and numbers that the pages show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedrpc.config import flatten
from fedrpc.metrics.progress import STATES, UNDER_WAY, Asked
from fedrpc.privacy.words import describe_epsilon, format_epsilon
from fedrpc.report.markup import Tile
from fedrpc.report.table import format_size
from fedrpc.report.words import SEEDED, format_duration, name_test, pluralize
from fedrpc.ui.run import LiveRun

SIGNS = {"starting": "○", "running": "▶", "finished": "✓", "stopped": "■", "failed": "✕"}
# One sign for each state of a client, so that none depends on its colour alone.
GLYPHS = {
    "waiting": "·",
    "downloading": "↓",
    "computing": "∿",
    "uploading": "↑",
    "done": "✓",
    "abstained": "-",
    "late": "!",
    "failed": "✕",
    "gone": "∅",
}
PARTS = {
    "encode": "encodes the question",
    "read": "reads answers",
    "aggregate": "aggregates",
    "evaluate": "evaluates the model",
    "checkpoint": "writes a checkpoint",
}
MAX_SLOWEST = 6
MAX_GRID = 400  # clients that are drawn one by one
MAX_ABSENT = 8  # rounds in the table of those who were absent
NO_GUARANTEE = "no guarantee"


def count_statuses(runs: Iterable[LiveRun]) -> list[tuple[str, str, int]]:
    """(status, sign, how many), without those that nobody has."""
    found = Counter[str](run.status for run in runs)
    return [(status, sign, found[status]) for status, sign in SIGNS.items() if found[status]]


class Cells(NamedTuple):
    """What a row of a table says of a run."""

    status: str
    sign: str
    data: str
    place: str
    accuracy: str
    bytes: str
    privacy: str
    time: str


def list_cells(run: LiveRun) -> Cells:
    """The cells of a run's row."""
    config, curve = run.config, run.curve("accuracy")
    done = f"{run.num_done} of {run.num_rounds}"
    return Cells(
        run.status,
        SIGNS[run.status],
        f"{config.get('dataset', '?')}, {config.get('partition', '?')}",
        done,
        f"{curve[-1][1]:.2f} %" if curve else "-",
        format_size(run.total_bytes),
        _shorten_privacy(run),
        _describe_time(run),
    )


def _shorten_privacy(run: LiveRun) -> str:
    privacy = run.summary.get("privacy") if run.status == "finished" else None
    if not privacy:
        return "-"
    return format_epsilon(privacy) if privacy.get("epsilon") is not None else NO_GUARANTEE


def _describe_time(run: LiveRun) -> str:
    left = run.seconds_left
    if left is not None:
        return f"{format_duration(left)} left"
    if run.status == "finished" and isinstance(run.summary.get("seconds"), int | float):
        return format_duration(run.summary["seconds"])
    return "-"


# One run


def describe_run(run: LiveRun) -> dict[str, Any]:
    """What stands below a run's name."""
    config = run.config
    chips = [
        ("partition", config.get("partition", "?")),
        ("model", config.get("model", "?")),
        ("clients", config.get("clients", "?")),
        ("share a round", config.get("fraction", "?")),
        ("seed", config.get("seed", "?")),
        ("link", config.get("link") or "loopback"),
    ]
    return {"chips": chips, "sign": SIGNS[run.status], "dataset": config.get("dataset", "?")}


def describe_place(run: LiveRun) -> str:
    """Where a run is, in one line."""
    if run.status == "starting":
        return "starting: the run directory is not there yet"
    done = f"{run.num_done} of {pluralize(run.num_rounds, 'round')} done"
    if run.status == "finished":
        stopped = " (a budget ended it)" if run.summary.get("stopped") else ""
        return f"finished after {pluralize(int(run.summary.get('num_rounds', 0)), 'round')}{stopped}"
    found = run.snapshot
    if run.status != "running" or found is None:
        reason = f": {found.ended}" if found and found.ended else ""
        resume = "" if run.status == "running" else "; the same command again goes on from there"
        return f"{'starting' if run.status == 'running' else run.status}, {done}{reason}{resume}"
    if not found.counts and found.num_connected < found.num_clients:
        return f"{found.num_connected:,} of {pluralize(found.num_clients, 'client')} have joined"
    where = "set-up" if found.round < 0 else f"round {min(found.round + 1, run.num_rounds)} of {run.num_rounds}"
    return f"{where}: {_describe_part(found.phase, found.part, found.counts)}"


def _describe_part(phase: str, part: str, counts: Mapping[str, int]) -> str:
    if part in PARTS:
        return f"the server {PARTS[part]}" if phase in ("session", "evaluate") else f"{phase}, the server {PARTS[part]}"
    answered, asked = counts.get("done", 0), sum(counts.values())
    return f"{phase}, {answered:,} of {pluralize(asked, 'client')} have answered"


def say_progress(run: LiveRun) -> str:
    """What a screen reader says when a round is over, and not more often."""
    curve = run.curve("accuracy")
    accuracy = f", accuracy {curve[-1][1]:.1f} %" if curve else ""
    return f"{run.status}: {run.num_done} of {run.num_rounds} rounds done{accuracy}"


class Privacy(NamedTuple):
    """What is promised so far."""

    value: str
    note: str
    mood: str = ""


def describe_privacy(run: LiveRun) -> Privacy:
    """A finished run's epsilon, or what its clients' rows come to so far."""
    stated = run.summary.get("privacy") if run.status == "finished" else None
    if stated:
        if stated.get("epsilon") is not None:
            return Privacy(format_epsilon(stated), describe_epsilon(stated))
        return Privacy("no epsilon", str(stated.get("reason", "")), "bad")
    spent = run.spending
    if spent.uncovered:
        return Privacy(NO_GUARANTEE, f"{', '.join(sorted(spent.uncovered))} left clients uncovered", "bad")
    if len(spent.notions) > 1:
        return Privacy(NO_GUARANTEE, "releases under several notions of neighbours are not added up", "bad")
    if not spent.num_rows:
        return Privacy("nothing yet", "nothing derived from data has left a client")
    if not spent.notions:
        return Privacy("no epsilon", "only what is public has left clients")
    settings = run.config.get("privacy") or {}
    delta = float(settings.get("delta", 1e-5))
    epsilon = spent.ask_epsilon(delta)
    notes = [f"At δ = {delta:g}, for one record of the client that has spent most, as clients' own rows say."]
    notes += [SEEDED] if settings.get("noise") == "seeded" else []
    notes.append("The run is not audited before it ends.")
    value = "being computed" if epsilon is None else f"{format_epsilon({'epsilon': epsilon})} so far"
    return Privacy(value, " ".join(notes))


def make_tiles(run: LiveRun, privacy: Privacy) -> list[Tile]:
    """The facts that one wants first."""
    return [_accuracy_tile(run), _bytes_tile(run), Tile("privacy", *privacy), _time_tile(run), _clients_tile(run)]


def _accuracy_tile(run: LiveRun) -> Tile:
    curve = run.curve("accuracy")
    if not curve:
        return Tile("accuracy", "not yet", "no round was evaluated")
    best = max(curve, key=lambda point: point[1])
    what = f"accuracy on the {name_test(run.config)}"
    return Tile(what, f"{curve[-1][1]:.2f} %", f"best {best[1]:.2f} % after round {best[0]}")


def _bytes_tile(run: LiveRun) -> Tile:
    total = run.total_bytes
    if run.status == "running" and run.snapshot:
        rates = f"now ↓ {format_size(run.rate.down)}/s, ↑ {format_size(run.rate.up)}/s"
        return Tile("messages so far", format_size(total), rates)
    return Tile("messages", format_size(total), "all kinds, both ways")


def _time_tile(run: LiveRun) -> Tile:
    spent = sum(found.seconds for found in run.rounds.values())
    each = f"{format_duration(spent / len(run.rounds))} a round" if run.rounds else "no round is over yet"
    left = run.seconds_left
    if left is not None:
        return Tile("time left", format_duration(left), f"by the last rounds; {each}")
    if run.status == "running":
        return Tile("time left", "not known yet", each)
    return Tile("time", format_duration(float(run.summary.get("seconds") or spent)), each)


def _clients_tile(run: LiveRun) -> Tile:
    total = run.config.get("clients", 0)
    found = run.snapshot
    if run.status != "running" or found is None:
        return Tile("clients", f"{total:,}" if isinstance(total, int) else "?", "")
    late = sum(_count_late(each.absent) for each in run.rounds.values())
    note = f"{pluralize(late, 'answer')} late or missing so far" if late else "none was late so far"
    mood = "bad" if found.num_connected < found.num_clients and found.counts else ""
    return Tile("clients connected", f"{found.num_connected:,} of {found.num_clients:,}", note, mood)


def _count_late(absent: Mapping[str, Sequence[int]]) -> int:
    """Who should have answered and did not, or not in time; who was gone by the run's own settings is not counted."""
    return len({*absent.get("late", ()), *absent.get("missing", ())} - set(absent.get("gone", ())))


class Now(NamedTuple):
    """The last question, client by client."""

    heading: str
    about: str
    counts: list[tuple[str, str, int]]  # (state, sign, how many)
    grid: Sequence[Asked]
    slowest: Sequence[Asked]
    slowest_heading: str
    glyphs: Mapping[str, str]


def describe_now(run: LiveRun) -> Now | None:
    """What each client that was asked does at the moment; None when nobody was asked, or the run is over."""
    found = run.snapshot
    if found is None or not found.counts or run.status == "finished":
        return None
    is_live = run.status == "running"
    under_way = [each for each in found.asked if each.state in UNDER_WAY]
    known = [each for each in under_way if each.state != "waiting"]  # who waits for its turn holds up nobody
    known = known or under_way or [each for each in found.asked if each.seconds > 0]
    total = sum(found.counts.values())
    about = f"{pluralize(total, 'client')} asked"
    if len(found.asked) > MAX_GRID:
        about += f"; the {MAX_GRID:,} of them that take longest are shown"
    grid = found.asked
    if len(grid) > MAX_GRID:
        grid = sorted(grid, key=lambda each: (each.state not in UNDER_WAY, -each.seconds))[:MAX_GRID]
    return Now(
        "Clients now" if is_live else "Clients when it ended",
        about,
        [(state, GLYPHS[state], found.counts[state]) for state in STATES if found.counts.get(state)],
        grid,
        sorted(known, key=lambda each: -each.seconds)[:MAX_SLOWEST],
        "Waited for longest" if under_way else "Took longest",
        GLYPHS,
    )


def list_absent(run: LiveRun) -> list[tuple[int, str, float]]:
    """(round from 1, who was absent and how, seconds) of the last rounds in which somebody was."""
    found = []
    for index, each in sorted(run.rounds.items(), reverse=True):
        told = [
            f"{name}: {name_clients(who)}" for name, who in each.absent.items() if not _is_repeated(name, each.absent)
        ]
        if told:
            found.append((index + 1, "; ".join(told), each.seconds))
    return found[:MAX_ABSENT]


def _is_repeated(name: str, absent: Mapping[str, Sequence[int]]) -> bool:
    """Whether all of these are named by a better word already."""
    named = {client for other in ("late", "gone") for client in absent.get(other, ())}
    return name == "missing" and set(absent[name]) <= named


def name_clients(clients: Sequence[int]) -> str:
    """Some clients by their ids, and how many more there are."""
    more = f" and {len(clients) - 12:,} more" if len(clients) > 12 else ""
    return ", ".join(map(str, clients[:12])) + more


def list_settings(run: LiveRun) -> list[tuple[str, str]]:
    """All settings by dotted name."""
    return [(name, format_value(value)) for name, value in sorted(flatten(run.config).items())]


def list_links(run: LiveRun) -> list[tuple[str, str]]:
    """(file, words) of the pages that the run has by now."""
    pages = (("report.html", "The report"), ("attack.html", "The attacks"))
    return [(f"{run.name}/{name}", words) for name, words in pages if (run.folder / name).is_file()]


# Several runs


def label_runs(runs: Sequence[LiveRun]) -> list[str]:
    """A short name for each: its method, or its folder where methods repeat."""
    methods = Counter(run.method for run in runs)
    return [run.method if methods[run.method] == 1 else run.name for run in runs]


def list_differences(runs: Sequence[LiveRun]) -> list[tuple[str, list[str]]]:
    """The settings in which runs differ: (name, the value of each run)."""
    flat = [flatten(run.config) for run in runs]
    names = sorted({name for each in flat for name in each})
    rows = [(name, [format_value(each.get(name)) for each in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def format_value(value: Any) -> str:
    """A setting as it is shown; a dash where a run does not have it."""
    return "-" if value is None else str(value)
