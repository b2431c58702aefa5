"""The table of predicted times."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from fedrpc.emulation.conditions import Conditions
from fedrpc.emulation.link import parse_link
from fedrpc.report.whatif import show_prediction
from tests.unit.study.test_whatif import make_run


def show(run_folder: Path, link: str) -> str:
    (run_folder / "conditions.json").write_text(json.dumps({"clients": [{"link": link}, {"link": link}]}))
    run = make_run(run_folder, title="flea on fmnist-mini")
    console = Console(file=io.StringIO(), width=80)
    show_prediction(run, [Conditions(parse_link(link))] * 2, console, cores=2, targets=[])
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_link_with_a_long_name_leaves_room_for_the_names_of_the_rows(tmp_path: Path) -> None:
    shown = show(tmp_path, "down=20mbit,up=5mbit,rtt=60ms,jitter=10ms,loss=1%")
    for name in ("a round", "  download", "all rounds", "on its own machine", "on its own links"):
        assert name in shown
    assert "…" not in shown


def test_a_preset_is_named_above_what_was_measured_on_it(tmp_path: Path) -> None:
    assert "4g   on its own machine" in show(tmp_path, "4g")
