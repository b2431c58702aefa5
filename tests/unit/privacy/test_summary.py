"""summary.json's privacy: an epsilon only where all that left is covered, of the client that spent most."""

from __future__ import annotations

from typing import Any

import pytest

from fedrpc.privacy import second
from fedrpc.privacy.accountant import compute_epsilons
from fedrpc.privacy.ledger import list_releases
from fedrpc.privacy.mechanisms import REPLACE_ONE, ZERO_OUT, Coverage, Guarantee, History
from fedrpc.privacy.statement import state_epsilon
from fedrpc.privacy.summary import summarise
from fedrpc.wire.kinds import Kind

DELTA = 1e-5


def row(client: int = 0, kind: str = "weights", steps: int = 0, **changes: Any) -> dict[str, Any]:
    covers = "record-level, all" if steps else "no guarantee: released without noise"
    history = [[2.0, 1.0, steps]] if steps else []
    coverage = Coverage.COVERED if steps else Coverage.NONE
    base = {"client": client, "kind": kind, "covers": covers, "coverage": coverage, "history": history}
    return base | {"adjacency": REPLACE_ONE if steps else ""} | changes


COVERED = {"covers": "record-level, all", "coverage": Coverage.COVERED, "adjacency": REPLACE_ONE}


def expect(history: History, noise: str) -> dict[str, Any]:
    return state_epsilon(history, DELTA, REPLACE_ONE, noise) | {"epsilons": vars(compute_epsilons(history, DELTA))}


def cost(steps: int) -> float:
    return compute_epsilons(((2.0, 1.0, steps),), DELTA).best[0]


def test_the_client_that_spent_most_is_reported() -> None:
    found = summarise([row(0, steps=1), row(1, steps=2), row(1, steps=3), row(0, steps=2)], DELTA)
    assert found["epsilon"] == pytest.approx(cost(5))
    assert (found["accountant"], found["reason"]) == ("gdp", None)
    assert found["epsilons"]["rdp"] >= found["epsilons"]["gdp"]
    assert found["noise"].startswith("reproducible noise")
    assert summarise([row(steps=1)], DELTA, "secret")["noise"].startswith("secret noise")


def test_one_uncovered_part_leaves_the_run_without_an_epsilon_and_a_covered_kind_with_one() -> None:
    found = summarise([row(kind="latent_means", steps=4), row(kind="weights")], DELTA)
    assert found["epsilon"] is None
    assert found["reason"] == "no guarantee: weights left clients uncovered"
    assert found["releases"]["latent_means"]["epsilon"] == pytest.approx(cost(4))
    assert found["releases"]["weights"]["epsilon"] is None


def test_what_is_public_costs_nothing_and_uncovers_nothing() -> None:
    public = row(kind="scalars", covers="public: taken as known", coverage=Coverage.PUBLIC)
    found = summarise([row(steps=1), public], DELTA)
    assert found["epsilon"] == pytest.approx(cost(1))
    assert found["releases"]["scalars"] == {
        "count": 1,
        "epsilon": None,
        "delta": None,
        "covers": "public: taken as known",
    }
    assert summarise([public], DELTA)["reason"] == "only what is public left clients"


def test_different_neighbours_are_not_added_up() -> None:
    found = summarise([row(steps=1), row(kind="moments", steps=1, adjacency=ZERO_OUT)], DELTA)
    assert found["epsilon"] is None
    assert "releases under replace-one and zero-out, sizes public neighbours are not added up" in found["reason"]
    assert found["releases"]["weights"]["epsilon"] == pytest.approx(cost(1))


def test_what_an_epsilon_depends_on_is_beside_it_for_the_run_and_for_each_kind() -> None:
    rows = [row(0, steps=2), row(1, "latent_means", steps=3), row(1, history=[[1.0, 0.25, 4]], **COVERED)]
    for noise in ("seeded", "secret"):
        found = summarise(rows, DELTA, noise)
        weights = found["releases"]["weights"]
        assert weights == {"count": 2, "covers": "record-level, all"} | expect(((1.0, 0.25, 4),), noise)
        assert found["releases"]["latent_means"]["second"]["epsilon"] == pytest.approx(cost(3))
        worst = ((1.0, 0.25, 4), (2.0, 1.0, 3))  # client 1's, the kind that came first before the other
        assert found == {"reason": None, "releases": found["releases"]} | expect(worst, noise)
        assert found["sampling"].startswith("Poisson sampling at rates 0.25 to 1, ")


def test_a_second_accountant_that_fails_does_not_fail_a_finished_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise MemoryError

    monkeypatch.setattr(second, "recompute_epsilon", fail)
    found = summarise([row(history=[[1.0, 0.375, 4]], **COVERED)], DELTA)
    assert found["epsilon"] == compute_epsilons(((1.0, 0.375, 4),), DELTA).rdp
    assert found["second"] == {"accountant": "dp-accounting RDP", "epsilon": None}


def test_without_an_epsilon_nothing_is_said_about_it() -> None:
    found = summarise([row()], DELTA)
    told = {name: value for name, value in found.items() if value is not None}
    assert told.keys() == {"delta", "reason", "releases"}


def test_a_kind_under_different_neighbours_has_no_epsilon() -> None:
    found = summarise([row(steps=1), row(steps=1, adjacency=ZERO_OUT)], DELTA)
    assert found["releases"]["weights"]["epsilon"] is None


def test_parts_that_share_a_guarantee_are_charged_once() -> None:
    promise = Guarantee("dp-sgd", {}, "record-level, all", ((2.0, 1.0, 3),), ZERO_OUT)
    kinds = {"weights": Kind.WEIGHTS, "head": Kind.WEIGHTS, "moments": Kind.MOMENTS}
    found = list_releases(kinds, dict.fromkeys(kinds, promise), {"client": 0})
    assert [(release.kind, release.parts) for release in found] == [
        (Kind.WEIGHTS, ("weights", "head")),
        (Kind.MOMENTS, ("moments",)),
    ]
    assert [release.guarantee.history for release in found] == [((2.0, 1.0, 3),), ()]
    rows = [
        row(
            kind=release.kind.label,
            covers=release.guarantee.covers,
            coverage=release.guarantee.coverage,
            history=[list(entry) for entry in release.guarantee.history],
            adjacency=release.guarantee.adjacency,
        )
        for release in found
    ]
    told = summarise(rows, DELTA)
    assert told["epsilon"] == pytest.approx(cost(3))
    assert told["releases"]["moments"]["epsilon"] is None, "its cost is with the weights; 0 would be a lie"
