"""Fed-ZDAS (Hao et al., 2021): the server inverts every received model and trains their mean on what that gives.

Departs from the paper: nothing. Where it is silent:
- Data is made from round `t_start` on; 64 inputs of each class from each client's model, all classes alike, whatever
  the client has (a model of two classes gives poor inputs of the others: the pool is balanced in labels, not in
  quality). `blocks/zero_shot.py` says the rest of how they are made.
- The server trains for one epoch with SGD at 0.02 and batches of 10, the clients' own settings, its network in
  training mode, so that BatchNorm's averaged statistics move too.
- The mean is uniform over the clients that trained on anything.
- A model for which equation 3 is no number at all gives no data; records say so.

Clients upload models of real data alone, so the paper's claim of (0, delta) differential privacy says nothing here: the
real fraction is 1, and records have it with `formal_dp` "none" and the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field

from fedrpc.config import TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.methods.blocks.updates import train_cohort
from fedrpc.methods.blocks.zero_shot import (
    FIT,
    REFUSES_DP_SGD,
    REPORTED,
    EqualUpdate,
    Inversion,
    Made,
    ZeroShotParams,
    inversion,
    privacy_record,
    require_statistics,
)
from fedrpc.methods.fedavg import FedAvg, Global
from fedrpc.methods.method import ClientContext, ClientId, Env, Reply, Round, on, register
from fedrpc.methods.tools import Reported
from fedrpc.models.state import load, read_tensors
from fedrpc.training.loop import train
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.message import Tensors

_AT_A_TIME = 20  # iterations between two moments at which the server can be stopped


class FedZdasParams(ZeroShotParams):
    """The server's training is silent in the paper: one epoch of what clients do."""

    server_epochs: int = Field(1, ge=0, description="over the made data")
    server_lr: float = Field(0.02, gt=0, description="of the server's SGD")
    server_batch_size: int = Field(10, ge=2)


@register
class FedZdas(FedAvg[FedZdasParams]):
    """FedAvg with a uniform mean, which the server trains on data made from the clients' models."""

    name = "fedzdas"
    needs_each_update = "the server inverts each client's model"
    dp_sgd = REFUSES_DP_SGD

    def check(self, env: Env[FedZdasParams]) -> None:
        """Refuses networks without BatchNorm."""
        require_statistics(self.name, env.model())

    def reported(self, params: Any) -> Sequence[Reported]:
        """How much of the training data was real, and that no guarantee follows from that."""
        return REPORTED

    async def round(self, state: Global, rnd: Round[FedZdasParams]) -> Global:
        """Asks the cohort to train, inverts each model as it comes, and trains the mean on what all of them gave."""
        pool: dict[ClientId, Made] = {}

        async def invert(reply: Reply[EqualUpdate]) -> None:
            if rnd.params.makes(rnd.index) and reply.body.num_examples:
                pool[reply.client] = await _invert(rnd, reply.client, reply.body.weights)

        fit = await train_cohort(rnd, FIT, state, each=invert)
        seen = {client: answer.num_examples for client, answer in fit.answers.items()}
        rnd.record(**privacy_record(rnd.env, seen), **_record(pool))
        if not fit.clients:
            return state
        usable = [made for made in pool.values() if made.usable]
        if not usable:
            return Global(fit.weights)
        weights, loss = await rnd.compute(_teach, rnd, fit.weights, usable, keep_memory=True)
        rnd.record(server_loss=loss)
        return Global(weights)

    @on(FIT)
    def fit(self, ctx: ClientContext[FedZdasParams], msg: Global) -> EqualUpdate:
        """Trains the received model on the client's own data."""
        return EqualUpdate(**vars(super().fit(ctx, msg)))


async def _invert(rnd: Round[FedZdasParams], client: ClientId, weights: Tensors) -> Made:
    """Data from one client's model; the same whoever else answered."""

    def begin() -> Inversion:
        model = rnd.model()
        load(model, weights)
        return inversion(model, rnd.env, rnd.params, rnd.rng("synthesis", client), rnd.device)

    batch = await rnd.compute(begin)
    for done in range(0, rnd.params.iterations, _AT_A_TIME):
        await rnd.compute(batch.advance, min(_AT_A_TIME, rnd.params.iterations - done), keep_memory=True)
    return await rnd.compute(batch.made)


def _teach(rnd: Round[FedZdasParams], weights: Tensors, pool: Sequence[Made]) -> tuple[Tensors, float]:
    """The mean model after the server's epochs on all made data, and the loss of the last one."""
    model, params = rnd.model(), rnd.params
    load(model, weights)
    data = Examples.of(torch.cat([made.x for made in pool]), torch.cat([made.y for made in pool]))
    config = TrainConfig(lr=params.server_lr, epochs=params.server_epochs, batch_size=params.server_batch_size)
    order = rnd.rng("order")
    report = train(model, cross_entropy, data, config, lr=params.server_lr, order=order, device=rnd.device)
    return read_tensors(model), report.loss


def _record(pool: dict[ClientId, Made]) -> dict[str, Any]:
    """What was made of whose model, and how well it fits; no loss where the model could not be inverted."""
    if not pool:
        return {}
    losses = {client: made.loss if made.usable else None for client, made in pool.items()}
    return {"synthesis_loss": losses, "num_made": sum(len(made.y) for made in pool.values() if made.usable)}
