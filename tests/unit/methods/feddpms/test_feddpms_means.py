"""The latent means of FedDPMS: what they are of, which of them leave a client, and what is promised for them."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
import torch

from fedrpc.methods.feddpms.latent_means import NONE
from fedrpc.methods.feddpms.privacy import clip_norms, compute_epsilons
from fedrpc.models.state import load
from fedrpc.privacy.accountant import compute_epsilon
from fedrpc.privacy.ledger import read_history
from tests.fakes import InMemoryFederation, SmallProblem, run_in_memory
from tests.unit.methods.feddpms.dpms_runs import (
    LATENT,
    ROUNDS,
    SMALL,
    build,
    build_problem,
    play,
    play_round,
    read_privacy_rows,
)

# Means


def compute_latents(problem: SmallProblem, client: int, weights: Any, c: int) -> torch.Tensor:
    model = build()
    load(model, weights)
    x, y = problem.load_client_data(client).train.all()
    with torch.no_grad():
        return model.features(x[y == c])


def test_private_means_are_of_clipped_latents_of_the_received_encoder():
    """Without noise, and with m the size of the class, every row is that mean."""
    counts = build_problem().class_counts
    size = max(max(row) for row in counts)
    found = build_problem(params={"mode": "private", "sigma": 0.0, "m": size, "clip": 0.8})
    run = run_in_memory(found, 3)
    received = run.states[2].weights
    checked = 0
    for client in range(5):
        for c in [c for c in range(10) if counts[client][c] == size]:
            wanted = clip_norms(compute_latents(found, client, received, c), 0.8).mean(dim=0)
            rows = run.state.latents[client][run.state.labels[client] == c]
            assert len(rows) == SMALL["alpha"]
            assert torch.allclose(rows, wanted.expand_as(rows), atol=1e-6)
            checked += 1
    assert checked


def test_paper_means_are_of_all_examples_by_the_trained_encoder():
    found = build_problem(params={"sigma": 0.0, "tries": 1})
    trained: dict[int, Any] = {}
    with InMemoryFederation(found) as federation:
        state = federation.init()
        for index in range(2):
            state, _ = play_round(federation, state, index)
        rnd = federation.stage(2)
        ask = rnd._ask

        async def watch(phase: Any, *args: Any, **kwargs: Any) -> Any:
            async for reply in ask(phase, *args, **kwargs):
                if phase.name == "fit":
                    trained[reply.client] = {name: value.clone() for name, value in reply.body.weights.items()}
                yield reply

        rnd._ask = watch  # type: ignore[method-assign]
        state = asyncio.run(found.method.round(state, rnd))
    rows = [
        (client, int(c), state.latents[client][state.labels[client] == c])
        for client in range(5)
        for c in state.abundant[client]
        if c != NONE and (state.labels[client] == c).any()
    ]
    assert rows, "some class passes its client's own classifier"
    for client, c, latents in rows:
        wanted = compute_latents(found, client, trained[client], c).mean(dim=0)
        assert torch.allclose(latents, wanted.expand_as(latents), atol=1e-6)


def test_a_class_of_fewer_than_m_examples_is_not_shared_in_private_mode():
    found = build_problem(params={"mode": "private", "m": 8}, partition="dirichlet:0.5")
    run = run_in_memory(found, 3)
    for client, classes in run.state.abundant.items():
        counts = found.class_counts[client]
        named = [c for c in classes.tolist() if c != NONE]
        assert sorted(named) == [c for c in range(10) if counts[c] >= 8]
        assert set(run.state.labels[client].tolist()) == set(classes.tolist())
    assert any(NONE in classes for classes in run.state.abundant.values())


def test_the_filter_gives_up_after_its_tries_and_records_it():
    run = run_in_memory(build_problem(params={"tries": 2, "sigma": 0.0}), 4)
    record = run.records[2]
    short = record["short_of_quota"]
    assert any(count == 0 for few in short.values() for count in few.values()), "a class that gave nothing usable"
    for client, rates in record["acceptance"].items():
        for c, rate in rates.items():
            # Without noise all draws pass or none.
            assert rate == (0.0 if c in short.get(client, {}) else 1.0)
            assert (run.state.labels[client] == c).sum() == SMALL["alpha"] * rate
    assert set(record["reconstruction"]) == set(range(5))
    assert all(0 < error < 1 for error in record["reconstruction"].values())


# Privacy


def test_paper_mode_has_no_guarantee():
    with InMemoryFederation(build_problem()) as federation:
        run = asyncio.run(federation.play(ROUNDS))
        rows = read_privacy_rows(federation)
    assert all(row["history"] == [] for row in rows)
    covers = {row["kind"]: row["covers"] for row in rows}
    assert covers["latent_means"].startswith("no guarantee: the rejection filter")
    assert covers["class_abundance"].startswith("no guarantee: class indices")
    assert "would hold only without the rejection filter" in run.records[2]["latent_privacy"]["holds"]


def test_private_mode_covers_the_latent_means_alone():
    with InMemoryFederation(build_problem(params={"mode": "private", "sigma": 2.0})) as federation:
        run = asyncio.run(federation.play(ROUNDS))
        rows = read_privacy_rows(federation)
    means = [row for row in rows if row["kind"] == "latent_means"]
    assert [row["client"] for row in means] == list(range(5))
    assert all(row["parts"] == ["means.latents"] and row["mechanism"] == "gaussian" for row in means)
    assert all("same label" in row["covers"] and row["adjacency"] == "replace-one, same label" for row in means)
    wanted = compute_epsilons(latent=LATENT, alpha=4, n=8, m=3, sigma=2.0, clip=math.sqrt(LATENT) / 2)
    [figure] = [row["class_draws"] for row in wanted if (row["reading"], row["delta"]) == ("sigma", 1e-5)]
    assert compute_epsilon(read_history(means[0]), 1e-5) == pytest.approx(figure, rel=1e-9)
    assert run.records[2]["latent_privacy"]["rows"] == wanted
    others = [row for row in rows if row["kind"] != "latent_means"]
    assert all(row["history"] == [] for row in others)
    bare = {row["kind"] for row in others if row["covers"].startswith("no guarantee")}
    assert bare == {"weights", "scalars", "class_abundance"}


def test_private_noise_is_around_every_row():
    quiet, loud = (
        run_in_memory(build_problem(params={"mode": "private", "sigma": sigma, "alpha": 200, "n": 2}), 3)
        for sigma in (0.0, 1.5)
    )
    for client in range(5):
        moved = loud.state.latents[client] - quiet.state.latents[client]
        assert moved.std().item() == pytest.approx(1.5, rel=0.1)
        assert len(moved.unique(dim=0)) == len(moved), "each draw is one of its own"


def test_a_client_over_its_budget_keeps_its_means_and_trains_on():
    run = run_in_memory(build_problem(params={"mode": "private"}, privacy={"epsilon_budget": 1e-3}), 4)
    assert run.state.latents == {}
    assert run.records[2]["not_shared"].keys() == set(range(5))
    assert all("privacy budget" in why for why in run.records[2]["not_shared"].values())
    assert set(run.records[3]["local_losses"]) == set(range(5))


def test_claims_are_recorded_when_means_are_first_shared():
    assert [index for index, record in enumerate(play().records) if "latent_privacy" in record] == [2]
    report = play().records[2]["latent_privacy"]
    assert {(row["reading"], row["delta"]) for row in report["rows"]} == {
        (reading, delta) for reading in ("sigma/m", "sigma/sqrt(m)", "sigma") for delta in (1e-5, 0.01)
    }
    assert report["used"] == "sigma"
    assert json.loads(json.dumps(report)) == report
    assert all({"r1", "r2"} == set(record["paper_overhead"]) for record in play().records[2:])


def test_the_summary_marks_claims_beside_audited_values():
    for mode, holds in (("paper", "no guarantee: "), ("private", "for the latent means alone, given the received")):
        report, record = play(mode).reported(), play(mode).records[2]
        entry = report["latent_privacy.rows"]
        assert entry["why"].startswith(holds)
        assert "; dp-accounting Gaussian: at most " in entry["why"]
        assert [row["claimed"] for row in entry["value"]] == [
            row["claimed"] for row in record["latent_privacy"]["rows"]
        ]
        assert "the paper claims" in entry["columns"]["claimed"]
        audited = [entry["columns"][name] for name in ("one_draw", "class_draws", "all_draws")]
        assert all(heading.startswith("audited") for heading in audited)
        assert all(("without filter" in heading) == (mode == "paper") for heading in audited)
        assert ("acceptance" in report) == (mode == "paper")


def test_the_summary_has_the_filters_acceptance_over_all_rounds():
    run = play(fraction=0.4)
    rates = [rate for row in run.records for rates in row.get("acceptance", {}).values() for rate in rates.values()]
    report = run.reported()["acceptance"]["value"]
    assert report["count"] == len(rates)
    assert report["mean"] == pytest.approx(sum(rates) / len(rates))
    assert (report["least"], report["greatest"]) == (min(rates), max(rates))


def test_without_sharing_nothing_is_reported():
    assert run_in_memory(build_problem(params={"alpha": 0}), 3).reported() == {}
