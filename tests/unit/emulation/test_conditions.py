from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fedrpc.emulation.conditions import (
    Conditions,
    assign_conditions,
    assign_links,
    assign_speeds,
    check_links,
    check_speeds,
    describe_all,
)
from fedrpc.emulation.link import PRESETS, Link
from fedrpc.errors import ConfigError


def test_shares_are_exact_and_the_seed_says_who_has_which() -> None:
    links = assign_links("4g:0.7,wifi:0.3", 10, seed=1)
    assert Counter(links) == {PRESETS["4g"]: 7, PRESETS["wifi"]: 3}
    assert links == assign_links("4g:0.7,wifi:0.3", 10, seed=1)
    assert links != assign_links("4g:0.7,wifi:0.3", 10, seed=2)


@pytest.mark.parametrize("num_clients", [1, 2, 3, 7, 100])
def test_every_client_has_a_link_however_shares_are_rounded(num_clients: int) -> None:
    links = assign_links("3g:0.333,4g:0.333,wifi:0.334", num_clients, seed=0)
    assert len(links) == num_clients
    assert max(Counter(links).values()) <= num_clients // 3 + 1


def test_a_table_has_presets_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    path.write_text("client,link,down,rtt\n1,3g,,\n0,,2mbit,10ms\n2,4g,,200ms\n")
    assert assign_links(str(path), 3, 0) == [Link(down=2e6, rtt=0.01), PRESETS["3g"], Link(12e6, 12e6, 0.2)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("client,link\n0,4g\n", "has 1 of 2 clients; add a line for client 1"),
        ("client,link\n0,4g\n0,3g\n", "has client 0 twice"),
        ("client,link\n0,4g\n7,3g\n", "has client 7, but the run's clients are 0 to 1"),
        ("client,link\n0,4gg\n1,3g\n", "client 0: unknown link '4gg'"),
        ("client,speeed\n0,4g\n", "unknown column of"),
        ("0,4g\n1,3g\n", "the first line should name the columns"),
        ("client,link\nx,4g\n", "line 2: client should be a client's id"),
        ("client,link\n0,4g,3\n", "more values than columns"),
        ("", "the first line should name the columns"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "links.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        assign_links(str(path), 2, 0)
    assert said in str(error.value)


def test_a_file_is_read_when_a_run_starts_not_when_its_settings_are_checked() -> None:
    check_links("nowhere.csv")
    check_speeds("nowhere.csv")
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.csv"):
        assign_links("nowhere.csv", 2, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4g:0.7,wifi:0.2", "should add up to 1, got 0.9"),
        ("4g:x", "expected a share such as 4g:0.7, got 'x'"),
        ("6g:1", "unknown link '6g'"),
    ],
)
def test_what_is_wrong_with_shares_is_said(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_links(text)
    assert said in str(error.value)


def test_drawn_speeds_are_those_of_the_seed_and_the_fastest_is_this_machine() -> None:
    speeds = assign_speeds("lognormal:0.5", 20, seed=3)
    assert max(speeds) == 1.0
    assert min(speeds) > 0
    assert speeds == assign_speeds("lognormal:0.5", 20, seed=3) != assign_speeds("lognormal:0.5", 20, seed=4)


def test_speeds_from_a_number_or_a_table(tmp_path: Path) -> None:
    path = tmp_path / "speeds.csv"
    path.write_text("client,speed\n0,1\n1,0.25\n")
    assert assign_speeds("0.5", 2, 0) == [0.5, 0.5]
    assert assign_speeds(str(path), 2, 0) == [1.0, 0.25]


@pytest.mark.parametrize("text", ["2", "0", "-1", "fast", "normal:1", "lognormal:", "lognormal:-1", "nan", "inf"])
def test_other_speeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="speed"):
        check_speeds(text)


def test_conditions_are_described_without_what_is_not_emulated() -> None:
    assert assign_conditions(None, None, 2, 0) == [Conditions(), Conditions()]
    assert describe_all([Conditions(), Conditions(PRESETS["lan"], 0.5)]) == [
        {"client": 0},
        {"client": 1, "name": "lan", "link": "down=1gbit,up=1gbit,rtt=1ms", "speed": 0.5},
    ]
