"""Where the time of a run went, and its accuracy over time, as plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedrpc.report.markup import Bar, Bars, Plot
from fedrpc.report.svg import NARROW, WIDE, Axis, Canvas, Format, Point, draw_bars, format_number, format_percent
from fedrpc.report.words import count_round, format_duration
from fedrpc.study.reading import Run
from fedrpc.study.targets import list_points

# The parts of a phase: those of a client, then the server's own.
FILLS = {
    "queue": "f7",
    "download": "f5",
    "compute": "f0",
    "upload": "f2",
    "encode": "f8",
    "read": "f6",
    "aggregate": "f1",
    "evaluate": "f4",
    "checkpoint": "f9",
}


def make_seconds_axis(values: Iterable[float], what: str = "measured time") -> Axis:
    """An axis of time, in the unit that suits its end."""
    known = list(values)
    size, unit = next((each for each in ((3600, "h"), (60, "min")) if max(known) > 3 * each[0]), (1, "s"))
    axis = Axis.over((value / size for value in known), f"{what}, {unit}", zero=True)
    return Axis(axis.low * size, axis.high * size, [tick * size for tick in axis.ticks], axis.title, _divide_by(size))


def _divide_by(size: int) -> Format:
    return lambda value: format_number(value / size)


def describe_parts(parts: Mapping[str, float], whose: str = "") -> list[tuple[str, float, str]]:
    """(style, seconds, words) of each part, for `draw_bars`."""
    total = sum(parts.values())
    return [
        (style, parts[part], f"{whose}{part}: {parts[part]:.3g} s, {100 * parts[part] / total:.1f} %")
        for part, style in FILLS.items()
        if parts.get(part)
    ]


def make_time_bars(run: Run) -> Bars | None:
    """The parts of all phases together, then of each phase's median round; None where time was not measured."""
    time = run.summary.get("time")
    if not time or not any(time["parts"].values()):
        return None
    lines = {"the whole run": time["parts"]} | {
        f"{phase}, median round": {part: found["median"][part] for part in time["parts"]}
        for phase, found in time["by_phase"].items()
    }
    rows = []
    for name, parts in lines.items():
        total = sum(parts.values())  # each line fills the width: a round is nothing beside the run
        rows.append(Bar(name, draw_bars([describe_parts(parts, f"{name}, ")], total), _format_total(total)))
    used = [(style, part) for part, style in FILLS.items() if time["parts"].get(part)]
    return Bars("Shares of the time", rows, "Every line is a whole of its own.", used, wide=True)


def _format_total(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 1 else format_duration(seconds)


def plot_accuracy_by_seconds(run: Run, *, wide: bool = False) -> Plot | None:
    """Accuracy against measured time."""
    points = list_points(run)
    if not points or not points[-1].seconds:
        return None
    x = make_seconds_axis(point.seconds for point in points)
    y = Axis.over((point.accuracy for point in points), "", format_percent)
    canvas = Canvas(x, y, "accuracy over seconds", width=WIDE if wide else NARROW)
    rounds = {(p.seconds, p.accuracy): count_round(p.round, run.summary["num_rounds"]) for p in points}

    def describe(point: Point) -> str:
        return f"round {rounds[point]}: {point[1]:.2f} % after {format_duration(point[0])}"

    canvas.line([(point.seconds, point.accuracy) for point in points], "l0", tooltip=describe)
    return Plot("Accuracy over seconds", canvas.svg(), wide=wide)
