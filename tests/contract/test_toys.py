"""What no built-in method does, shown on toys: durable points within a round, and asking absent clients again."""

from __future__ import annotations

import asyncio

import torch

from fedrpc.client.store import Transaction
from tests.fakes import InMemoryFederation, problem_of, run_in_memory
from tests.toys import (
    Player,
    ToyLoyal,
    ToyMpgan,
)


def kinds(rows, direction: str, phase: str | None = None) -> set[str]:
    return {
        key.kind
        for key, sums in rows.items()
        if key.direction == direction and sums.tensor_bytes and phase in (None, key.phase)
    }


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
