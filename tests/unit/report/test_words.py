from __future__ import annotations

import numpy as np
import pytest

from fedrpc.data.partition import make_partition
from fedrpc.data.partition_summary import summarize_partition
from fedrpc.report.words import (
    compare_to_formula,
    describe_computing,
    describe_partition,
    describe_reported,
    format_cell,
    format_duration,
    pluralize,
)


@pytest.mark.parametrize(
    ("seconds", "text"), [(36.04, "36.0 s"), (312, "5 min 12 s"), (7500, "2 h 05 min"), (119.96, "120.0 s")]
)
def test_times(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_counts() -> None:
    assert [pluralize(number, "client") for number in (0, 1, 1000)] == ["0 clients", "1 client", "1,000 clients"]


def test_a_measurement_against_its_formula() -> None:
    assert compare_to_formula(100, 100) == "exactly as the formula predicts"
    assert compare_to_formula(103, 100) == "+3 % off the predicted 100"
    assert compare_to_formula(5, 0) == "none predicted"


def test_a_partition_in_words() -> None:
    y = np.arange(1000) % 10
    text = " ".join(describe_partition(summarize_partition(make_partition("shards:2,strict", y, 50, 0), y, 10)))
    for expected in (
        "1,000 samples of 10 classes over 50 clients: 20 each.",
        "Every sample went to one client.",
        "0.09: one",
    ):
        assert expected in text
    summary = summarize_partition(make_partition("shards:2,strict", y, 50, 0), y, 10) | {
        "dropped": 7,
        "sizes": {"min": 1, "median": 2.5, "max": 9},
    }
    text = " ".join(describe_partition(summary))
    assert "1 to 9 each, median 2.5" in text
    assert "7 to none" in text


def test_cells() -> None:
    values = (None, "", "sigma", 1000, 0.384615, [12, 0, 7], 2694.5, 1e-05)
    assert [format_cell(value) for value in values] == [
        "-",
        "-",
        "sigma",
        "1,000",
        "0.3846",
        "12 0 7",
        "2,694",
        "1e-05",
    ]


def test_a_methods_own_values() -> None:
    share = {"words": "real fraction", "about": "of a client", "value": 0.384615, "round": 2}
    assert describe_reported(share) == "0.3846 (of a client)"
    formal = {"words": "formal privacy", "about": "", "value": "none", "round": 2, "why": "real data is always there"}
    assert describe_reported(formal) == "none: real data is always there"
    spread = {"words": "acceptance", "about": "", "value": {"mean": 0.5, "least": 0.0, "greatest": 1.0, "count": 4}}
    assert describe_reported(spread) == "0.5 on average, 0 to 1"
    rows = {"words": "means", "about": "about", "value": [{"a": 1}], "why": "no guarantee: why", "columns": {"a": "A"}}
    assert describe_reported(rows) == "No guarantee: why. About."


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ([{"said": "cpu AVX2, torch 2", "clients": 4}], "fp32; the server on the CPU (AVX2), torch 2"),
        (
            [{"said": "cuda a GPU, torch 2, CUDA 13", "clients": 1200}, {"said": "cpu AVX2, torch 2", "clients": 1}],
            "fp32; the server on the CPU (AVX2), torch 2; clients say: cuda a GPU, torch 2, CUDA 13 (1,200), "
            "cpu AVX2, torch 2 (1)",
        ),
    ],
)
def test_what_clients_say_of_their_devices_is_shown_where_one_has_a_gpu(
    said: list[dict[str, object]], shown: str
) -> None:
    summary = {
        "computing": {"precision": "fp32", "compile": "off", "tf32": False, "deterministic": True},
        "devices": [{"type": "cpu", "name": "AVX2", "torch": "2"}],
    }
    assert describe_computing(summary | {"client_devices": said}) == shown
