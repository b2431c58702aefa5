"""What a run learned, as plots: curves over rounds, recalls of classes, accuracies of clients, local losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, quantiles

from fedrpc.report.markup import Plot
from fedrpc.report.svg import NARROW, WIDE, Axis, Canvas, Item, Point, choose_whole_ticks, format_percent, thin
from fedrpc.report.words import count_round, name_test, pluralize
from fedrpc.study.reading import Run

MAX_BARS = 60  # more bars than this are drawn as one shape
MAX_POINTS = 1500  # epochs of local losses; keeps the page small

History = Mapping[int, Sequence[tuple[int, Sequence[float]]]]  # by client: (round, loss of each local epoch)


PERCENT = Axis(0, 100, range(0, 101, 25), "", format_percent)


def _count_rounds(run: Run, points: Sequence[tuple[int, Item]]) -> list[tuple[int, Item]]:
    """The same points, with rounds as people count them."""
    return [(count_round(index, run.summary["num_rounds"]), value) for index, value in points]


def plot_accuracy(run: Run) -> Plot | None:
    """Accuracy over rounds, on the external test and on the clients' own."""
    points = _count_rounds(run, run.curve("accuracy"))
    clients = [(index, list(values.values())) for index, values in _count_rounds(run, run.client_accuracies)]
    if not points and not clients:
        return None
    spread = [(index, *_find_quartiles(values)) for index, values in clients]
    rounds = [index for index, _ in points] + [index for index, _ in clients]
    shown = [value for _, value in points] + [value for _, *values in spread for value in values]
    canvas = Canvas(
        Axis.of_rounds(min(rounds), max(rounds)), Axis.over(shown, "", format_percent), "accuracy over rounds"
    )
    legend = [("f0", name_test(run.config))] if points else []
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
    points = _count_rounds(run, run.curve("loss"))
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
    index, values = _count_rounds(run, run.client_accuracies)[-1]
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
    """The local losses of each epoch: the median of a round's clients, and how far they spread."""
    epochs = collect_epochs(run.local_losses)
    if not epochs:
        return None
    kept = thin(epochs, MAX_POINTS)
    last = max(where for where, _ in kept)
    x = Axis(0, max(1.0, last), choose_whole_ticks(0, max(1, math.ceil(last))), "round")
    spreads = [(where, *_find_spread(values)) for where, values in kept]
    y = Axis.of_losses((value for _, *values in spreads for value in values), "")
    canvas = Canvas(x, y, "local losses", width=WIDE, height=320)
    several = max(len(values) for _, values in kept) > 1
    legend = [("f0", "median")]
    if several:
        for place, shade in ((1, "band f0"), (2, "band f0")):
            low, high = ([(each[0], each[end]) for each in spreads] for end in (place, 6 - place))
            canvas.band(low, high, shade)
        legend += [("f0 half", "the middle half of the clients"), ("f0 fifth", "from the 10th to the 90th percentile")]
    number = {where: len(values) for where, values in kept}

    def describe(point: Point) -> str:
        return f"round {math.ceil(point[0])}: median {point[1]:.4g} of {pluralize(number[point[0]], 'client')}"

    canvas.line([(each[0], each[3]) for each in spreads], "l0", tooltip=describe)
    caption = "Mean training loss of each local epoch; the last epoch of a round lies at its number."
    caption += f" {len(kept):,} of {len(epochs):,} epochs are drawn." if len(kept) < len(epochs) else ""
    return Plot("Local losses", canvas.svg(), caption, legend if several else (), wide=True)


def collect_epochs(history: History) -> list[tuple[float, list[float]]]:
    """(place on the axis of rounds, finite losses of all clients) of each local epoch, in order."""
    found: dict[float, list[float]] = {}
    for stays in history.values():
        for index, losses in stays:
            for epoch, loss in enumerate(losses):
                if math.isfinite(loss):
                    found.setdefault(index + (epoch + 1) / len(losses), []).append(loss)
    return sorted(found.items())


def _find_spread(values: Sequence[float]) -> tuple[float, float, float, float, float]:
    """The 10th, 25th, 50th, 75th and 90th percentile."""
    if len(values) < 2:
        return (values[0],) * 5
    points = quantiles(values, n=20, method="inclusive")
    return points[1], points[4], points[9], points[14], points[17]
