"""Client selection: who is in a round's cohort.

With `availability` those who are away are replaced by others, and with `select_extra` more are asked than are wanted;
both are drawn at random from those who are there and were not chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from fedrpc.config import RunConfig
from fedrpc.emulation.presence import parse_availability
from fedrpc.errors import ConfigError
from fedrpc.methods.phases import ClientId
from fedrpc.methods.runtime import Env
from fedrpc.registry import Registry
from fedrpc.seeds import derive

# From the round's stream, the round and the run's environment to the cohort. It must depend on nothing else: cohorts
# are computed again for the prediction of bytes, and after a crash.
Selection = Callable[[np.random.Generator, int, Env], Sequence[ClientId]]
SELECTIONS: Registry[Selection] = Registry("selection", "selections")


def select_cohort(config: RunConfig, env: Env, round_index: int) -> list[ClientId]:
    """The cohort of a round, in ascending order: the same for every method with the same seed."""
    name, num_clients = config.selection, config.clients
    chosen = SELECTIONS[name](derive(config.seed, "cohort", round_index), round_index, env)
    cohort = sorted({int(client) for client in chosen})
    if not cohort or len(cohort) < len(chosen) or not 0 <= cohort[0] <= cohort[-1] < num_clients:
        raise ConfigError(
            f"selection '{name}' should choose distinct clients of 0 to {num_clients - 1}, got {list(chosen)[:10]}"
        )
    return _find_present(config, cohort, round_index)


def _find_present(config: RunConfig, chosen: list[ClientId], round_index: int) -> list[ClientId]:
    if config.availability is None and config.select_extra is None:
        return chosen
    present = list(range(config.clients))
    if config.availability is not None:
        availability = parse_availability(config.availability)
        present = availability.list_present(config.clients, config.seed, round_index)
    if not present:
        raise ConfigError(
            f"availability: nobody is there in round {round_index}; change the trace, or run fewer rounds"
        )
    cohort = [client for client in chosen if client in set(present)]
    others = [client for client in present if client not in set(chosen)]
    wanted = len(chosen) + math.ceil((config.select_extra or 0.0) * len(chosen))
    drawn = derive(config.seed, "substitutes", round_index).permutation(len(others))
    return sorted(cohort + [others[place] for place in drawn[: wanted - len(cohort)]])


@SELECTIONS.register("uniform")
def select_uniformly(rng: np.random.Generator, round_index: int, env: Env) -> Sequence[ClientId]:
    """`cohort_size` clients without replacement, each as likely as any other."""
    chosen = rng.choice(env.num_clients, env.cohort_size, replace=False)
    return [int(client) for client in chosen]
