"""Shows the result of the attacks on a finished run: tables, attack.json, attack.png and the page attack.html.

attack.json (errors in the squared unit of the data, accuracies in percent; `null` where a value does not exist):
`run` and `settings`; `shared` what was attacked and how much of it could be traced to its originals; `auxiliary` the
attacker's own data; `reconstruction` with a row for each decoder and kind of items, and the guess without looking;
`context` the share of held-out items classified correctly, by `sizes`; `failed_controls`; `verdict`.
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
from fedrpc.report.attack_picture import write_picture
from fedrpc.report.words import pluralize
from fedrpc.study.attacks.evidence import NOISE, RAW, SHARED, UNTRAINED
from fedrpc.study.attacks.rebuilding import Rebuilt

EXPECTED = {RAW: "0 %", NOISE: "100 %"}  # of the variance; nothing is known beforehand of the other rows


def show_attack(folder: Path, document: Mapping[str, Any], rebuilt: Rebuilt, console: Console) -> None:
    """Prints the tables, and writes attack.json, attack.png and attack.html into the run directory."""
    _write(folder / "attack.json", json.dumps(document, indent=1) + "\n")
    _write(folder / "attack.html", attack_page.render_page(document, rebuilt))
    with explain_unwritable(folder / "attack.png"):
        write_picture(rebuilt, folder / "attack.png", make_title(document))
    print_attack(document, console)
    where = f"values: {folder}/attack.json\npicture: {folder}/attack.png\npage: {folder}/attack.html"
    console.print(Text(where), soft_wrap=True)


def make_title(document: Mapping[str, Any]) -> str:
    """What was attacked, in a few words."""
    run = document["run"]
    return f"attack on {run['method']}, {run['dataset']}, {run['partition']}, {pluralize(run['num_rounds'], 'round')}"


def print_attack(document: Mapping[str, Any], console: Console) -> None:
    """Prints both tables and the verdict."""
    console.print(Text(f"\n{make_title(document)}", style="bold"))
    console.print(Text(attack_page.describe_shared(document)))
    console.print(_tabulate_reconstruction(document))
    console.print(_tabulate_context(document))
    style = "bold red" if document["failed_controls"] else "bold"
    console.print(Text(document["verdict"], style=style))


def _tabulate_reconstruction(document: Mapping[str, Any]) -> Table:
    table = Table(title="Reconstruction", title_justify="left", header_style="bold")
    table.add_column("decoder sees")
    table.add_column("decoder")
    for name in ("MSE", "variance\nleft", "expected", "SSIM"):
        table.add_column(name, justify="right")
    part = document["reconstruction"]
    for row in [*part["rows"], part["guess"]]:
        if row is part["guess"] or (row["decoder"] == "linear" and row["what"] != SHARED):
            table.add_section()
        what = f"control: {row['what']}" if row["what"] in (RAW, NOISE, UNTRAINED) else row["what"]
        mse, left, alike = attack_page.format_errors(row)
        values = (row["decoder"], mse, left, EXPECTED.get(row["what"], ""), alike)
        table.add_row(what, *values, style="bold" if row["what"] == SHARED else "")
    return table


def _tabulate_context(document: Mapping[str, Any]) -> Table:
    part = document["context"]
    table = Table(title="A mark in held-out items, % classified correctly", title_justify="left", header_style="bold")
    table.add_column("items learned from")
    for size in part["sizes"]:
        table.add_column(f"{size:,}", justify="right")
    table.add_column("expected", justify="right")
    table.add_row(SHARED, *(f"{value:.1f}" for value in part["shared"]), "", style="bold")
    table.add_row(f"control: {RAW}", *(f"{value:.1f}" for value in part["raw"]), "100")
    blank = [""] * (len(part["sizes"]) - 1)
    table.add_row("control: shuffled", *blank, f"{part['shuffled']:.1f}", "50")
    return table


def _write(path: Path, text: str) -> None:
    with explain_unwritable(path):
        write_atomically(path, text)
