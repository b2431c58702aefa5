"""What compare.html shows of a comparison, read from its HTML."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from fedrpc.report.comparison_page import PREDICTED, render_page
from fedrpc.report.markup import Cell, mark_best
from fedrpc.report.svg import Axis
from tests.unit.report.conftest import write_comparison

FINALS = {"fedavg": (40.0, 50.0), "fedprox": (61.0, 63.0), "flea": (55.0, 57.0)}


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """Three methods with two seeds, and targets of which the last is never reached."""
    return write_comparison(tmp_path, FINALS, 50.0, 99.0)


def read_rows(html: str, title: str = "") -> list[str]:
    """The rows of the table under a title, or of the first one, as text."""
    table = html[html.index(f"<h3>{title}</h3>") if title else 0 :].split("<tbody>")[1].split("</tbody>")[0]
    rows = [re.sub("<title>.*?</title>", "", row) for row in table.split("<tr")[1:]]
    return [" ".join(re.sub("<[^>]*>", " ", "<tr" + row).replace("&nbsp;", " ").split()) for row in rows]


def test_the_first_screen_has_a_line_for_each_method(document: dict[str, Any]) -> None:
    document["methods"][2]["overhead"] = 26.31
    why = "no guarantee: scalars, weights left clients uncovered"
    assert read_rows(render_page(document)) == [
        f"fedavg 45.00 ± 7.07 % the baseline, 1 x FedAvg 5 min 21 s {why}",
        f"fedprox * 62.00 ± 1.41 % 1.00 x FedAvg, +17.0 points 5 min 21 s {why}",
        f"flea 56.00 ± 1.41 % 26.3 x FedAvg, +11.0 points 5 min 21 s {why}",
    ]


def test_the_predicted_time_is_shown_where_there_is_one(document: dict[str, Any]) -> None:
    html = render_page(document)
    assert "<th>time, measured on loopback</th>" in html
    assert "predicted over" not in html
    assert PREDICTED not in html
    assert "seconds, predicted" not in html
    for place, entry in enumerate(document["methods"][1:]):
        entry["time"] |= {"predicted": 60.0 + place, "link": "4g"}
        entry["targets"][0]["predicted"] = {"mean": 33.0, "sd": 2.0, "n": 2}
        for run in entry["runs"]:
            run["predicted"] = {
                "link": "4g",
                "seconds": 60.0,
                "until": [20.0 * point[0] + 20 for point in run["curve"]],
            }
    html = render_page(document)
    plot = html[html.index("<h3>Accuracy over seconds, predicted over 4g</h3>") :].split("</figure>")[0]
    assert "predicted time, s" in plot
    assert re.search("fedprox, round 3: .* after .*, predicted 60.0 s", plot)
    assert "fedavg" not in plot, "it has no prediction"
    assert "<th>time, predicted over 4g</th>" in html
    assert PREDICTED in html
    first, second, third = read_rows(html)
    assert "1 x FedAvg - measured 5 min 21 s" in first, "it has no prediction"
    assert "60.0 s measured 5 min 21 s" in second
    assert "61.0 s measured 5 min 21 s" in third
    assert [row.endswith("33.0 ± 2.0") for row in read_rows(html, "What 50 % cost")] == [False, True, True]


def test_link_reproducibility_and_other_differences_are_told(document: dict[str, Any]) -> None:
    assert "not reproducible" not in render_page(document)
    run = document["methods"][1]["runs"][0]
    run |= {"emulated": {"link": "4g:0.7,wifi:0.3", "speed": "0.5"}, "reproducible": False}
    document["differs"] = ["different lr: 0.1, 0.2"]
    html = render_page(document)
    assert "<span>link <b>loopback and 4g:0.7,wifi:0.3, speed 0.5</b></span>" in html
    assert "which clients answer first: fedprox</li>" in html
    assert "different lr: 0.1, 0.2</li>" in html


def test_a_refused_method_has_a_line_of_its_own(document: dict[str, Any]) -> None:
    failure = {"name": "fedbr", "reason": "it cannot be <split>", "refused": True}
    document["failed"] = [failure | {"seed": seed} for seed in (0, 1)]
    document["failed"].append({"name": "moon", "reason": "it broke", "refused": False, "seed": 1})
    rows = read_rows(render_page(document))
    assert rows[3:] == ["fedbr refused, seeds 0, 1 : it cannot be &lt;split&gt;", "moon failed : it broke"]


def test_the_last_ten_are_told_when_all_rows_have_ten(document: dict[str, Any]) -> None:
    assert "last ten" not in render_page(document)
    for entry in document["methods"]:
        entry["curve"] = [[index, index + 1, 50.0, index + 1.0] for index in range(10)]
        for run in entry["runs"]:
            run |= {"curve": entry["curve"], "num_rounds": 10}
    html = render_page(document)
    assert "last ten 55.50 ± 0.00 %" in html
    assert "mean of last ten, %" in html


def test_curves_have_bands_over_the_seeds(document: dict[str, Any]) -> None:
    """The runs of flea end at 81.25 and 101.25: in the plot 91.25, with a deviation of 14.14 around it."""
    for run, last in zip(document["methods"][2]["runs"], (81.25, 101.25), strict=True):
        run["curve"] = [*run["curve"][:-1], [*run["curve"][-1][:2], last, run["curve"][-1][3]]]
    html = render_page(document)
    assert "flea, round 3: 91.25 ± 14.14 % after" in html
    assert html.count('<polygon class="band m1"') == 3
    document["methods"] = [entry | {"runs": entry["runs"][:1]} for entry in document["methods"]]
    assert '<polygon class="band' not in render_page(document)


def test_undominated_rows_are_marked_in_the_plot(document: dict[str, Any]) -> None:
    for entry, pareto in zip(document["methods"], (False, True, False), strict=True):
        entry["pareto"] = pareto
    html = render_page(document)
    assert html.count('<circle class="ring"') == 1
    assert re.search(r"fedprox: 62.00 % for [\d.]+ MB, undominated", html)
    assert re.search(r"flea: 56.00 % for [\d.]+ MB<", html)


def test_targets_differences_and_costs_have_tables(document: dict[str, Any]) -> None:
    html = render_page(document)
    assert [row.split()[1:4] for row in read_rows(html, "What 50 % cost")] == [["2", "of", "2"]] * 3
    assert read_rows(html, "What 99 % cost") == [f"{name} never reached - - -" for name in FINALS]
    assert read_rows(html, "Differences to FedAvg")[0].startswith("fedprox fedavg 2 +17.00 ")
    assert len(read_rows(html, "Cost beside FedAvg")) == 3


def test_the_best_of_a_column_is_marked() -> None:
    cells = [Cell("a", 1.0), Cell("-"), Cell("b", 3.0), Cell("c", 3.0)]
    assert [cell.best for cell in mark_best(cells, highest=True)] == [False, False, True, True]
    assert [cell.best for cell in mark_best(cells, highest=False)] == [True, False, False, False]
    assert not any(cell.best for cell in mark_best(cells[2:], highest=True)), "all are as good"


def test_bytes_are_on_a_logarithmic_axis() -> None:
    axis = Axis.of_powers([0, 2e6, 9e8], "bytes")
    assert axis.log
    assert axis.low <= 2e6 < 9e8 <= axis.high
    assert 0 < Axis.of_powers([2e6], "bytes").place(2e6) < 1


def test_a_large_comparison_has_a_small_page(document: dict[str, Any]) -> None:
    """24 methods with 5 seeds and 1000 rounds."""
    curve = [[index, 1000 * (index + 1), 50 + index / 100, index + 1.0] for index in range(1000)]
    entry = document["methods"][1]
    run = entry["runs"][0] | {"curve": curve, "num_rounds": 1000}
    runs = [run | {"seed": seed} for seed in range(5)]
    changes = {"curve": curve, "runs": runs}
    document["methods"] = [copy.deepcopy(entry) | changes | {"name": f"method{place}"} for place in range(24)]
    assert len(render_page(document).encode()) < 1_500_000
