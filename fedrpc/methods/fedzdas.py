"""Fed-ZDAS (Hao et al., 2021): the server inverts every received model and trains their mean on the synthetic data.

Departs from the paper: nothing. Where the paper is silent:
- Data is synthesised from round `t_start` on: 64 inputs of every class from each client's model, whatever classes the
  client has. `blocks/zero_shot.py` has the details.
- The server trains for one epoch with SGD at 0.002 and batches of 10, with its network in training mode, so BatchNorm's
  averaged statistics change too. At 0.02, the clients' own rate, the epoch takes the mean away from where the clients
  brought it: with each of three seeds accuracy over clients fell by more than a point, and at 0.002 it stayed about
  FedAvg's (zda-fmnist in docs/results).
- The mean is uniform over the clients that trained on anything.
- A model for which equation 3 is never finite gives no data; records say so.

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
    Inversion,
    SyntheticBatch,
    ZeroShotParams,
    build_privacy_record,
    require_statistics,
    start_inversion,
)
from fedrpc.methods.fedavg import EqualUpdate, FedAvg, Global
from fedrpc.methods.method import ClientContext, ClientId, Env, Reply, Round, on, register
from fedrpc.methods.tools import ReportedValue
from fedrpc.models.state import load, read_tensors
from fedrpc.training.loop import train
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.message import Tensors

_CHUNK = 20  # iterations between two points at which the server can be stopped


class FedZdasParams(ZeroShotParams):
    """The paper does not give the server's training: one epoch at a tenth of the clients' rate."""

    server_epochs: int = Field(1, ge=0, description="epochs over the synthetic data")
    server_lr: float = Field(0.002, gt=0, description="learning rate of the server's SGD")
    server_batch_size: int = Field(10, ge=2, description="batch size of the server's SGD")


@register
class FedZdas(FedAvg[FedZdasParams]):
    """FedAvg with a uniform mean, which the server trains on data synthesised from the clients' models."""

    name = "fedzdas"
    needs_each_update = "the server inverts each client's model"
    dp_sgd = REFUSES_DP_SGD

    def check(self, env: Env[FedZdasParams]) -> None:
        """Refuses networks without BatchNorm."""
        require_statistics(self.name, env.model())

    def report_values(self, params: Any) -> Sequence[ReportedValue]:
        """The real fraction of the training data, and that no guarantee follows from it."""
        return REPORTED

    async def round(self, state: Global, rnd: Round[FedZdasParams]) -> Global:
        """Asks the cohort to train, inverts each model as it arrives, and trains the mean on all synthetic data."""
        pool: dict[ClientId, SyntheticBatch] = {}

        async def invert(reply: Reply[EqualUpdate]) -> None:
            if rnd.params.generates_in(rnd.index) and reply.body.num_examples:
                pool[reply.client] = await _invert(rnd, reply.client, reply.body.weights)

        fit = await train_cohort(rnd, FIT, state, each=invert)
        seen = {client: answer.num_examples for client, answer in fit.answers.items()}
        rnd.record(**build_privacy_record(rnd.env, seen), **_build_record(pool))
        if not fit.clients:
            return state
        usable = [batch for batch in pool.values() if batch.is_usable]
        if not usable:
            return Global(fit.weights)
        weights, loss = await rnd.compute(_train_mean, rnd, fit.weights, usable, keep_memory=True)
        rnd.record(server_loss=loss)
        return Global(weights)

    @on(FIT)
    def fit(self, ctx: ClientContext[FedZdasParams], msg: Global) -> EqualUpdate:
        """Trains the received model on the client's own data."""
        return EqualUpdate(**vars(super().fit(ctx, msg)))


async def _invert(rnd: Round[FedZdasParams], client: ClientId, weights: Tensors) -> SyntheticBatch:
    """Data from one client's model; it does not depend on who else answered."""

    def begin() -> Inversion:
        model = rnd.model()
        load(model, weights)
        return start_inversion(model, rnd.env, rnd.params, rnd.rng("synthesis", client), rnd.device)

    batch = await rnd.compute(begin)
    for done in range(0, rnd.params.iterations, _CHUNK):
        await rnd.compute(batch.advance, min(_CHUNK, rnd.params.iterations - done), keep_memory=True)
    return await rnd.compute(batch.finish)


def _train_mean(rnd: Round[FedZdasParams], weights: Tensors, pool: Sequence[SyntheticBatch]) -> tuple[Tensors, float]:
    """The mean model after the server's epochs on all synthetic data, and the loss of the last one."""
    model, params = rnd.model(), rnd.params
    load(model, weights)
    data = Examples.of(torch.cat([batch.x for batch in pool]), torch.cat([batch.y for batch in pool]))
    config = TrainConfig(lr=params.server_lr, epochs=params.server_epochs, batch_size=params.server_batch_size)
    order = rnd.rng("order")
    report = train(model, cross_entropy, data, config, lr=params.server_lr, order=order, device=rnd.device)
    return read_tensors(model), report.loss


def _build_record(pool: dict[ClientId, SyntheticBatch]) -> dict[str, Any]:
    """The loss of each inversion, None where the model could not be inverted, and the number of inputs."""
    if not pool:
        return {}
    losses = {client: batch.loss if batch.is_usable else None for client, batch in pool.items()}
    return {"synthesis_loss": losses, "num_made": sum(len(batch.y) for batch in pool.values() if batch.is_usable)}
