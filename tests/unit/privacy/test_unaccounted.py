"""Rows against bytes: what left a client without a privacy row is found, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from fedrpc.privacy.mechanisms import REPLACE_ONE, Coverage
from fedrpc.privacy.summary import summarise
from fedrpc.privacy.unaccounted import Unaccounted, describe_unaccounted, find_unaccounted
from fedrpc.wire.ledger import Key, Sums

WHERE = {"client": 3, "round": 2, "phase": "fit", "kind": "weights"}


def went(**changes: Any) -> tuple[Key, Sums]:
    values = WHERE | {"direction": "up", "attempt": 0} | changes
    return Key(**values), Sums(100, 120, 1)


@pytest.mark.parametrize("change", [{}, {"attempt": 1}, {"aborted": True}, {"kind": "scalars"}, {"phase": "evaluate"}])
def test_what_went_up_without_a_row_is_found(change: dict[str, Any]) -> None:
    place = {name: value for name, value in (WHERE | change).items() if name in WHERE}
    assert find_unaccounted([went(**change)], []) == [Unaccounted(**place)]
    assert find_unaccounted([went(**change)], [place | {"parts": ["part"]}]) == []
    for name, other in {"client": 4, "round": 1, "phase": "share", "kind": "moments"}.items():
        assert find_unaccounted([went(**change)], [place | {"parts": ["part"], name: other}]) == [Unaccounted(**place)]


@pytest.mark.parametrize("change", [{"direction": "down"}, {"kind": "envelope"}, {"phase": "session"}])
def test_what_is_no_data_of_a_client_needs_no_row(change: dict[str, Any]) -> None:
    assert find_unaccounted([went(**change)], []) == []


def test_a_row_of_what_stayed_at_the_client_accounts_for_nothing_that_left() -> None:
    key, _ = went()
    kept = {"client": key.client, "round": key.round, "phase": key.phase, "kind": key.kind, "parts": []}
    assert find_unaccounted([went()], [kept])


def test_a_part_without_a_tensor_byte_needs_a_row() -> None:
    assert find_unaccounted([(went()[0], Sums(0, 7, 0))], [])


def test_neither_the_run_nor_the_kind_has_an_epsilon_then() -> None:
    covered = {"covers": "all", "coverage": Coverage.COVERED, "history": [[2.0, 1.0, 1]], "adjacency": REPLACE_ONE}
    rows = [{"client": 0, "kind": kind} | covered for kind in ("weights", "moments")]
    assert summarise(rows, 1e-5)["epsilon"] is not None
    lost = find_unaccounted([went(), went(client=5), went(round=9)], [])
    found = summarise(rows, 1e-5, unaccounted=lost)
    why = "client 3's weights went up in round 2 (fit) without a privacy row; and 2 more"
    assert (found["epsilon"], found["reason"]) == (None, f"no guarantee: {why}")
    assert (found["releases"]["weights"]["epsilon"], found["releases"]["weights"]["covers"]) == (
        None,
        f"no guarantee: {why}",
    )
    assert found["releases"]["moments"]["epsilon"] is not None
    assert describe_unaccounted(lost[:1]) == why.removesuffix("; and 2 more")
