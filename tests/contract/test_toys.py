"""What no built-in method does, tested with toys: durable points within a round, and asking missing clients again."""

from __future__ import annotations

import asyncio

import torch

from fedrpc.client.store import Transaction
from tests.fakes import InMemoryFederation, problem_of, run_in_memory
from tests.toys import (
    StoredDiscriminator,
    ToyLoyal,
    ToyMpgan,
)


def find_kinds(rows, direction: str, phase: str | None = None) -> set[str]:
    return {
        key.kind
        for key, sums in rows.items()
        if key.direction == direction and sums.tensor_bytes and phase in (None, key.phase)
    }


# Many small steps


def test_the_steps_of_a_round_are_numbered():
    run = run_in_memory(problem_of(ToyMpgan, params={"steps": 7}), 2)
    for index in range(2):
        steps = [step for at, phase, step, client in run.asked if (at, phase, client) == (index, "gan_step", 0)]
        assert steps == list(range(7))
    assert find_kinds(run.rows, "down", "gan_step") == {"images"}
    assert find_kinds(run.rows, "up", "gan_step") == {"feedback"}


def test_a_clients_optimizer_continues_across_steps_and_rounds():
    with InMemoryFederation(problem_of(ToyMpgan, params={"steps": 3})) as federation:
        asyncio.run(federation.play(2))
        stores = [Transaction(federation.clients.store(client)) for client in range(4)]
        discriminators = [store.get("discriminator", StoredDiscriminator) for store in stores]
    assert all(one is not None for one in discriminators)
    assert [one.moments["0.step"].item() for one in discriminators] == [6] * 4
    assert len({one.weights["1.weight"].sum().item() for one in discriminators}) == 4, "each client has its own"


def test_saving_within_a_round_changes_nothing():
    often, never = ({"steps": 6, "save_every": every} for every in (1, 100))
    assert (
        run_in_memory(problem_of(ToyMpgan, params=often), 2).sha256
        == run_in_memory(problem_of(ToyMpgan, params=never), 2).sha256
    )


def test_saving_within_a_round_deletes_old_versions_in_clients_stores():
    def count_versions(save_every: int) -> int:
        params = {"steps": 12, "save_every": save_every}
        with InMemoryFederation(problem_of(ToyMpgan, params=params)) as federation:
            state = federation.init()
            asyncio.run(federation.problem.method.round(state, federation.stage(0)))
            store = federation.clients.store(0)
            with store._lock:
                return int(store._db.execute("SELECT COUNT(*) FROM entries WHERE key = 'discriminator'").fetchone()[0])

    assert count_versions(100) == 12
    assert count_versions(2) <= 2


def test_feedback_trains_the_generator():
    """The server's step moves the generator along the gradients that clients send back."""
    problem = problem_of(ToyMpgan, params={"steps": 1, "batch": 2})
    run = run_in_memory(problem, 1)
    before, after = run.states[0].generator, run.states[1].generator
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert run.states[1].moments


# Missing clients


def test_a_method_can_ask_missing_clients_again():
    def is_absent(index: int, phase: str, step: int, client: int) -> bool:
        return (index, step, client) == (1, 0, 2)

    run = run_in_memory(problem_of(ToyLoyal), 2, absent=is_absent)
    assert [record["asked_again"] for record in run.records] == [[], [2]]
    assert [record["missing"] for record in run.records] == [{}, {}]
    assert run.state.missed == {}
    assert (1, "fit", 1, 2) in run.asked


def test_a_missing_client_is_counted_and_its_last_update_used():
    away = run_in_memory(problem_of(ToyLoyal), 3, absent=lambda index, phase, step, client: index and client == 2)
    assert away.state.missed == {2: 2}
    assert away.records[1]["missing"] == {2: "not connected"}
    first, last = away.states[1].last[2], away.state.last[2]
    assert all(torch.equal(first[name], last[name]) for name in first)
