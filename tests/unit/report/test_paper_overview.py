"""The plot of all claims: where a claim stands, and which have a place in it."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from fedrpc.report.paper_overview import END, plot_claims
from fedrpc.study.experiment import Claim, judge


def results_of(name: str, differences: list[float], **values: Any) -> dict[str, Any]:
    claim = Claim(**{"says": f"{name} is better", "measure": "last", "higher": "new", "than": "old"} | values)
    old = {seed: {"last": 50.0} for seed in range(len(differences))}
    new = {seed: {"last": 50.0 + each} for seed, each in enumerate(differences)}
    return {"paper": "A paper", "claims": [judge(claim, {"old": old, "new": new})]}


def find_dots(drawing: str) -> dict[str, tuple[float, str]]:
    """The place and the colour of each claim, by experiment."""
    found = {}
    for dot in ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}circle"):
        for title in dot:
            found[(title.text or "").partition(":")[0]] = (float(dot.attrib["cx"]), dot.attrib["class"])
    return found


def test_a_claim_stands_by_its_difference_in_half_widths_of_its_interval() -> None:
    half = 4.302653 / 3**0.5  # of the interval of three differences whose deviation is 1
    experiments = {
        "null": results_of("null", [-1, 0, 1]),
        "one": results_of("one", [half - 1, half, half + 1]),
        "less": results_of("less", [-half - 1, -half, -half + 1]),
        "margin": results_of("margin", [half + 4, half + 5, half + 6], by=5.0),
        "far": results_of("far", [99, 100, 101]),
        "same": results_of("same", [2, 2, 2]),
        "equal": results_of("equal", [0, 0, 0]),
    }
    drawing = plot_claims(experiments)
    assert drawing is not None
    places = {name: place for name, (place, _) in find_dots(drawing).items()}
    assert places["equal"] == places["null"]
    unit = places["one"] - places["null"]
    assert unit > 20
    assert places["less"] == pytest.approx(places["null"] - unit, abs=0.2)
    assert places["margin"] == places["one"]
    assert places["far"] == places["same"] == pytest.approx(places["null"] + END * unit, abs=0.5)


def test_colours_are_of_verdicts() -> None:
    drawing = plot_claims(
        {"yes": results_of("yes", [5, 6, 7]), "hm": results_of("hm", [-1, 0, 3]), "no": results_of("no", [-1, -2, 0])}
    )
    assert drawing is not None
    legend = dict(re.findall(r'class="(c\d)".*?\n<text class="legend"[^>]*>([^<]+)', drawing))
    told = {name: legend[colour] for name, (_, colour) in find_dots(drawing).items()}
    assert told == {"yes": "reproduced", "hm": "partly", "no": "not reproduced"}


def test_controls_and_claims_with_few_seeds_have_no_place() -> None:
    left_out = {
        "ours": results_of("ours", [1, 2, 3], control=True),
        "twice": results_of("twice", [1, 1.1]),
        "never": results_of("never", []),
    }
    assert plot_claims(left_out) is None
    drawing = plot_claims(left_out | {"theirs": results_of("theirs", [1, 2, 3])})
    assert drawing is not None
    assert [*find_dots(drawing)] == ["theirs"]


def test_a_long_claim_is_cut_but_told_whole_beside_its_dot() -> None:
    drawing = plot_claims({"long": results_of("word " * 40, [1, 2, 3])})
    assert drawing is not None
    texts = [text.text or "" for text in ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")]
    assert max(map(len, texts)) < 100
    assert "word " * 30 in drawing
