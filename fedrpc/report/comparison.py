"""Shows comparisons: the table on the terminal, and the files compare.json, .html, .csv and .tex.

`study/comparison.py` documents compare.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fedrpc.errors import ConfigError
from fedrpc.files import explain_unwritable, write_atomically
from fedrpc.report.comparison_exports import make_csv, make_latex
from fedrpc.report.comparison_page import render_page
from fedrpc.report.comparison_table import format_comparison, tabulate_failures
from fedrpc.report.comparison_words import has_several_runs
from fedrpc.report.page import show_runs
from fedrpc.study.comparison import Comparison
from fedrpc.study.comparison_reading import read_again


def show_comparison(found: Comparison, console: Console, *, write: bool = True, figures: bool = False) -> None:
    """Prints the table of a comparison, and writes its files.

    Args:
        write: Whether to write them.
        figures: Whether to draw figures, too.
    """
    if not found.runs:
        console.print(tabulate_failures(found.document["failed"]))
        return
    document, folder = found.document, found.folder
    console.print(format_comparison(document))
    if not write:
        console.print(Text("--out DIR writes values, page, table and figures of this comparison into a folder"))
        return
    write_comparison(found)
    lines = [f"values: {folder}/compare.json, .csv, .tex", f"page: {folder}/compare.html"]
    if found.planned:
        lines.insert(0, f"run directories: {folder}/<method>{',...' if has_several_runs(document) else ''}")
    if figures:
        names = _draw_figures(document, folder / "figures")
        lines.append(f"figures: {folder}/figures/{{{','.join(names)}}}.{{pdf,svg}}")
    console.print(Text("\n".join(lines)), soft_wrap=True)


def write_comparison(found: Comparison) -> Path:
    """Writes the files of a comparison into its folder; returns the page's path."""
    document, folder = found.document, found.folder
    with explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files = {
        "compare.json": json.dumps(document, indent=1) + "\n",
        "compare.html": render_page(document),
        "compare.csv": make_csv(document),
        "compare.tex": make_latex(document),
    }
    for name, text in files.items():
        with explain_unwritable(folder / name):
            write_atomically(folder / name, text)
    return folder / "compare.html"


def _draw_figures(document: dict[str, Any], folder: Path) -> list[str]:
    try:  # slow to import, and only needed here
        from fedrpc.report.figures import draw_figures
    except ImportError:
        raise ConfigError("figures need matplotlib, which is not installed: pip install matplotlib") from None
    return draw_figures(document, folder)


def show_finished(folders: Sequence[Path], console: Console) -> None:
    """Prints the tables of finished runs and comparisons, and rewrites their pages."""
    compared = [folder for folder in folders if (folder / "compare.json").is_file()]
    show_runs([folder for folder in folders if folder not in compared], console)
    for folder in compared:
        show_comparison(read_again(folder), console)
