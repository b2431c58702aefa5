"""Measured bytes against a method's formula: every difference is told, and only where the comparison is fair."""

from __future__ import annotations

from typing import Any

import pytest

from fedrpc.methods.cost import Cost
from fedrpc.server.formula import compare_with_formula
from fedrpc.server.summary import summarise_bytes
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import Key, Sums

STAGE: dict[str, Any] = {"event": "round_finished", "participation": {"missing": [], "abstained": []}}


def compare(cost: Cost, *records: dict[str, Any], attempts: int = 1, aborted: bool = False) -> dict[str, Any]:
    rows = {
        Key(0, "fit", "weights", "down", 0, attempt, aborted and not attempt, not aborted and attempt > 0): Sums(
            100, 100, 1
        )
        for attempt in range(attempts)
    }
    sizes = summarise_bytes(rows, cost, Cost(), {"down": 0, "up": 0}, "")
    return compare_with_formula(sizes, cost, records or [STAGE])


def weights(size_bytes: int, *, at_most: bool = False) -> Cost:
    return Cost().add("down", Kind.WEIGHTS, size_bytes, at_most=at_most)


def test_bytes_as_predicted():
    assert compare(weights(100)) == {"not_compared": "", "differs": []}


@pytest.mark.parametrize("predicted", [99, 101, 0])
def test_every_byte_more_or_less_is_told(predicted):
    entry = {"direction": "down", "kind": "weights", "measured": 100, "predicted": predicted}
    assert compare(weights(predicted)) == {"not_compared": "", "differs": [entry]}


def test_what_was_only_predicted_is_told():
    cost = weights(100).add("up", Kind.SCALARS, 8)
    entry = {"direction": "up", "kind": "scalars", "measured": 0, "predicted": 8}
    assert compare(cost)["differs"] == [entry]


@pytest.mark.parametrize(("predicted", "fits"), [(99, False), (100, True), (101, True)])
def test_an_upper_bound_may_be_missed_from_below_only(predicted, fits):
    assert (not compare(weights(predicted, at_most=True))["differs"]) == fits


@pytest.mark.parametrize("what", ["missing", "abstained"])
def test_a_client_that_did_not_answer_makes_it_unfair(what):
    lacking = {"event": "setup_finished", "participation": STAGE["participation"] | {what: [2]}}
    got = compare(weights(7), lacking, STAGE, {"event": "evaluated"})
    assert got == {"not_compared": "clients did not answer in 1 of 2 stages", "differs": []}


@pytest.mark.parametrize("aborted", [False, True])
def test_a_message_that_was_sent_again_makes_it_unfair(aborted):
    got = compare(weights(7), attempts=2, aborted=aborted)
    assert got == {"not_compared": "some messages were broken off, or sent again", "differs": []}
