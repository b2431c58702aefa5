"""Shows what a check of a GPU found, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrpc.files import write_atomically
from fedrpc.report.words import write_markdown_row

NAME = "gpu-check"
_PARTS = ("speed", "failed", "unfinished")  # of a network's result, each by way of training


def write_report(found: Mapping[str, Any], folder: Path) -> None:
    """Writes gpu-check.json and gpu-check.md."""
    write_atomically(folder / f"{NAME}.json", json.dumps(found, indent=1) + "\n")
    write_atomically(folder / f"{NAME}.md", render_report(found))


def render_report(found: Mapping[str, Any]) -> str:
    """The findings as Markdown."""
    device, context = found["device"], found["context_bytes"]
    faults = found["faults"]
    lines = [
        f"# {device['name']}, torch {device['torch']}" + (f", CUDA {device['cuda']}" if "cuda" in device else ""),
        "",
        "Everything is as it should be." if not faults else "Not as it should be:",
        *(f"- {fault}" for fault in faults),
        "",
        *([f"A process takes {context / 2**20:.0f} MiB of it before it computes.", ""] if context is not None else []),
        *_tabulate(
            ("method", "runs", "the same bits twice", "differs from the CPU by", "nudged by", "seconds", "on the CPU"),
            [_list_method(each) for each in found["methods"]],
        ),
        "",
        "Differences are shares of how far the CPU's model moved. Nudged: by how much the CPU's own model differs when "
        "its learning rate is larger by one part in a million, which tells how far a method carries any rounding.",
        "",
        *_tabulate_networks(found["networks"], found["ways"], found["limit_s"]),
        "",
        f"Compiled: {', '.join(found['compiled']) or 'none'} (--compile names others).",
    ]
    return "\n".join(lines) + "\n"


def _list_method(each: Mapping[str, Any]) -> list[str]:
    if each["failed"]:
        return [each["method"], "no", *["-"] * 5]
    times = [f"{seconds:.1f}" for seconds in each["seconds"]]
    differences = [f"{each[name]:.2g}" for name in ("difference", "nudged")]
    return [each["method"], "yes", "yes" if each["repeats"] else "no", *differences, *times]


def _tabulate_networks(networks: Sequence[Mapping[str, Any]], ways: Sequence[str], limit_s: float) -> Iterable[str]:
    tried = {way for each in networks for part in _PARTS for way in each[part]}
    ways = [way for way in ways if way in tried]
    rows = [
        [
            each["network"],
            str(each["batch_size"]),
            "-" if each["difference"] is None else f"{each['difference']:.2g}",
            *(_show_speed(each, way, limit_s) for way in ways),
        ]
        for each in networks
    ]
    head = ("examples a second", "batch", "differs by", *("CPU, fp32" if way == "cpu" else way for way in ways))
    return _tabulate(head, rows)


def _show_speed(each: Mapping[str, Any], way: str, limit_s: float) -> str:
    if way in each["speed"]:
        return f"{each['speed'][way]:,.0f}"
    if way in each["unfinished"]:
        return f"not finished in {limit_s:g} s"
    return "failed" if way in each["failed"] else "-"


def _tabulate(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown."""
    return [write_markdown_row(*row) for row in (head, ["---", *["---:"] * (len(head) - 1)], *rows)]
