"""Renders attack.html: the result of the attacks on a run, as one page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedrpc.report.attack_picture import find_bounds, is_image, to_lines, to_pixels
from fedrpc.report.markup import Plot, Table, Tile, render
from fedrpc.report.svg import WIDE, Axis, Canvas, choose_whole_ticks, encode_png, format_percent
from fedrpc.report.words import pluralize
from fedrpc.study.attacks.evidence import NOISE, RAW, SHARED, UNTRAINED
from fedrpc.study.attacks.rebuilding import Rebuilt

MAX_SIGNALS = 6  # on the page; the picture has more
WHAT = {
    SHARED: "what the run has shared",
    RAW: "control: the item is the input itself, so it must be rebuilt",
    NOISE: "control: it holds no information, so the result must equal the blind guess",
    UNTRAINED: "control: the same network with its initial weights, for comparison",
}


def describe_shared(document: Mapping[str, Any]) -> str:
    """What was attacked: how many items of what kind, and how many of them could be traced."""
    part, aux = document["shared"], document["auxiliary"]
    shape = "x".join(map(str, part["shape"]))
    made_of = f", each of {part['inputs_per_item']} inputs" if part["inputs_per_item"] > 1 else ""
    lost = part["unknown"] + part["ambiguous"]
    why = f": {part['unknown']} match no recomputed item, {part['ambiguous']} match several" if lost else ""
    return (
        f"Shared: {pluralize(part['items'], 'item')} ({part['what']}; {shape} {part['dtype']}{made_of}). "
        f"Traced to their originals: {part['traced']:,}, not: {lost:,}{why}. "
        f"Evaluated: {document['reconstruction']['judged']:,}. The attacker's own data: "
        f"{aux['train']:,} training examples that no client shared, {aux['test']:,} of the test set."
    )


def format_errors(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """A row's error, its share of the guess's, and its similarity."""
    alike = "-" if row["ssim"] is None else f"{row['ssim']:.3f}"
    return f"{row['mse']:.3g}", f"{100 * row['unexplained']:.1f} %", alike


def render_page(document: Mapping[str, Any], rebuilt: Rebuilt) -> str:
    """The whole page."""
    run, settings = document["run"], document["settings"]
    chips = [
        *((name, run[name]) for name in ("partition", "model")),
        ("clients", run["num_clients"]),
        ("rounds", run["num_rounds"]),
        *((f"attack's {name}", settings[name]) for name in ("aux", "epochs", "seed")),
    ]
    image = is_image(tuple(rebuilt.shown["original"].shape[1:]))
    return render(
        "attack.html.j2",
        subject=f"Attack on {run['method']}",
        dataset=run["dataset"],
        chips=chips,
        tiles=_make_tiles(document),
        verdict=document["verdict"],
        images=_list_images(rebuilt) if image else [],
        signals=None if image else _collect_signals(rebuilt),
        decoders=_collect_decoders(document),
        context_plot=_plot_context(document),
        attacked=describe_shared(document),
        settings=settings,
        footer=f"run {run['run_id']} · model {run['model_sha256'][:16]}",
    )


def _make_tiles(document: Mapping[str, Any]) -> list[Tile]:
    rows = [row for row in document["reconstruction"]["rows"] if row["what"] == SHARED]
    best = min(rows, key=lambda row: float(row["mse"]))
    guess, part, shared = document["reconstruction"]["guess"], document["context"], document["shared"]
    alike = "" if best["ssim"] is None else f", SSIM {best['ssim']:.3f} against the guess's {guess['ssim']:.3f}"
    note = f"{best['decoder']} decoder: MSE {best['mse']:.3g} against {guess['mse']:.3g} of a blind guess{alike}"
    left = Tile("variance left after reconstruction", f"{100 * best['unexplained']:.1f} %", note, _mood(best))
    needed = part["enough_for_90"]["shared"]
    most = f"{part['shared'][-1]:.1f} % from {part['sizes'][-1]:,} items; raw inputs: {part['raw'][-1]:.1f} %"
    mark = Tile("items until a mark is detected in 90 %", f"{needed:,}" if needed else "never here", most)
    labels = shared["labels"]
    clear = Tile("labels", "in clear" if labels else "none", f"{labels or 'nothing'} alongside the items")
    failed = document["failed_controls"]
    good = "raw inputs are rebuilt, noise reveals nothing, a shuffled mark is not detected"
    held = Tile("controls", "failed" if failed else "hold", "; ".join(failed) or good, "bad" if failed else "good")
    return [left, mark, clear, held]


def _mood(best: Mapping[str, Any]) -> str:
    return "bad" if best["unexplained"] <= 0.5 else ""  # little variance left is bad; much of it left proves nothing


# Reconstruction


def _collect_decoders(document: Mapping[str, Any]) -> dict[str, Any]:
    part = document["reconstruction"]
    rows = [
        (row["what"], row["decoder"], row["note"] or WHAT.get(row["what"], ""), *format_errors(row))
        for row in [*part["rows"], part["guess"]]
    ]
    members = document["shared"]["inputs_per_item"]
    return {
        "table": Table(("decoder sees", "decoder", "", "MSE", "variance left", "SSIM"), rows, words=3),
        "caption": f"An item combines {members} inputs: the nearest one counts." if members > 1 else "",
    }


def _list_images(rebuilt: Rebuilt) -> list[list[dict[str, str | None]]]:
    """For each item the original, then each decoder's, as data URLs."""
    low, high = find_bounds(rebuilt)

    def encode(image: Tensor) -> str:
        rgb = to_pixels(image, low, high)
        return encode_png(np.concatenate([rgb, np.full((*rgb.shape[:2], 1), 255, np.uint8)], axis=2))

    return [
        [
            {"name": name, "source": encode(samples[row]), "mse": _format_mse(rebuilt, name, row)}
            for name, samples in rebuilt.shown.items()
        ]
        for row in range(len(rebuilt.shown["original"]))
    ]


def _collect_signals(rebuilt: Rebuilt) -> dict[str, Any]:
    """For each item the original, then each decoder's, with one line a channel."""
    count = min(MAX_SIGNALS, len(rebuilt.shown["original"]))
    num_lines = len(to_lines(rebuilt.shown["original"][0]))
    legend = [(f"f{place}", f"channel {channel + 1}") for place, channel in enumerate(rebuilt.channels[:num_lines])]
    return {
        "plot": Plot("Originals and reconstructions", "", "", legend, wide=True),
        "rows": [_draw_signals(rebuilt, row) for row in range(count)],
    }


def _draw_signals(rebuilt: Rebuilt, row: int) -> list[dict[str, str | None]]:
    signals = {name: to_lines(samples[row]) for name, samples in rebuilt.shown.items()}
    y = Axis.over([float(end) for lines in signals.values() for end in (lines.min(), lines.max())], "")
    last = signals["original"].shape[1] - 1
    x = Axis(0, last, choose_whole_ticks(0, last, 5))
    cells: list[dict[str, str | None]] = []
    for name, lines in signals.items():
        canvas = Canvas(x, y, f"{name} signal", width=372, height=150, bottom=20)
        for place, line in enumerate(lines.tolist()):
            canvas.line(list(enumerate(line)), f"l{place} thin")
        cells.append({"name": name, "svg": canvas.svg(), "mse": _format_mse(rebuilt, name, row)})
    return cells


def _format_mse(rebuilt: Rebuilt, name: str, row: int) -> str | None:
    return f"{rebuilt.shown_mse[name][row]:.3g}" if name in rebuilt.shown_mse else None


# Context


def _plot_context(document: Mapping[str, Any]) -> Plot:
    part = document["context"]
    sizes = part["sizes"]
    x = Axis(min(sizes) * 0.9, max(sizes) * 1.1, sizes, "items learned from", log=True)
    seen = [*part["shared"], *part["raw"], part["shuffled"], 40.0, 100.0]
    y = Axis.over(seen, "held-out items classified correctly", format_percent)
    canvas = Canvas(x, y, "context detection", width=WIDE, height=300, left=62)
    canvas.level(50.0, "chance")
    for name, style in (("raw", "l7"), ("shared", "l3")):
        points = list(zip(sizes, part[name], strict=True))
        canvas.line(points, style, tooltip=lambda point: f"{point[0]:,} items: {point[1]:.1f} %")
    canvas.line([(sizes[-1], part["shuffled"])], "l5", tooltip=lambda point: f"shuffled marks: {point[1]:.1f} %")
    legend = [("f3", SHARED), ("f7", f"{RAW} (control)"), ("f5", "shuffled marks (control)")]
    caption = (
        f"{pluralize(part['heldout'], 'held-out item')}; with 100 items or fewer, the mean of up to three samples."
    )
    return Plot("Is the mark detected?", canvas.svg(), caption, legend, wide=True)
