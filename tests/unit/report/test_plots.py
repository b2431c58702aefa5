from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedrpc.report import plots_bytes, plots_learning, plots_partition
from fedrpc.report.markup import render
from fedrpc.report.style import KIND_FILLS
from fedrpc.report.svg import thin
from fedrpc.report.table import format_size_tick
from fedrpc.study.reading import read_run
from fedrpc.wire.kinds import Kind

MakeRun = Callable[..., Path]
CSS = render("style.css.j2")


def test_thinning_keeps_the_ends() -> None:
    assert thin([1, 2, 3], 3) == [1, 2, 3]
    assert thin(range(1000), 5) == [0, 250, 500, 749, 999]


def test_local_losses_are_a_median_and_bands(make_run: MakeRun) -> None:
    """Client c of 5 has a loss of c / 100 more than the first, in every epoch."""
    run = read_run(make_run(clients=5, rounds=3, epochs=2))
    epochs = plots_learning.collect_epochs(run.local_losses)
    assert [where for where, _ in epochs] == [0.5, 1, 1.5, 2, 2.5, 3]
    assert [round(value, 4) for value in epochs[1][1]] == [2.1667, 2.1767, 2.1867, 2.1967, 2.2067]
    plot = plots_learning.plot_local_losses(run)
    assert plot is not None
    assert plot.svg.count('<polygon class="band f0"') == 2
    assert re.findall(r'<polyline class="(\w+)" points="([^"]*)"', plot.svg)[0][0] == "l0"
    assert "round 1: median 2.187 of 5 clients" in plot.svg


def test_losses_of_one_client_have_no_band(make_run: MakeRun) -> None:
    plot = plots_learning.plot_local_losses(read_run(make_run(clients=1, rounds=3)))
    assert plot is not None
    assert "polygon" not in plot.svg


def test_the_worst_tenth_of_the_clients_is_marked(make_run: MakeRun) -> None:
    plot = plots_learning.plot_clients(read_run(make_run(clients=25)))
    assert plot is not None
    worst = re.findall(r'<rect class="f3"[^>]*><title>client (\d+):', plot.svg)
    assert worst == ["0", "1", "2"]


def test_bytes_spent_at_a_round_are_those_of_the_method_up_to_it(make_run: MakeRun) -> None:
    run = read_run(make_run(clients=2, rounds=3, weights=1000))
    spent = [size_bytes for _, size_bytes, _ in plots_bytes.list_spending(run)]
    one_round = 2 * (2 * (1020 + 600) + 40)
    assert spent == [one_round, 2 * one_round, 3 * one_round]
    method = run.summary["bytes"]["method"]
    assert spent[-1] == method["down"]["message"] + method["up"]["message"]


def test_targets_are_described_with_the_first_round_that_reached_them() -> None:
    points = [(0, 10, 35.0), (1, 20, 52.0), (2, 30, 49.0), (3, 40, 71.0), (4, 50, 88.0)]
    expected = "Reached 50 % after 20 B (round 1), 70 % after 40 B (round 3), 80 % after 50 B (round 4)."
    assert plots_bytes.describe_targets(points) == expected
    assert plots_bytes.describe_targets([(0, 10, 9.0)]) == ""


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (2e6, "2 MB"), (2.5e9, "2.5 GB"), (500, "500 B")])
def test_sizes_on_an_axis_are_short(value: float, text: str) -> None:
    assert format_size_tick(value) == text


def test_every_kind_has_a_colour_in_the_style_sheet() -> None:
    assert set(KIND_FILLS) == {kind.label for kind in Kind}
    colours = [re.search(rf"\.{style}{{fill:var\(--(k\d+)\)}}", CSS) for style in KIND_FILLS.values()]
    assert len({match.group(1) for match in colours if match}) == len(Kind)


def test_lines_are_never_filled() -> None:
    rules = dict(re.findall(r"(polyline[\w.]*|\.ink)\{([^}]*)\}", CSS))
    assert "fill:none" in rules["polyline"]
    assert "fill:none" in rules["polyline.ink"]  # .ink alone fills


@pytest.mark.parametrize("style", ["f0", "f9", "l0", "l9"])
def test_every_series_has_a_colour_for_light_and_dark(style: str) -> None:
    assert f".{style}{{" in CSS
    assert CSS.count(f"--s{style[1]}:#") == 2


def test_many_classes_are_plotted_as_sizes_and_shades(make_run: MakeRun) -> None:
    run = read_run(make_run(clients=70, num_classes=30))
    legend = plots_partition.plot_counts(run.partition["n_kc"], run.classes).legend
    assert [words for _, words in legend] == ["all classes"]
    heat = plots_partition.plot_shares(run.partition["n_kc"], run.classes).svg
    assert heat.count("<image") == 1
    assert heat.count('class="cell') == 0


def test_a_small_heat_map_has_its_numbers(make_run: MakeRun) -> None:
    run = read_run(make_run(clients=4, num_classes=5))
    cells = re.findall(
        r'<text class="cell[^>]*>([\d,]+)<', plots_partition.plot_shares(run.partition["n_kc"], run.classes).svg
    )
    assert sum(int(cell.replace(",", "")) for cell in cells) == run.partition["num_samples"]
