"""Small runs of FedDPMS that its tests look at from several sides."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import cache
from typing import Any

from torch import nn

from fedrpc.client.store import Transaction
from fedrpc.models.dpms import Dpms
from tests.fakes import InMemoryFederation, Played, SmallProblem, problem_of, run_in_memory

LATENT = 5
SMALL = {"preliminary": 2, "alpha": 4, "tries": 3, "n": 8, "m": 3}
ROUNDS = 5
SETTING: dict[str, Any] = {
    "partition": "shards:2",
    "clients": 5,
    "train_size": 60,
    "train": {"optimizer": "adam", "lr": 0.03, "epochs": 3},  # enough to know one of its own two classes
}


def build() -> nn.Module:
    return Dpms((1, 28, 28), 10, latent=LATENT)


def build_problem(method: str = "feddpms", params: dict[str, Any] | None = None, **options: Any) -> SmallProblem:
    """Two classes a client, so that every client lacks classes that others have."""
    if method == "feddpms":
        options["params"] = SMALL | (params or {})
    return problem_of(method, build=build, **SETTING | options)


@cache
def play(mode: str = "paper", fraction: float = 1.0) -> Played:
    """One run that many tests look at."""
    return run_in_memory(build_problem(params={"mode": mode}, fraction=fraction), ROUNDS)


def count_bytes(run: Played, kind: str, direction: str, phase: str) -> Counter[tuple[int, int]]:
    """Tensor bytes by round and client."""
    found: Counter[tuple[int, int]] = Counter()
    for key, sums in run.rows.items():
        if (key.kind, key.direction, key.phase) == (kind, direction, phase) and sums.tensor_bytes:
            found[key.round, key.client] += sums.tensor_bytes
    return found


def read_stored(federation: InMemoryFederation, client: int, key: str, cls: type[Any]) -> Any:
    return Transaction(federation.clients.store(client)).get(key, cls)


def read_privacy_rows(federation: InMemoryFederation) -> list[dict[str, Any]]:
    clients = range(federation.problem.config.clients)
    return [json.loads(row) for client in clients for row in federation.clients.store(client).read_privacy_rows(0)]


def play_round(federation: InMemoryFederation, state: Any, index: int) -> tuple[Any, dict[str, Any]]:
    """One round, and what it records."""
    rnd = federation.stage(index)
    state = asyncio.run(federation.problem.method.round(state, rnd))
    federation.reach_durable_point()
    return state, rnd.recorded
