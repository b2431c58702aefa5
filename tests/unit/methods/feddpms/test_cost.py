"""The paper's overheads as printed, those of the networks at hand, and what is measured."""

from __future__ import annotations

import pytest

from fedrpc.methods.fedavg import FedAvg
from fedrpc.methods.feddpms.cost import (
    compute_expected_overhead,
    compute_overheads,
    compute_paper_overhead,
    count_decoder_bytes,
    count_means_bytes,
)
from fedrpc.models.dpms import Dpms
from fedrpc.server.summary import build_shapes
from tests.fakes import Played, problem_of, run_in_memory

PAPER = {"latent": 128, "alpha": 200, "n": 3, "rounds": 50, "preliminary": 20, "fraction": 1.0}


def test_the_papers_r1_and_what_it_is_with_the_networks_that_it_has():
    assert compute_paper_overhead(**PAPER, num_parameters=1_000_000)["r1"] == pytest.approx(0.0768)
    theta = sum(p.numel() for p in Dpms((3, 32, 32), 10).parameters())
    assert compute_paper_overhead(**PAPER, num_parameters=theta)["r1"] == pytest.approx(0.130, abs=5e-4)


@pytest.mark.parametrize(
    ("fraction", "rounds", "r2"),
    [
        (1.0, 50, 1 / 100),
        (0.5, 22, (1 - 0.25) / 22),
        (1e-6, 50, 0.5 - 20 / 100),  # the paper's limit for few clients a round
    ],
)
def test_the_papers_r2_by_hand(fraction, rounds, r2):
    found = compute_paper_overhead(**PAPER | {"fraction": fraction, "rounds": rounds}, num_parameters=1)
    assert found["r2"] == pytest.approx(r2, rel=1e-4)


def test_the_overhead_of_the_networks_by_hand():
    found = compute_expected_overhead(
        means_bytes=10, decoder_bytes=50, weights_bytes=100, rounds=4, preliminary=2, fraction=0.5
    )
    # Two secondary rounds of half the clients reach three quarters of them: one and a half cohorts.
    assert found["means"] == pytest.approx(2 * 1.5 * 10 / 800)
    assert found["decoders"] == pytest.approx((1 + 1.5) * 50 / 800)


@pytest.mark.parametrize(
    ("shape", "alpha", "size"), [((1, 28, 28), 50, 20_400), ((3, 32, 32), 200, 312_000)], ids=["fmnist", "cifar10"]
)
def test_the_bytes_of_one_clients_means(shape, alpha, size, monkeypatch):
    problem = problem_of("feddpms", build=lambda: Dpms((1, 28, 28), 10), params={"alpha": alpha, "preliminary": 1})
    network = Dpms(shape, 10)
    monkeypatch.setattr(problem, "copy_network", lambda: network)
    env = problem.env.__class__(**vars(problem.env) | {"model": lambda: network})
    assert count_means_bytes(env) == size


def play_with_help_for_all(**params: object) -> Played:
    """Two classes a client, so that every client lacks classes that others have."""
    problem = problem_of(
        "feddpms",
        build=lambda: Dpms((1, 28, 28), 10, latent=8),
        partition="shards:2",
        clients=5,
        train_size=100,
        params={"preliminary": 1, "alpha": 20, "tries": 1, "n": 8} | params,
    )
    return run_in_memory(problem, 4)


@pytest.mark.parametrize("mode", ["paper", "private"])
def test_measured_overhead_is_the_formulas_to_one_percent(mode):
    run = play_with_help_for_all(mode=mode, m=2)
    assert sorted(run.state.helped) == sorted(run.state.abundant) == list(range(5))
    assert run.measured() == run.predicted()
    fedavg = FedAvg().cost(build_shapes(run.problem, run.weights, run.cohorts))
    measured = sum(sum(side.values()) for side in run.measured().values())
    overhead = measured / sum(sum(side.values()) for side in (fedavg.down, fedavg.up)) - 1
    expected = compute_overheads(run.problem.env, rounds=4)["expected_overhead"]
    assert overhead == pytest.approx(expected["means"] + expected["decoders"], rel=0.01)
    assert run.records[-1]["expected_overhead"] == expected


def test_every_client_pays_for_the_decoder_once_down_and_once_up():
    run = play_with_help_for_all()
    decoder = count_decoder_bytes(run.problem.env)
    weights = {
        side: sum(s.tensor_bytes for k, s in run.rows.items() if (k.kind, k.direction) == ("weights", side))
        for side in ("down", "up")
    }
    plain = 4 * 5 * build_shapes(run.problem, run.weights, run.cohorts).weights_bytes
    assert weights == {"down": plain + 5 * decoder, "up": plain + 5 * decoder}
