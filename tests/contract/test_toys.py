"""The patterns of the methods to come, shown on toys: who is asked what, when, and what stays where."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from fedrpc.client.store import Transaction
from fedrpc.wire.kinds import Kind
from tests.fakes import InMemoryFederation, problem_of, run_in_memory
from tests.toys import (
    Features,
    Kept,
    Means,
    Player,
    Subset,
    ToyDpms,
    ToyFlea,
    ToyHead,
    ToyLoyal,
    ToyMeans,
    ToyMpgan,
    matched,
)


def kinds(rows, direction: str, phase: str | None = None) -> set[str]:
    return {
        key.kind
        for key, sums in rows.items()
        if key.direction == direction and sums.tensor_bytes and phase in (None, key.phase)
    }


# FLea


def test_a_second_question_goes_to_the_same_cohort_after_aggregation():
    run = run_in_memory(problem_of(ToyFlea, fraction=0.5), 3)
    for index, cohort in enumerate(run.cohorts):
        assert [(phase, client) for at, phase, _, client in run.asked if at == index] == [
            *(("fit", client) for client in cohort),
            *(("extract", client) for client in cohort),
        ]


def test_features_are_of_the_new_model_and_of_this_rounds_cohort_alone():
    problem = problem_of(ToyFlea, fraction=0.5, params={"alpha": 0.5})
    run = run_in_memory(problem, 2)
    for cohort, state in zip(run.cohorts, run.states[1:], strict=True):
        sizes = [math.floor(0.5 * len(problem.client_data(client).train)) for client in cohort]
        assert isinstance(state.buffer, Features)
        assert len(state.buffer.labels) == len(state.buffer.values) == sum(sizes)


def test_the_first_round_has_no_buffer_and_the_next_ones_have():
    run = run_in_memory(problem_of(ToyFlea), 2)
    down = {key.round for key in run.rows if (key.kind, key.direction) == ("activations", "down")}
    assert down == {1}
    assert kinds(run.rows, "up", "extract") == {Kind.ACTIVATIONS.label}


def test_what_a_client_draws_once_stays_drawn():
    with InMemoryFederation(problem_of(ToyFlea)) as federation:
        asyncio.run(federation.play(1))
        first = Transaction(federation.clients.store(0)).get("subset", Subset)
        asyncio.run(federation.play(3))
        again = Transaction(federation.clients.store(0)).get("subset", Subset)
    assert first is not None
    assert again is not None
    assert torch.equal(first.index, again.index)


# FedDPMS


@pytest.mark.parametrize(
    ("scarce", "abundant", "client", "partner"),
    [
        ([0, 1, 2], {4: [2, 3, 4], 5: [0, 1, 9]}, 0, 5),
        ([0, 1, 2], {5: [0, 1, 9], 4: [1, 2, 3]}, 0, 4),
        ([0, 1, 2], {5: [7, 8, 9]}, 0, None),
        ([0, 1, 2], {0: [0, 1, 2], 1: [2]}, 0, 1),
        ([0], {}, 0, None),
    ],
    ids=["more", "tie", "nothing", "not-oneself", "nobody"],
)
def test_matching_by_hand(scarce, abundant, client, partner):
    assert matched(scarce, abundant, client) == partner


def test_each_client_gets_the_means_of_its_partner_and_once_only():
    with InMemoryFederation(problem_of(ToyDpms, partition="dirichlet:0.1", clients=5, train_size=100)) as federation:
        run = asyncio.run(federation.play(4))
        helped = [client for record in run.records for client in record["partners"]]
        assert helped, "somebody lacks what somebody has"
        assert len(set(helped)) == len(helped)
        assert run.records[0]["partners"] == {}, "nobody has shared yet"
        for record in run.records:
            for client, partner in record["partners"].items():
                assert client != partner
                got = Transaction(federation.clients.store(client)).get("means", Kept)
                wanted = run.state.means[partner]
                assert got is not None
                assert list(got.means) == list(wanted)
                assert all(torch.equal(got.means[name], wanted[name]) for name in wanted)
    down = [key.client for key in run.rows if (key.kind, key.direction) == ("latent_means", "down")]
    assert sorted(down) == sorted(helped)
    up = [key.client for key in run.rows if (key.kind, key.direction) == ("latent_means", "up")]
    assert sorted(up) == list(range(5)), "each client shares once"


def test_class_abundance_and_latent_means_are_kinds_of_their_own():
    run = run_in_memory(problem_of(ToyDpms, partition="dirichlet:0.1", clients=5, train_size=100), 3)
    assert kinds(run.rows, "up", "scarce") == {"class_abundance"}
    assert kinds(run.rows, "up", "share") == {"class_abundance", "latent_means"}
    assert kinds(run.rows, "down", "train") == {"weights", "latent_means"}


def test_a_partner_that_never_shared_helps_nobody():
    run = run_in_memory(problem_of(ToyDpms), 3, absent=lambda index, phase, step, client: phase == "share")
    assert run.state.means == {}
    assert all(record["partners"] == {} for record in run.records)


# MP-GAN


def test_many_small_steps_make_a_round_and_number_themselves():
    run = run_in_memory(problem_of(ToyMpgan, params={"steps": 7}), 2)
    for index in range(2):
        steps = [step for at, phase, step, client in run.asked if (at, phase, client) == (index, "gan_step", 0)]
        assert steps == list(range(7))
    assert kinds(run.rows, "down", "gan_step") == {"images"}
    assert kinds(run.rows, "up", "gan_step") == {"feedback"}


def test_a_clients_optimizer_goes_on_from_step_to_step_and_round_to_round():
    with InMemoryFederation(problem_of(ToyMpgan, params={"steps": 3})) as federation:
        asyncio.run(federation.play(2))
        players = [Transaction(federation.clients.store(client)).get("player", Player) for client in range(4)]
    assert all(player is not None for player in players)
    assert [player.moments["0.step"].item() for player in players] == [6] * 4
    assert len({player.weights["1.weight"].sum().item() for player in players}) == 4, "each client has its own"


def test_saving_within_a_round_changes_nothing():
    often, never = ({"steps": 6, "save_every": every} for every in (1, 100))
    assert (
        run_in_memory(problem_of(ToyMpgan, params=often), 2).sha256
        == run_in_memory(problem_of(ToyMpgan, params=never), 2).sha256
    )


def test_old_versions_of_what_a_client_keeps_go_when_a_long_round_is_saved():
    def versions(save_every: int) -> int:
        params = {"steps": 12, "save_every": save_every}
        with InMemoryFederation(problem_of(ToyMpgan, params=params)) as federation:
            state = federation.init()
            asyncio.run(federation.problem.method.round(state, federation.stage(0)))
            store = federation.clients.store(0)
            with store._lock:
                return int(store._db.execute("SELECT COUNT(*) FROM entries WHERE key = 'player'").fetchone()[0])

    assert versions(100) == 12
    assert versions(2) <= 2


def test_the_feedback_is_the_gradient_of_the_whole():
    """The server's step on what clients send back is the step that autograd would make of it all at once."""
    problem = problem_of(ToyMpgan, params={"steps": 1, "batch": 2})
    run = run_in_memory(problem, 1)
    before, after = run.states[0].generator, run.states[1].generator
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert run.states[1].moments


# FedMix and CCVR


def test_set_up_reaches_everybody_before_the_first_round():
    run = run_in_memory(problem_of(ToyMeans, fraction=0.5), 2)
    before = [(phase, client) for index, phase, _, client in run.asked if index == -1]
    assert before == [*(("collect", client) for client in range(4)), *(("spread", client) for client in range(4))]
    assert run.asked[: len(before)] == [(-1, phase, 0, client) for phase, client in before]


def test_what_set_up_pools_every_client_keeps():
    problem = problem_of(ToyMeans)
    with InMemoryFederation(problem) as federation:
        asyncio.run(federation.play(1))
        pools = [Transaction(federation.clients.store(client)).get("pool", Means) for client in range(4)]
    wanted = torch.stack([problem.client_data(client).train.all()[0].mean(0) for client in range(4)])
    for pool in pools:
        assert pool is not None
        assert torch.equal(pool.samples, wanted)


def test_finalize_asks_everybody_after_the_last_round():
    run = run_in_memory(problem_of(ToyMeans, fraction=0.5), 2)
    assert [(phase, client) for index, phase, _, client in run.asked if index == 2] == [
        ("moments", client) for client in range(4)
    ]
    assert len(run.states) == 4
    last, final = run.states[2].weights, run.states[3].weights
    assert [name for name in last if not torch.equal(last[name], final[name])] == ["classifier.bias"]


# Who is missing


def test_a_method_knows_who_is_missing_and_can_ask_again():
    def once(index: int, phase: str, step: int, client: int) -> bool:
        return (index, step, client) == (1, 0, 2)

    run = run_in_memory(problem_of(ToyLoyal), 2, absent=once)
    assert [record["asked_again"] for record in run.records] == [[], [2]]
    assert [record["missing"] for record in run.records] == [{}, {}]
    assert run.state.missed == {}
    assert (1, "fit", 1, 2) in run.asked


def test_who_stays_away_is_counted_and_stands_in_with_its_last_update():
    away = run_in_memory(problem_of(ToyLoyal), 3, absent=lambda index, phase, step, client: index and client == 2)
    assert away.state.missed == {2: 2}
    assert away.records[1]["missing"] == {2: "not connected"}
    first, last = away.states[1].last[2], away.state.last[2]
    assert all(torch.equal(first[name], last[name]) for name in first)


# A head of its own


def test_a_method_may_add_to_the_network_that_travels():
    problem = problem_of(ToyHead)
    run = run_in_memory(problem, 1)
    assert "head.weight" in run.weights
    assert run.evaluate().num_examples == len(problem.dataset.test)
    plain = run_in_memory(problem_of("fedavg"), 1)
    assert run.measured()["down"]["weights"] == plain.measured()["down"]["weights"] + 4 * 4 * 110
