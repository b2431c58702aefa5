from __future__ import annotations

import numpy as np
import pytest

from fedrpc.data.partition import partition
from fedrpc.data.partition_card import card
from fedrpc.report.words import against, card_in_words, cell, counted, duration, reported_in_words


@pytest.mark.parametrize(
    ("seconds", "text"), [(36.04, "36.0 s"), (312, "5 min 12 s"), (7500, "2 h 05 min"), (119.96, "120.0 s")]
)
def test_times(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_counts() -> None:
    assert [counted(number, "client") for number in (0, 1, 1000)] == ["0 clients", "1 client", "1,000 clients"]


def test_a_measurement_against_its_formula() -> None:
    assert against(100, 100) == "exactly as the formula predicts"
    assert against(103, 100) == "+3 % off the predicted 100"
    assert against(5, 0) == "none predicted"


def test_a_card_in_words() -> None:
    y = np.arange(1000) % 10
    text = " ".join(card_in_words(card(partition("shards:2,strict", y, 50, 0), y, 10)))
    for told in (
        "1,000 samples of 10 classes over 50 clients: 20 each.",
        "Every sample went to one client.",
        "0.09: one",
    ):
        assert told in text
    made = card(partition("shards:2,strict", y, 50, 0), y, 10) | {
        "dropped": 7,
        "sizes": {"min": 1, "median": 2.5, "max": 9},
    }
    text = " ".join(card_in_words(made))
    assert "1 to 9 each, median 2.5" in text
    assert "7 to none" in text


def test_cells() -> None:
    values = (None, "", "sigma", 1000, 0.384615, [12, 0, 7], 2694.5, 1e-05)
    assert [cell(value) for value in values] == ["-", "-", "sigma", "1,000", "0.3846", "12 0 7", "2,694", "1e-05"]


def test_a_methods_own_figures() -> None:
    share = {"words": "real fraction", "about": "of a client", "value": 0.384615, "round": 2}
    assert reported_in_words(share) == "0.3846 (of a client)"
    formal = {"words": "formal privacy", "about": "", "value": "none", "round": 2, "why": "real data is always there"}
    assert reported_in_words(formal) == "none: real data is always there"
    spread = {"words": "acceptance", "about": "", "value": {"mean": 0.5, "least": 0.0, "greatest": 1.0, "count": 4}}
    assert reported_in_words(spread) == "0.5 on average, 0 to 1"
    rows = {"words": "means", "about": "about", "value": [{"a": 1}], "why": "no guarantee: why", "columns": {"a": "A"}}
    assert reported_in_words(rows) == "No guarantee: why. About."
