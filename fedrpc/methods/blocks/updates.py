"""What all methods that train a model on clients share: asking the cohort, and releasing the update."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedrpc.methods.method import Aggregate, ClientContext, ClientId, Phase, Reply, Round, TrainReport
from fedrpc.methods.phases import Check, Down
from fedrpc.models.state import read_tensors


class HasLosses(Protocol):
    """An answer with the mean loss of each local epoch."""

    @property
    def losses(self) -> Tensor:
        """By epoch."""
        ...


U = TypeVar("U", bound=HasLosses)


async def train_cohort(
    rnd: Round[Any],
    phase: Phase[Down, U],
    message: Down | Mapping[ClientId, Down],
    *,
    check: Check[Down, U] | None = None,
    each: Callable[[Reply[U]], Awaitable[None]] | None = None,
) -> Aggregate[U]:
    """Asks the cohort to train, aggregates, and records every client's local losses; arguments as in `Round.mean`."""
    fit = await rnd.mean(phase, message, check=check, each=each)
    rnd.record(local_losses={client: answer.losses.tolist() for client, answer in fit.answers.items()})
    return fit


def release_update(ctx: ClientContext[Any], model: nn.Module, report: TrainReport) -> dict[str, Any]:
    """The fields of an update, released with what its training guarantees."""
    return {
        "weights": ctx.release("weights", read_tensors(model), report.covered),
        "num_examples": ctx.release("num_examples", report.num_examples, report.described),
        "losses": ctx.release("losses", torch.tensor(report.epoch_losses, dtype=torch.float64), report.described),
    }


def weigh_equally(update: Any) -> float:
    """The weight of an update in a uniform mean over the clients that trained on anything."""
    return float(update.num_examples > 0)
