"""Shows what the attacks on a finished run came to: tables, attack.json, attack.png and the page attack.html.

attack.json (errors in the squared unit of the data, accuracies in percent; `null` where a figure does not exist):
`run` and `settings`; `shared` what was attacked and how much of it could be traced to its originals; `auxiliary` the
attacker's own data; `reconstruction` with a row for each decoder and kind of items, and the guess without looking;
`context` the share of held-out items told right, by `sizes`; `failed_controls`; `verdict`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedrpc.files import explain_unwritable, write_atomically
from fedrpc.report import attack_page
from fedrpc.report.attack_picture import draw
from fedrpc.report.words import counted
from fedrpc.study.attacks.evidence import NOISE, RAW, SHARED, UNTRAINED
from fedrpc.study.attacks.rebuilding import Rebuilt

EXPECTED = {RAW: "0 %", NOISE: "100 %"}  # of the variance; what else is shown is not known beforehand


def show_attack(folder: Path, document: Mapping[str, Any], rebuilt: Rebuilt, console: Console) -> None:
    """Prints the tables, writes attack.json, attack.png and attack.html into the run directory, says where they are."""
    _write(folder / "attack.json", json.dumps(document, indent=1) + "\n")
    _write(folder / "attack.html", attack_page.page(document, rebuilt))
    with explain_unwritable(folder / "attack.png"):
        draw(rebuilt, folder / "attack.png", title_of(document))
    render(document, console)
    where = f"figures: {folder}/attack.json\npicture: {folder}/attack.png\npage: {folder}/attack.html"
    console.print(Text(where), soft_wrap=True)


def title_of(document: Mapping[str, Any]) -> str:
    """What was attacked, in a few words."""
    run = document["run"]
    return f"attack on {run['method']}, {run['dataset']}, {run['partition']}, {counted(run['num_rounds'], 'round')}"


def render(document: Mapping[str, Any], console: Console) -> None:
    """Prints both tables and the verdict."""
    console.print(Text(f"\n{title_of(document)}", style="bold"))
    console.print(Text(attack_page.shared_in_words(document)))
    console.print(_reconstruction(document))
    console.print(_context(document))
    style = "bold red" if document["failed_controls"] else "bold"
    console.print(Text(document["verdict"], style=style))


def _reconstruction(document: Mapping[str, Any]) -> Table:
    made = Table(title="Reconstruction", title_justify="left", header_style="bold")
    made.add_column("decoder sees")
    made.add_column("decoder")
    for name in ("MSE", "variance\nleft", "expected", "SSIM"):
        made.add_column(name, justify="right")
    part = document["reconstruction"]
    for row in [*part["rows"], part["guess"]]:
        if row is part["guess"] or (row["decoder"] == "linear" and row["what"] != SHARED):
            made.add_section()
        what = f"control: {row['what']}" if row["what"] in (RAW, NOISE, UNTRAINED) else row["what"]
        mse, left, alike = attack_page.figures_of(row)
        values = (row["decoder"], mse, left, EXPECTED.get(row["what"], ""), alike)
        made.add_row(what, *values, style="bold" if row["what"] == SHARED else "")
    return made


def _context(document: Mapping[str, Any]) -> Table:
    part = document["context"]
    made = Table(title="A mark in held-out items, % told right", title_justify="left", header_style="bold")
    made.add_column("items learned from")
    for size in part["sizes"]:
        made.add_column(f"{size:,}", justify="right")
    made.add_column("expected", justify="right")
    made.add_row(SHARED, *(f"{value:.1f}" for value in part["shared"]), "", style="bold")
    made.add_row(f"control: {RAW}", *(f"{value:.1f}" for value in part["raw"]), "100")
    blank = [""] * (len(part["sizes"]) - 1)
    made.add_row("control: shuffled", *blank, f"{part['shuffled']:.1f}", "50")
    return made


def _write(path: Path, text: str) -> None:
    with explain_unwritable(path):
        write_atomically(path, text)
