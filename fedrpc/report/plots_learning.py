"""What a run learned, as plots: curves over rounds, recalls of classes, accuracies of clients, local losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, median, quantiles

from fedrpc.report.markup import Plot
from fedrpc.report.svg import NARROW, WIDE, Axis, Canvas, Point
from fedrpc.report.words import pluralize
from fedrpc.study.reading import Run

MAX_BARS = 60  # more bars than this are drawn as one shape
MAX_POINTS = 30_000  # of all local losses together; keeps the page small

History = Mapping[int, Sequence[tuple[int, Sequence[float]]]]  # by client: (round, loss of each local epoch)


def format_percent(value: float) -> str:
    """An axis label."""
    return f"{value:g} %"


PERCENT = Axis(0, 100, range(0, 101, 25), "", format_percent)


def plot_accuracy(run: Run) -> Plot | None:
    """Accuracy over rounds, on the external test and on the clients' own."""
    points = run.curve("accuracy")
    clients = [(index, list(values.values())) for index, values in run.client_accuracies]
    if not points and not clients:
        return None
    spread = [(index, *_find_quartiles(values)) for index, values in clients]
    rounds = [index for index, _ in points] + [index for index, _ in clients]
    shown = [value for _, value in points] + [value for _, *values in spread for value in values]
    canvas = Canvas(
        Axis.of_rounds(min(rounds), max(rounds)), Axis.over(shown, "", format_percent), "accuracy over rounds"
    )
    legend = [("f0", "external test")] if points else []
    if len(spread) > 1:
        canvas.band([(i, low) for i, low, _, _ in spread], [(i, high) for i, _, _, high in spread], "band f2")
    if spread:
        _draw_curve(canvas, [(i, middle) for i, _, middle, _ in spread], 2, "clients' mean", " %")
        legend.append(("f2", "clients' own tests: mean, and the middle half"))
    _draw_curve(canvas, points, 0, "accuracy", " %")
    return Plot("Accuracy", canvas.svg(), "", legend)


def _find_quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, mean(values), high


def plot_loss(run: Run) -> Plot | None:
    """Loss on the external test over rounds."""
    points = run.curve("loss")
    if not points:
        return None
    rounds = [index for index, _ in points]
    axis = Axis.of_losses((value for _, value in points), "")
    canvas = Canvas(Axis.of_rounds(min(rounds), max(rounds)), axis, "loss over rounds")
    _draw_curve(canvas, points, 1, "loss", "")
    lost = sum(not math.isfinite(value) for _, value in points)
    return Plot(
        "Loss", canvas.svg(), f"{pluralize(lost, 'round')} gave no finite loss: the run diverged." if lost else ""
    )


def _draw_curve(canvas: Canvas, points: Sequence[Point], series: int, what: str, unit: str) -> None:
    def describe(point: Point) -> str:
        return f"round {point[0]:g}: {what} {point[1]:.4g}{unit}"

    canvas.line(points, f"l{series}", tooltip=describe)


def plot_recalls(run: Run, *, wide: bool = False) -> Plot | None:
    """Recall of each class on the external test, at the end."""
    values = (run.summary.get("accuracy") or {}).get("per_class")
    if not values:
        return None
    known = [value for value in values if value is not None]
    variance = run.summary["accuracy"].get("class_variance")
    caption = "" if variance is None else f"Variance over the classes {variance:.1f} %²."
    title, width = "Recall of each class", WIDE if wide else NARROW
    if len(values) <= 25:
        return Plot(title, _draw_named_bars(run.classes, values, width), caption, wide=wide)
    ordered = sorted(known)
    canvas = Canvas(_make_place_axis(len(ordered), "classes, worst first"), PERCENT, title, width=width)
    canvas.stairs([0.0] * len(ordered), ordered, "f0")
    return Plot(title, canvas.svg(), caption, wide=wide)


def _draw_named_bars(names: Sequence[str], values: Sequence[float | None], width: int) -> str:
    count = len(values)
    left = 24 + min(110, 6 * max(map(len, names)))
    canvas = Canvas(
        PERCENT,
        Axis(count, 0, ()),
        "recall of each class",
        width=width,
        height=46 + max(70, 22 * count),
        left=left,
        bottom=26,
    )
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        y = canvas.y(index + 0.5) + 4
        canvas.write(left - 7, y, name if len(name) <= 19 else name[:18] + "…", "end", "tick")
        if value is None:
            canvas.write(left + 4, y, "no example", "start", "note")
            continue
        canvas.block(0, value, index + 0.84, index + 0.16, "f0", f"{name}: {value:.2f} %")
        inside = value > 88
        canvas.write(
            canvas.x(value) + (-5 if inside else 5),
            y,
            f"{value:.1f}",
            "end" if inside else "start",
            "on" if inside else "note",
        )
    return canvas.svg(grid=False)


def plot_clients(run: Run) -> Plot | None:
    """Accuracy of the model on every client's own test at the last such evaluation, worst first."""
    if not run.client_accuracies:
        return None
    index, values = run.client_accuracies[-1]
    ordered = sorted(values.items(), key=lambda item: item[1])
    worst = math.ceil(len(ordered) / 10)
    few = len(ordered) <= MAX_BARS
    canvas = Canvas(
        _make_place_axis(
            len(ordered), "clients, worst first", [str(client) for client, _ in ordered] if len(ordered) <= 25 else ()
        ),
        PERCENT,
        "accuracy on each client's own test",
    )
    if few:
        for place, (client, value) in enumerate(ordered):
            style = "f3" if place < worst else "f2"
            canvas.block(place + 0.08, place + 0.92, 0, value, style, f"client {client}: {value:.2f} %")
    else:
        heights = [value for _, value in ordered]
        canvas.stairs([0.0] * worst, heights[:worst], "f3")
        canvas.stairs([0.0] * (len(heights) - worst), heights[worst:], "f2", start=worst)
    average = mean(values.values())
    canvas.level(average, f"mean {average:.2f} %")
    caption = f"The global model after round {index} on {pluralize(len(ordered), 'test')} that clients kept for it."
    return Plot(
        "Accuracy on clients' own tests", canvas.svg(), caption, [("f3", "the worst tenth"), ("f2", "the others")]
    )


def _make_place_axis(count: int, title: str, names: Sequence[str] = ()) -> Axis:
    ticks = [place + 0.5 for place in range(len(names))]
    return Axis(0, count, ticks, title, lambda tick: names[int(tick)])


def plot_local_losses(run: Run) -> Plot | None:
    """Every participant's local loss, one line a client, over rounds and the epochs within them."""
    history, left_out = thin(run.local_losses)
    if not any(losses for stays in history.values() for _, losses in stays):
        return None
    values = [value for stays in history.values() for _, losses in stays for value in losses]
    rounds = [index for stays in history.values() for index, _ in stays]
    axis = Axis.of_rounds(min(rounds), max(rounds))
    x = Axis(axis.low, max(axis.high, max(rounds) + 1), axis.ticks, axis.title)
    canvas = Canvas(x, Axis.of_losses(values, ""), "local losses", width=WIDE, height=320)
    few = len(history) <= 10
    crowd = "l0 faint" if len(history) <= 40 else "l0 fainter"
    for place, stays in enumerate(history.values()):
        canvas.line(_spread_epochs(stays), f"l{place} thin" if few else crowd)
    legend = (
        [(f"f{place}", f"client {client}") for place, client in enumerate(history)] if few else [("f0", "one client")]
    )
    if len(history) > 2:
        canvas.line(_take_medians(run.local_losses), "ink strong")
        legend.append(("ink", "median of a round's last epochs"))
    caption = "Mean training loss of each local epoch, by client; a round's epochs lie between its number and the next."
    return Plot("Local losses", canvas.svg(), " ".join([caption, left_out]).strip(), legend, wide=True)


def _spread_epochs(stays: Sequence[tuple[int, Sequence[float]]]) -> list[Point]:
    return [(index + epoch / len(losses), value) for index, losses in stays for epoch, value in enumerate(losses)]


def _take_medians(history: History) -> list[Point]:
    last: dict[int, list[float]] = {}
    where: dict[int, float] = {}
    for stays in history.values():
        for index, losses in stays:
            if losses and math.isfinite(losses[-1]):
                last.setdefault(index, []).append(losses[-1])
                where[index] = index + (len(losses) - 1) / len(losses)
    return [(where[index], median(values)) for index, values in sorted(last.items())]


def thin(history: History, most: int = MAX_POINTS) -> tuple[History, str]:
    """At most about `most` points of it, and words for what was left out: first epochs, then clients, then rounds."""

    def count(kept: History) -> int:
        return sum(len(losses) for stays in kept.values() for _, losses in stays)

    if count(history) <= most:
        return history, ""
    ends = {
        c: [(i, [losses[0], losses[-1]] if len(losses) > 1 else losses) for i, losses in s] for c, s in history.items()
    }
    if count(ends) <= most:
        return ends, "Only the first and the last epoch of each round are drawn."
    step = -(-count(ends) // most)
    some = {client: stays for place, (client, stays) in enumerate(ends.items()) if place % step == 0}
    words = f"Only the first and the last epoch of each round are drawn, of {len(some)} of {len(history)} clients."
    if count(some) <= most:
        return some, words
    every = -(-count(some) // most)
    return {c: stays[::every] for c, stays in some.items()}, f"{words[:-1]}, one participation in {every}."
