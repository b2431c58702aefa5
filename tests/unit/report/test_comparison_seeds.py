"""Comparisons with several seeds, points of a grid and networks, of made-up runs whose every number is known."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedrpc.metrics.timing import TaskRow, to_json
from fedrpc.report.comparison import show_comparison, show_finished
from fedrpc.report.comparison_exports import escape, make_csv, make_latex
from fedrpc.report.comparison_page import render_page
from fedrpc.report.comparison_table import format_comparison
from fedrpc.report.figures import FIGURES, draw_figures
from fedrpc.study.cells import Cell, make_folder_name
from fedrpc.study.comparison import Comparison, Goals
from fedrpc.study.comparison_reading import read_comparison, read_folders

MakeRun = Callable[..., Path]
Make = Callable[..., Cell]
POINTS = (10 + 81.25 / 3, 10 + 81.25 * 2 / 3, 91.25)  # the accuracies of a made-up run of three rounds
ROUND_BYTES = 4 * (2 * (116_536 + 20 + 600) + 40)


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def make(tmp_path: Path, make_run: MakeRun) -> Make:
    """Called as make(method, seed, last, **more): a cell of a comparison in tmp_path, and its run directory."""

    def make_one(
        method: str,
        seed: int = 0,
        last: float = 60.0,
        *,
        point: dict[str, Any] | None = None,
        model: str = "",
        network: str = "zda-mnist",
        old: str = "",
        new: str = "",
    ) -> Cell:
        folder = tmp_path / make_folder_name(method, model, point or {}, seed)
        make_run(local_test=False).rename(folder)
        config = (folder / "config.toml").read_text().replace('method = "fedavg"', f'method = "{method}"')
        config = config.replace("seed = 7", f"seed = {seed}").replace('"zda-mnist"', f'"{network}"')
        (folder / "config.toml").write_text(config.replace(old, new, 1) if old else config)

        def change(summary: dict[str, Any]) -> None:
            summary |= {"method": method, "seed": seed, "model": network}
            summary["accuracy"]["global"] = last

        change_json(folder / "summary.json", change)
        change_json(folder / "partition.json", lambda table: table.update(sha256=f"{seed:064x}"))
        return Cell(method, seed, Path(folder.name), point or {}, model)

    return make_one


def print_table(document: dict[str, Any], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(format_comparison(document))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def read(tmp_path: Path, cells: list[Cell], goals: Goals | None = None) -> Comparison:
    return read_comparison(tmp_path, cells, goals=goals or Goals())


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in document["methods"]}


# Seeds


def test_seeds_share_a_row_and_differences_are_paired(tmp_path: Path, make: Make) -> None:
    """FedAvg's accuracies swing by 20 points and the method's with them: only pairs show the difference."""
    cells = [make("fedavg", seed, last) for seed, last in ((0, 40.0), (1, 50.0), (2, 60.0))]
    cells += [make("flea", seed, last) for seed, last in ((0, 44.0), (1, 55.0), (2, 66.0))]
    document = read(tmp_path, cells).document
    flea = by_name(document)["flea"]
    assert [run["seed"] for run in flea["runs"]] == document["seeds"] == [0, 1, 2]
    assert flea["accuracy"]["last"] == 55.0
    assert flea["statistics"]["last"] == {"mean": 55.0, "sd": 11.0, "n": 3}
    found = flea["difference"]["last"]
    assert (found["mean"], found["sd"], found["n"]) == (5.0, 1.0, 3)
    assert found["low"] == pytest.approx(5 - 4.302653 / 3**0.5)
    assert (found["better"], found["worse"], found["sign_p"]) == (3, 0, 0.25)
    assert document["same"]["partition_sha256"] is None
    text = print_table(document)
    assert "seeds 0-2" in text
    assert "55.00 ± 11.00" in text
    assert re.search(r"flea +fedavg +3 +\+5\.00 +\+2\.52 to \+7\.48 +3, 0 +0\.25", text)
    assert max(map(len, text.splitlines())) <= 80


def test_one_seed_has_no_interval_and_no_spread(tmp_path: Path, make: Make) -> None:
    document = read(tmp_path, [make("fedavg", 0, 50.0), make("flea", 0, 60.0)]).document
    flea = by_name(document)["flea"]
    assert flea["statistics"]["last"] == {"mean": 60.0, "sd": None, "n": 1}
    assert flea["difference"]["last"]["mean"] == 10.0
    assert flea["difference"]["last"]["low"] is None
    text = print_table(document)
    assert "±" not in text
    assert "interval" not in text


def test_a_seed_that_fedavg_lacks_makes_no_pair(tmp_path: Path, make: Make) -> None:
    cells = [make("fedavg", 0, 50.0), make("flea", 0, 60.0), make("flea", 1, 99.0)]
    flea = by_name(read(tmp_path, cells).document)["flea"]
    assert (flea["difference"]["last"]["n"], flea["difference"]["last"]["mean"]) == (1, 10.0)
    assert flea["statistics"]["last"]["n"] == 2


def test_a_run_with_another_seed_than_planned_is_refused(tmp_path: Path, make: Make) -> None:
    cell = make("fedavg", 0, old="seed = 0", new="seed = 3")
    [failure] = read(tmp_path, [cell]).failures
    assert failure.reason.startswith("its seed is 3, expected 0")


# Grids and networks


def test_points_of_a_grid_have_rows_and_a_baseline_at_the_same_point(tmp_path: Path, make: Make) -> None:
    cells = []
    for lr, fedavg, flea in ((0.1, 40.0, 45.0), (0.2, 50.0, 49.0)):
        change = {"old": "lr = 0.02", "new": f"lr = {lr}"}
        cells.append(make("fedavg", 0, fedavg, point={"train.lr": lr}, **change))
        cells.append(make("flea", 0, flea, point={"train.lr": lr, "params.layer": 1}, **change))
    document = read(tmp_path, cells).document
    assert not document["failed"]
    assert document["grid"] == {"train.lr": [0.1, 0.2], "params.layer": [1]}
    rows = by_name(document)
    assert rows["flea, train.lr=0.1, params.layer=1"]["baseline"] == "fedavg, train.lr=0.1"
    assert rows["flea, train.lr=0.1, params.layer=1"]["difference"]["last"]["mean"] == 5.0
    assert rows["flea, train.lr=0.2, params.layer=1"]["difference"]["last"]["mean"] == -1.0
    text = print_table(document)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert render_page(document).count("train.lr=0.2") >= 2


def test_a_setting_that_is_not_in_the_grid_must_be_the_same(tmp_path: Path, make: Make) -> None:
    cells = [make("fedavg", 0), make("flea", 0, old="lr = 0.02", new="lr = 0.5")]
    [failure] = read(tmp_path, cells).failures
    assert "train.lr is 0.5" in failure.reason


def test_overhead_is_against_fedavg_on_the_same_network(tmp_path: Path, make: Make) -> None:
    cells = [make("fedavg", 0), make("fedavg", 0, model="dpms", network="dpms")]
    cells.append(make("feddpms", 0, model="dpms", network="dpms"))
    for cell, factor in ((cells[1], 2), (cells[2], 3)):

        def change(summary: dict[str, Any], factor: int = factor) -> None:
            for side in ("down", "up"):
                summary["bytes"]["method"][side]["tensor"] *= factor

        change_json(tmp_path / cell.run / "summary.json", change)
    document = read(tmp_path, cells).document
    rows = by_name(document)
    assert rows["feddpms on dpms"]["overhead"] == 1.5
    assert rows["feddpms on dpms"]["cost"]["communication"]["ratio"] == 1.5
    assert rows["feddpms on dpms"]["needs_model"]
    assert not rows["fedavg on dpms"]["needs_model"]
    assert document["setting"]["model"] == "zda-mnist"
    assert "feddpms needs the network dpms" in " ".join(print_table(document).split())


# Targets, budgets and costs


def test_targets_are_told_over_the_seeds_that_reached_them(tmp_path: Path, make: Make) -> None:
    cells = [make("fedavg", seed) for seed in (0, 1)]

    def slow(path: Path) -> None:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for line in rows:
            if "accuracy" in line:
                line["accuracy"] = min(line["accuracy"], 70.0)
        path.write_text("".join(json.dumps(line) + "\n" for line in rows))

    slow(tmp_path / cells[1].run / "records.jsonl")
    document = read(tmp_path, cells, Goals([60, 90, 99], 2 * ROUND_BYTES + 1)).document
    [entry] = document["methods"]
    assert [(each["reached"], each["of"]) for each in entry["targets"]] == [(2, 2), (1, 2), (0, 2)]
    both, one, none = entry["targets"]
    assert both["rounds"] == {"mean": 2.0, "sd": 0.0, "n": 2}
    assert both["bytes"]["mean"] == 2 * ROUND_BYTES
    assert both["seconds"]["mean"] == 3.0, "a round takes 1.5 s"
    assert one["rounds"] == {"mean": 3.0, "sd": None, "n": 1}
    assert none["rounds"] is none["bytes"] is None
    assert entry["at_budget"]["mean"] == pytest.approx(POINTS[1])
    text = print_table(document)
    assert re.search(r"to 90 % .*\n.*1 of 2 +3", text)
    assert re.search(r"to 99 % .*\n.*never, best 91\.25 %", text)
    assert re.search(r"within 1\.87 MB .*\n.*64\.17 ± 0\.00", text)


def test_times_over_a_link_stand_beside_those_that_were_measured(tmp_path: Path, make: Make) -> None:
    cells = [make("fedavg"), make("flea")]
    tasks = [
        TaskRow(index, "fit", 0, client, 0, "answered", queue_s=0, download_s=0, compute_s=2.0, upload_s=0)
        for index in range(3)
        for client in range(4)
    ]
    (tmp_path / cells[0].run / "timing.jsonl").write_text("".join(to_json(row) + "\n" for row in tasks))
    document = read(tmp_path, cells, Goals([60, 99], link="rtt=500ms")).document
    rows = by_name(document)
    assert rows["fedavg"]["time"]["predicted"] == pytest.approx(3 * (2.0 + 0.5)), "half a round trip each way"
    assert rows["fedavg"]["time"]["link"] == document["link"] == "rtt=500ms"
    assert rows["flea"]["time"]["predicted"] is None, "it did not measure time"
    assert rows["fedavg"]["runs"][0]["predicted"]["until"] == pytest.approx([2.5, 5.0, 7.5]), "of each evaluation"
    reached, never = rows["fedavg"]["targets"]
    assert reached["predicted"]["mean"] == pytest.approx(2.5 * reached["rounds"]["mean"])
    assert never["predicted"] is None
    text = print_table(document)
    assert re.search(r"predicted *\n.*over rtt=500ms *\n", text)
    assert re.search(r"fedavg .* 7\.5 *\n", text)
    first, second = csv.DictReader(io.StringIO(make_csv(document)))
    assert (first["seconds_predicted"], first["link"], second["seconds_predicted"]) == ("7.5", "rtt=500ms", "")
    assert read(tmp_path, cells).document["methods"][0]["time"]["predicted"] is None, "nobody named a link"


def test_cpu_and_memory_of_clients_stand_beside_fedavgs(tmp_path: Path, make: Make) -> None:
    cells = [make("fedavg"), make("flea"), make("moon")]
    for cell, cpu in ((cells[0], 10.0), (cells[1], 25.0)):
        tasks = {"cpu": cpu, "peak_bytes": 10_000_000}
        change_json(tmp_path / cell.run / "summary.json", lambda summary, t=tasks: summary.update(time={"tasks": t}))
    change_json(tmp_path / cells[2].run / "summary.json", lambda summary: summary.pop("time"))  # of an earlier version
    document = read(tmp_path, cells).document
    rows = by_name(document)
    assert rows["flea"]["cost"]["computation"] == {"value": 25.0, "ratio": 2.5}
    assert rows["flea"]["cost"]["memory"] == {"value": 10_000_000, "ratio": 1.0}
    assert rows["moon"]["cost"]["computation"] == {"value": None, "ratio": None}
    assert rows["moon"]["time"] == {"measured": 321.0, "predicted": None, "link": None}
    assert re.search(r"flea .* 25\.0 s +2\.500 +10\.00 MB +1\.000", print_table(document))


def test_a_run_that_a_budget_stopped_is_told_and_its_overhead_is_of_its_own_rounds(tmp_path: Path, make: Make) -> None:
    cells = [make("fedavg"), make("flea")]
    stopped = {"byte_budget": 1_000_000, "message_bytes": 1_500_000}
    change_json(tmp_path / cells[1].run / "summary.json", lambda summary: summary.update(num_rounds=2, stopped=stopped))
    document = read(tmp_path, cells).document
    flea = by_name(document)["flea"]
    assert flea["overhead"] == flea["cost"]["communication"]["ratio"] == 1.25, "by the formula for two rounds"
    assert flea["runs"][0]["stopped"] == stopped
    words = "flea: stopped after 2 rounds with 1.50 MB of messages, over the byte budget of 1.00 MB"
    assert words in " ".join(print_table(document).split())
    assert document["setting"]["num_rounds"] == 3


# Finished runs of any folders


def test_runs_of_any_folders_are_named_after_what_differs(tmp_path: Path, make: Make) -> None:
    cells = [make("fedavg", 0), make("flea", 0, old="lr = 0.02", new="lr = 0.5"), make("flea", 1)]
    found = read_folders([tmp_path / cell.run for cell in cells], Path(), Goals())
    assert [cell.row for cell, _ in found.runs] == [
        "fedavg, train.lr=0.02",
        "flea, train.lr=0.5",
        "flea, train.lr=0.02",
    ]
    assert found.differs == ["different train.lr: 0.02, 0.5"]
    assert "warning: different train.lr: 0.02, 0.5" in print_table(found.document)


def test_runs_that_differ_in_their_seed_alone_share_a_row(tmp_path: Path, make: Make) -> None:
    cells = [make(method, seed) for seed in (0, 1) for method in ("fedavg", "flea")]
    found = read_folders([tmp_path / cell.run for cell in cells], Path(), Goals())
    assert found.differs == []
    assert [len(entry["runs"]) for entry in found.document["methods"]] == [2, 2]


def test_the_same_run_twice_is_told_apart_by_its_folder(tmp_path: Path, make: Make) -> None:
    one = tmp_path / make("fedavg").run
    shutil.copytree(one, tmp_path / "copy")
    found = read_folders([one, tmp_path / "copy"], Path(), Goals())
    assert [cell.note for cell, _ in found.runs] == [str(one), str(tmp_path / "copy")]


def test_other_data_and_other_partitions_are_shown_with_a_warning(tmp_path: Path, make: Make) -> None:
    cells = [make("fedavg"), make("flea"), make("moon", old='dataset = "fmnist-mini"', new='dataset = "mnist"')]
    change_json(tmp_path / cells[1].run / "partition.json", lambda table: table.update(sha256="00" * 32))
    found = read_folders([tmp_path / cell.run for cell in cells], Path(), Goals())
    assert found.differs[0] == "different dataset: fmnist-mini, mnist; their accuracies are of different tasks"
    change_json(tmp_path / cells[1].run / "partition.json", lambda table: table.update(sha256="11" * 32))
    found = read_folders([tmp_path / cell.run for cell in cells], Path(), Goals())
    assert any(line.startswith("partitions differ though their settings do not") for line in found.differs)


def test_an_unfinished_run_is_told_and_a_comparison_stands_for_its_runs(tmp_path: Path, make: Make) -> None:
    cells = [make("fedavg"), make("flea"), make("moon")]
    quiet = Console(file=io.StringIO())
    show_comparison(read(tmp_path, cells), quiet)
    (tmp_path / cells[2].run / "summary.json").unlink()
    lone = tmp_path / "lone"
    (tmp_path / cells[1].run).rename(lone)
    found = read_folders([tmp_path, lone, tmp_path / cells[2].run], tmp_path / "out", Goals())
    assert [cell.method for cell, _ in found.runs] == ["fedavg", "flea"]
    assert "not finished" in found.failures[0].reason
    show_comparison(found, quiet)
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [entry["runs"][0]["run"] for entry in written["methods"]] == [f"../{cells[0].run}", "../lone"]
    show_finished([tmp_path / "out"], quiet)
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == written


# Exports


def test_the_csv_has_a_line_for_each_run(tmp_path: Path, make: Make) -> None:
    cells = [make(method, seed, 50.0 + seed) for seed in (0, 1) for method in ("fedavg", "flea")]
    rows = list(csv.DictReader(io.StringIO(make_csv(read(tmp_path, cells, Goals([60, 99])).document))))
    assert [(row["method"], row["seed"], row["accuracy_last"]) for row in rows] == [
        ("fedavg", "0", "50.0"),
        ("fedavg", "1", "51.0"),
        ("flea", "0", "50.0"),
        ("flea", "1", "51.0"),
    ]
    assert rows[0]["rounds_to_60"] == "2"
    assert rows[0]["rounds_to_99"] == ""
    assert rows[0]["message_bytes"] == str(3 * ROUND_BYTES)


def test_the_latex_table_compiles_where_latex_is(tmp_path: Path, make: Make) -> None:
    cells = [make(method, seed, 50.0 + seed) for seed in (0, 1) for method in ("fedavg", "flea")]
    text = make_latex(read(tmp_path, cells, Goals([60])).document)
    lines = text.splitlines()
    widths = {line.count(" & ") for line in lines if line.endswith(r" \\")}
    assert widths == {len(lines[1].split("{")[-1].rstrip("}")) - 1}, "as many cells as columns"
    assert r"50.50 $\pm$ 0.71" in text
    assert escape("a_b & 50 %") == r"a\_b \& 50 \%"
    if latex := shutil.which("pdflatex"):
        page = r"\documentclass{article}\usepackage{booktabs}\begin{document}" + text + r"\end{document}"
        (tmp_path / "page.tex").write_text(page)
        subprocess.run([latex, "-halt-on-error", "page.tex"], cwd=tmp_path, check=True, capture_output=True)


def test_figures_are_drawn_as_pdf_and_svg_and_the_same_each_time(tmp_path: Path, make: Make) -> None:
    cells = [make(method, seed) for seed in (0, 1) for method in ("fedavg", "flea")]
    document = read(tmp_path, cells).document
    names = draw_figures(document, tmp_path / "one")
    draw_figures(document, tmp_path / "two")
    assert names == list(FIGURES)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    assert sorted(path.suffix for path in (tmp_path / "one").iterdir()) == 3 * [".pdf"] + 3 * [".svg"]
    assert "flea" in (tmp_path / "one" / "accuracy-bytes.svg").read_text()
