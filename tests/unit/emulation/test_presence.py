from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fedrpc.emulation.presence import draw_dropouts, normalise_availability, parse_availability
from fedrpc.errors import ConfigError


@pytest.mark.parametrize("text", ["0.7", "0.7,stay=5"])
def test_the_share_is_there_and_the_seed_says_who(text: str) -> None:
    availability = parse_availability(text)
    rounds = [availability.list_present(50, 3, index) for index in range(200)]
    assert sum(map(len, rounds)) / (50 * 200) == pytest.approx(0.7, abs=0.04)
    assert rounds == [availability.list_present(50, 3, index) for index in range(200)]
    assert rounds[0] != availability.list_present(50, 4, 0)


def test_clients_stay_for_a_while() -> None:
    availability = parse_availability("0.6,stay=6")
    present = [set(availability.list_present(200, 0, index)) for index in range(120)]
    left = sum(len(now - after) for now, after in itertools.pairwise(present))
    assert sum(map(len, present[:-1])) / left == pytest.approx(6, rel=0.15)


@pytest.mark.parametrize("text", ["0.05", "0.05,stay=2"])
def test_somebody_is_always_there(text: str) -> None:
    availability = parse_availability(text)
    rounds = [availability.list_present(3, 0, index) for index in range(200)]
    assert min(map(len, rounds)) == 1
    assert {client for present in rounds for client in present} == {0, 1, 2}


def test_a_trace_becomes_part_of_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("client,first,last\n0,0,4\n0,8,9\n3,2,\n")
    text = normalise_availability(str(path))
    assert text == "trace:0=0-4/8-9,3=2-"
    assert normalise_availability(text) == text
    availability = parse_availability(text)
    assert [availability.list_present(4, 0, index) for index in (0, 2, 5, 9)] == [
        [0, 1, 2],
        [0, 1, 2, 3],
        [1, 2, 3],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1.5", "expected a share such as 0.7"),
        ("0", "expected a share such as 0.7"),
        ("0.7,leave=3", "expected a share such as 0.7"),
        ("0.7,stay=x", "expected a share such as 0.7"),
        ("0.9,stay=3", "stay should be 9 rounds or more"),
        ("trace:0=4", "expected a trace such as"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        normalise_availability(text)
    assert said in str(error.value)


@pytest.mark.parametrize(("lines", "said"), [("0,5,4\n", "got 5 and 4"), ("0,x,\n", "got x and"), ("", "has no line")])
def test_what_is_wrong_with_a_trace_is_said(tmp_path: Path, lines: str, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("client,first,last\n" + lines)
    with pytest.raises(ConfigError) as error:
        normalise_availability(str(path))
    assert said in str(error.value)


def test_dropouts_are_drawn_by_seed_and_round_whoever_is_asked() -> None:
    everybody = [draw_dropouts(0.2, range(100), 100, 1, index) for index in range(50)]
    assert sum(map(len, everybody)) / 5000 == pytest.approx(0.2, abs=0.03)
    assert draw_dropouts(0.2, range(10), 100, 1, 0) == everybody[0] & set(range(10))
    assert everybody[0] != everybody[1]
