"""Fed-ZDAC (Hao et al., 2021): clients invert the received model and train on their own data and on what that gives.

Departs from the paper: nothing. Where it is silent:
- Data is made from round `t_start` on, 80 as in its Figure 5, in every round anew; 64 inputs of each class, all classes
  alike, whatever the client has. `blocks/zero_shot.py` says the rest of how they are made.
- Real and made examples are shuffled together; an epoch goes through all of both.
- The mean is uniform ("a simple arithmetic mean") over the clients that trained on anything.

Its claim of (0, delta) differential privacy is no guarantee, and none is reported: records and summary have the real
fraction, which delta can not be below, and `formal_dp` "none" with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedrpc.data.examples import Examples
from fedrpc.methods.blocks.updates import release_update, train_cohort
from fedrpc.methods.blocks.zero_shot import (
    FIT,
    REFUSES_DP_SGD,
    REPORTED,
    EqualUpdate,
    ZeroShotParams,
    inversion,
    privacy_record,
    require_statistics,
)
from fedrpc.methods.fedavg import FedAvg, Global
from fedrpc.methods.method import ClientContext, Env, Round, on, register
from fedrpc.methods.tools import Reported
from fedrpc.models.state import load


@register
class FedZdac(FedAvg[ZeroShotParams]):
    """FedAvg with a uniform mean, whose clients add made data to their own."""

    name = "fedzdac"
    dp_sgd = REFUSES_DP_SGD

    def check(self, env: Env[ZeroShotParams]) -> None:
        """Refuses networks without BatchNorm."""
        require_statistics(self.name, env.model())

    def reported(self, params: Any) -> Sequence[Reported]:
        """How much of the training data was real, and that no guarantee follows from that."""
        return REPORTED

    async def round(self, state: Global, rnd: Round[ZeroShotParams]) -> Global:
        """Asks the cohort to train and takes the mean, each client alike."""
        fit = await train_cohort(rnd, FIT, state)
        rnd.record(**privacy_record(rnd.env, {client: answer.num_examples for client, answer in fit.answers.items()}))
        return Global(fit.weights) if fit.clients else state

    @on(FIT)
    def fit(self, ctx: ClientContext[ZeroShotParams], msg: Global) -> EqualUpdate:
        """Trains the received model on own data and, from `t_start` on, on what inverting it gives."""
        model, data = ctx.model(), ctx.data.train
        load(model, msg.weights)
        if ctx.params.makes(ctx.round):
            batch = inversion(model, ctx.env, ctx.params, ctx.rng("synthesis"), ctx.device)
            batch.advance(ctx.params.iterations, ctx.check)
            made = batch.made()
            if made.usable:
                data = data + Examples.of(made.x, made.y)
        report = ctx.train(model, self.build_loss(ctx, msg), data=data)
        return EqualUpdate(**release_update(ctx, model, report))
