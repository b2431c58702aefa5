"""Writes attack.html: what the attacks on a run came to, as one page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from fedrpc.report.attack_picture import ends, is_image, lines, pixels
from fedrpc.report.markup import Figure, Tile, card, facts, section, table
from fedrpc.report.plots_learning import percent
from fedrpc.report.style import CSS
from fedrpc.report.svg import WIDE, Axis, Plot, png_of, whole_ticks
from fedrpc.report.words import counted
from fedrpc.study.attacks.evidence import NOISE, RAW, SHARED, UNTRAINED
from fedrpc.study.attacks.rebuilding import Rebuilt

_CSS = """
.verdict{border-left:4px solid var(--bad);font-size:16px}
.faces{display:grid;gap:10px 14px;grid-template-columns:repeat(auto-fill,minmax(330px,1fr))}
.face{display:grid;grid-template-columns:repeat(3,1fr);gap:6px;font-size:12px;color:var(--soft);text-align:center}
.face img{width:100%;aspect-ratio:1;image-rendering:pixelated;border-radius:4px;display:block}
.face.signal{gap:14px;margin-bottom:8px}
"""
MAX_SIGNALS = 6  # on the page; the picture has more
WHAT = {
    SHARED: "what the run has shared",
    RAW: "control: the input itself stands for the item, so it must come back",
    NOISE: "control: there is nothing in it, so it must come to the blind guess",
    UNTRAINED: "control: the same network with its initial weights, for comparison",
}


def shared_in_words(document: Mapping[str, Any]) -> str:
    """What was attacked: how many items of what, and how many of them are known."""
    part, aux = document["shared"], document["auxiliary"]
    shape = "x".join(map(str, part["shape"]))
    made_of = f", each of {part['inputs_per_item']} inputs" if part["inputs_per_item"] > 1 else ""
    lost = part["unknown"] + part["ambiguous"]
    why = f": {part['unknown']} equal no item made again, {part['ambiguous']} equal several" if lost else ""
    return (
        f"Shared: {counted(part['items'], 'item')} ({part['what']}; {shape} {part['dtype']}{made_of}). Traced to their "
        f"originals: {part['traced']:,}, not: {lost:,}{why}. Judged: {document['reconstruction']['judged']:,}. "
        f"The attacker's own data: {aux['train']:,} training examples that nobody shared, {aux['test']:,} of the test "
        "set."
    )


def figures_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """A row's error, its share of the guess's, and its similarity."""
    alike = "-" if row["ssim"] is None else f"{row['ssim']:.3f}"
    return f"{row['mse']:.3g}", f"{100 * row['unexplained']:.1f} %", alike


def page(document: Mapping[str, Any], rebuilt: Rebuilt) -> str:
    """The whole page."""
    run, settings = document["run"], document["settings"]
    chips = [
        *((name, run[name]) for name in ("partition", "model")),
        ("clients", run["num_clients"]),
        ("rounds", run["num_rounds"]),
        *((f"attack's {name}", settings[name]) for name in ("aux", "epochs", "seed")),
    ]
    worn = "".join(f"<span>{escape(name)} <b>{escape(str(value))}</b></span>" for name, value in chips)
    told = "".join(tile.html() for tile in _tiles(document))
    body = "".join([_verdict(document), _reconstruction(document, rebuilt), _context(document), _details(document)])
    title = f"Attack on {run['method']}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}{_CSS}</style></head><body>"
        f"<header><h1>{escape(title)} <small>on {escape(run['dataset'])}</small></h1>"
        f'<div class="chips">{worn}</div><div class="tiles">{told}</div></header>'
        f"<main>{body}</main><footer>run {escape(run['run_id'])} · model {escape(run['model_sha256'][:16])}</footer>"
        "</body></html>\n"
    )


def _tiles(document: Mapping[str, Any]) -> list[Tile]:
    rows = [row for row in document["reconstruction"]["rows"] if row["what"] == SHARED]
    best = min(rows, key=lambda row: float(row["mse"]))
    guess, part, shared = document["reconstruction"]["guess"], document["context"], document["shared"]
    alike = "" if best["ssim"] is None else f", SSIM {best['ssim']:.3f} against the guess's {guess['ssim']:.3f}"
    note = f"{best['decoder']} decoder: MSE {best['mse']:.3g} against {guess['mse']:.3g} of a blind guess{alike}"
    left = Tile("variance left after reconstruction", f"{100 * best['unexplained']:.1f} %", note, _mood(best))
    needed = part["enough_for_90"]["shared"]
    most = f"{part['shared'][-1]:.1f} % from {part['sizes'][-1]:,} items; raw inputs: {part['raw'][-1]:.1f} %"
    mark = Tile("items until a mark is seen in 90 %", f"{needed:,}" if needed else "never here", most)
    labels = shared["labels"]
    clear = Tile("labels", "in clear" if labels else "none", f"{labels or 'nothing'} beside the items")
    failed = document["failed_controls"]
    good = "raw inputs come back, noise gives nothing away, a shuffled mark is not seen"
    held = Tile("controls", "failed" if failed else "hold", "; ".join(failed) or good, "bad" if failed else "good")
    return [left, mark, clear, held]


def _mood(best: Mapping[str, Any]) -> str:
    return "bad" if best["unexplained"] <= 0.5 else ""  # little left is bad; much left proves nothing


def _verdict(document: Mapping[str, Any]) -> str:
    return section("What it comes to", "", [f'<div class="card wide verdict">{escape(document["verdict"])}</div>'])


# Reconstruction


def _reconstruction(document: Mapping[str, Any], rebuilt: Rebuilt) -> str:
    about = (
        "The attacker has the final model and examples of its own. It trains decoders from items back to inputs on "
        "these, then applies them to what the run has shared. Errors are in the data's own range; the variance left is "
        "the error over that of a blind guess: the mean input, without looking at the item."
    )
    part = document["reconstruction"]
    rows = [
        (row["what"], row["decoder"], row["note"] or WHAT.get(row["what"], ""), *figures_of(row))
        for row in [*part["rows"], part["guess"]]
    ]
    made = table(("decoder sees", "decoder", "", "MSE", "variance left", "SSIM"), rows, words=3)
    members = document["shared"]["inputs_per_item"]
    caption = f"An item is made of {members} inputs: the one that is nearest counts." if members > 1 else ""
    image = is_image(tuple(rebuilt.shown["original"].shape[1:]))
    looks = _images(rebuilt) if image else _signals(rebuilt)
    return section("Reconstruction", about, [looks, card("Decoders and controls", made, caption)])


def _images(rebuilt: Rebuilt) -> str:
    low, high = ends(rebuilt)
    count = len(rebuilt.shown["original"])

    def cell(name: str, row: int) -> str:
        rgb = pixels(rebuilt.shown[name][row], low, high)
        opaque = np.concatenate([rgb, np.full((*rgb.shape[:2], 1), 255, np.uint8)], axis=2)
        return f'<div><img alt="{escape(name)}" src="{png_of(opaque)}">{escape(name)}{_error(rebuilt, name, row)}</div>'

    faces = "".join(
        f'<div class="face">{"".join(cell(name, row) for name in rebuilt.shown)}</div>' for row in range(count)
    )
    return card("Originals and what was rebuilt", f'<div class="faces">{faces}</div>')


def _signals(rebuilt: Rebuilt) -> str:
    """An item a row: the original, then each decoder's, with one line a channel."""
    count = min(MAX_SIGNALS, len(rebuilt.shown["original"]))
    rows = "".join(f'<div class="face signal">{_signal(rebuilt, row)}</div>' for row in range(count))
    drawn = len(lines(rebuilt.shown["original"][0]))
    legend = [(f"f{place}", f"channel {channel + 1}") for place, channel in enumerate(rebuilt.channels[:drawn])]
    return Figure("Originals and what was rebuilt", rows, "", legend, wide=True).html()


def _signal(rebuilt: Rebuilt, row: int) -> str:
    values = {name: lines(samples[row]) for name, samples in rebuilt.shown.items()}
    y = Axis.over([float(end) for drawn in values.values() for end in (drawn.min(), drawn.max())], "")
    last = values["original"].shape[1] - 1
    cells = []
    for name, drawn in values.items():
        plot = Plot(Axis(0, last, whole_ticks(0, last, 5)), y, f"{name} signal", width=372, height=150, bottom=20)
        for place, line in enumerate(drawn.tolist()):
            plot.line(list(enumerate(line)), f"l{place} thin")
        cells.append(f"<div>{plot.svg()}{escape(name)}{_error(rebuilt, name, row)}</div>")
    return "".join(cells)


def _error(rebuilt: Rebuilt, name: str, row: int) -> str:
    return f"<br>MSE {rebuilt.shown_mse[name][row]:.3g}" if name in rebuilt.shown_mse else "<br>&nbsp;"


# Context


def _context(document: Mapping[str, Any]) -> str:
    about = (
        "Half of the inputs carry a mark: a coloured square in an image, a saturated stretch in a signal. A small "
        "network learns, from so many items as they would be shared, which of them were marked."
    )
    part = document["context"]
    sizes = part["sizes"]
    x = Axis(min(sizes) * 0.9, max(sizes) * 1.1, sizes, "items learned from", log=True)
    seen = [*part["shared"], *part["raw"], part["shuffled"], 40.0, 100.0]
    y = Axis.over(seen, "held-out items told right", percent)
    plot = Plot(x, y, "context detection", width=WIDE, height=300, left=62)
    plot.level(50.0, "chance")
    for name, style in (("raw", "l7"), ("shared", "l3")):
        points = list(zip(sizes, part[name], strict=True))
        plot.line(points, style, told=lambda point: f"{point[0]:,} items: {point[1]:.1f} %")
    plot.line([(sizes[-1], part["shuffled"])], "l5", told=lambda point: f"shuffled marks: {point[1]:.1f} %")
    legend = [("f3", SHARED), ("f7", f"{RAW} (control)"), ("f5", "shuffled marks (control)")]
    caption = f"{counted(part['heldout'], 'held-out item')}; with 100 items or fewer, the mean of up to three draws."
    return section("Context", about, [Figure("Is the mark seen?", plot.svg(), caption, legend, wide=True).html()])


def _details(document: Mapping[str, Any]) -> str:
    words = f"<p>{escape(shared_in_words(document))}</p>"
    cards = [
        card("What was attacked", words),
        card("Settings", facts(document["settings"].items()), "The same settings give the same figures.", wide=False),
    ]
    return section("How it was done", "", cards)
