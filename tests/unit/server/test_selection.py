"""Cohorts of clients that are not always there, and of more than are wanted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fedrpc.emulation.presence import parse_availability
from fedrpc.errors import ConfigError
from fedrpc.server.selection import select_cohort
from tests.fakes import problem_of


def select(index: int, **settings: Any) -> list[int]:
    problem = problem_of("fedavg", **({"clients": 20, "fraction": 0.5, "seed": 0} | settings))
    return select_cohort(problem.config, problem.env, index)


def test_those_who_are_away_are_replaced_by_others_who_are_there():
    present = parse_availability("0.6").list_present(20, 0, 4)
    plain, cohort = select(4), select(4, availability="0.6")
    assert set(cohort) <= set(present)
    assert set(plain) & set(present) <= set(cohort), "who was chosen and is there stays"
    assert len(cohort) == min(10, len(present))
    assert cohort == sorted(cohort) == select(4, availability="0.6")


def test_all_who_are_there_are_as_likely():
    asked = Counter(client for index in range(150) for client in select(index, availability="0.7"))
    assert min(asked.values()) > 50
    assert max(asked.values()) < 100


def test_more_are_asked_than_are_wanted():
    assert len(select(0, select_extra=0.25)) == 13
    assert set(select(0)) < set(select(0, select_extra=0.25))
    assert len(select(0, select_extra=5.0)) == 20, "as many as there are"


def test_a_round_without_anybody_is_refused():
    with pytest.raises(ConfigError, match="nobody is there in round 3"):
        select(3, clients=2, fraction=1.0, availability="trace:0=0-2,1=0-2")
