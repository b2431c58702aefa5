"""The plots of a paper's experiment: its figures beside ours, and curves with bands over the seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from fedrpc.report.paper_words import Results, describe_measure, format_printed, format_value, list_run
from fedrpc.report.picture import NEUTRAL, Panel, choose_colours, draw_picture
from fedrpc.report.svg import Axis, Canvas, format_percent, thin
from fedrpc.study.experiment_curves import ACCURACY

WIDTH = 880
MAX_POINTS = 60  # of a line
LONG = 20  # evaluations; longer curves are smoothed: single rounds swing too much to compare
WINDOW = 10  # evaluations that are averaged then
_ROW, _LETTER = 26, 5.9  # pixels: between two rows, and of a letter of their names
_TITLES = {
    ACCURACY: "accuracy",
    "class_variance": "variance over classes",
    "train_loss": "loss in the last local epoch",
}


def plot_rows(results: Results) -> str | None:
    """A panel for each measure with the paper's figure and ours of every row; None where nothing is to be compared."""
    measures = _choose_measures(results)
    if not measures:
        return None
    names = [row["name"] for row in list_run(results)]
    colours = _choose_colours(names)
    left = min(280, 16 + int(_LETTER * max(map(len, names))))
    half = (WIDTH - left) // 2 if len(measures) > 1 else WIDTH * 2 // 3 - left // 2
    lines = []
    for start in range(0, len(measures), 2):
        pair = measures[start : start + 2]
        canvases = [_plot_measure(results, name, colours, left if not i else 14, half) for i, name in enumerate(pair)]
        lines.append([Panel(describe_measure(name), canvas) for name, canvas in zip(pair, canvases, strict=True)])
    has_paper = any(name in row["paper"] for row in list_run(results) for name in measures)
    legend = [("paper", "paper")] if has_paper else []
    legend += [(f"c{NEUTRAL}", "ours, mean, with one standard deviation"), (f"seed m{NEUTRAL}", "a seed")]
    return draw_picture(f"{results['title']}: figures", lines, legend)


def _choose_measures(results: Results) -> list[str]:
    """What the paper has figures of or claims are about, and was measured."""
    rows = list_run(results)
    wanted = [*results["measures"], *(claim["measure"] for claim in results["claims"])]
    used = {claim["measure"] for claim in results["claims"]} | {name for row in rows for name in row["paper"]}
    known = [name for name in dict.fromkeys(wanted) if name in used]
    return [name for name in known if any(row["ours"].get(name) for row in rows)]


def _plot_measure(results: Results, measure: str, colours: Mapping[str, str], left: int, half: int) -> Canvas:
    rows = list_run(results)
    values = [each for row in rows for each in _list_values(row, measure)]
    names = {float(len(rows) - place): (row["name"] if left > 20 else "") for place, row in enumerate(rows)}
    y = Axis(0.4, len(rows) + 0.6, list(names), text=lambda tick: names[tick])
    x = Axis.of_losses(values, "")
    canvas = Canvas(
        x, y, describe_measure(measure), width=left + half, height=46 + _ROW * len(rows), left=left, bottom=30
    )
    for place, row in zip(names, rows, strict=True):
        _plot_row(canvas, row, measure, place, colours[row["name"]])
    return canvas


def _list_values(row: Results, measure: str) -> list[float]:
    ours, printed = row["ours"].get(measure), _read_printed(row, measure)
    found = [printed] if printed is not None else []
    if ours:
        spread = ours["sd"] or 0.0
        low = ours["mean"] - spread
        found += [ours["mean"] + spread, low if low > 0 else ours["mean"]]
    return found + _list_seeds(row, measure)


def _read_printed(row: Results, measure: str) -> float | None:
    """The paper's figure without its deviation."""
    value = row["paper"].get(measure)
    found: float | None = value[0] if isinstance(value, Sequence) else value
    return found


def _list_seeds(row: Results, measure: str) -> list[float]:
    return [values[measure] for values in row["seeds"].values() if values.get(measure) is not None]


def _plot_row(canvas: Canvas, row: Results, measure: str, place: float, colour: str) -> None:
    ours, printed, name = row["ours"].get(measure), _read_printed(row, measure), row["name"]
    if ours:
        if ours["sd"]:
            low = ours["mean"] - ours["sd"]
            start = low if low > 0 else min(_list_seeds(row, measure))
            canvas.block(start, ours["mean"] + ours["sd"], place - 0.09, place + 0.09, f"spread m{colour}")
        for seed, values in row["seeds"].items():
            if (value := values.get(measure)) is not None:
                canvas.dot(
                    (value, place), f"seed m{colour}", f"{name}, seed {seed}: {format_value(measure, value)}", 2.4
                )
        canvas.dot((ours["mean"], place), f"c{colour}", f"{name}, ours: {format_value(measure, ours['mean'])}")
    if printed is not None:
        canvas.dot((printed, place), "paper", f"{name}, paper: {format_printed(row['paper'][measure])}", 4.5)


# Curves


def plot_curves(results: Results) -> str | None:
    """Accuracy over rounds, and what else was measured in every round; None without curves."""
    curves = {
        row: runs for row, runs in results.get("curves", {}).items() if any(_is_line(run) for run in runs.values())
    }
    if not curves:
        return None
    colours = _choose_colours([row["name"] for row in list_run(results)])
    names = [name for name in _TITLES if any(name in run for runs in curves.values() for run in runs.values())]
    smoothed = any(len(run["rounds"]) > LONG for runs in curves.values() for run in runs.values())
    note = f", mean of the last {WINDOW} evaluations" if smoothed else ""
    width = WIDTH // len(names) if len(names) > 1 else WIDTH * 2 // 3
    panels = [Panel(_TITLES[name] + note, _plot_curve(curves, name, colours, width)) for name in names]
    return draw_picture(f"{results['title']}: curves", [panels], [(f"c{colours[row]}", row) for row in curves])


def _is_line(run: Mapping[str, Sequence[Any]]) -> bool:
    return len(run["rounds"]) > 1


def _plot_curve(curves: Mapping[str, Any], name: str, colours: Mapping[str, str], width: int) -> Canvas:
    lines = {row: summarize_curve(runs, name) for row, runs in curves.items()}
    points = [point for line in lines.values() for point in line]
    ends = [mean + sign * spread for _, mean, spread in points for sign in (-1, 1)]
    known = [mean for _, mean, _ in points] if name != ACCURACY else ends
    y = Axis.over(ends, "", format_percent) if name == ACCURACY else Axis.of_losses(known, "")
    rounds = [point[0] for point in points]
    canvas = Canvas(Axis.of_rounds(min(rounds), max(rounds)), y, _TITLES[name], width=width, height=300)
    for row, line in lines.items():
        if any(spread for _, _, spread in line):
            low, high = ([(at, _clip(y, mean + sign * spread)) for at, mean, spread in line] for sign in (-1, 1))
            canvas.band(low, high, f"band m{colours[row]}")
    for row, line in lines.items():
        canvas.line([(at, mean) for at, mean, _ in line], f"c{colours[row]}", dots=False)
    return canvas


def _clip(axis: Axis, value: float) -> float:
    return min(max(value, axis.low), axis.high)


def summarize_curve(runs: Mapping[str, Mapping[str, Any]], name: str) -> list[tuple[int, float, float]]:
    """(round, mean over seeds, standard deviation) where every seed has a value; long curves are smoothed first."""
    smooth = [_smooth(run["rounds"], run[name]) for run in runs.values() if name in run]
    shared = sorted(set.intersection(*(set(each) for each in smooth))) if smooth else []
    columns = [(at, [each[at] for each in smooth]) for at in shared]
    found = [(at, fmean(values), stdev(values) if len(values) > 1 else 0.0) for at, values in columns]
    return thin(found, MAX_POINTS)


def _smooth(rounds: Sequence[int], values: Sequence[float | None]) -> dict[int, float]:
    known = [(at, value) for at, value in zip(rounds, values, strict=True) if value is not None]
    window = WINDOW if len(known) > LONG else 1
    return {
        at: fmean(value for _, value in known[max(0, place + 1 - window) : place + 1])
        for place, (at, _) in enumerate(known)
    }


def _choose_colours(names: Sequence[str]) -> dict[str, str]:
    """FedAvg is neutral, as on all pages; further rows of it have a colour."""
    return choose_colours(names, [name for name in names if name.startswith("FedAvg")][:1])
