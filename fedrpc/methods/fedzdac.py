"""Fed-ZDAC (Hao et al., 2021): clients invert the received model and train on real and synthetic data.

Departs from the paper: nothing. Where the paper is silent:
- Data is synthesised in every round from `t_start` on, 80 as in its Figure 5: 64 inputs of every class, whatever
  classes the client has. `blocks/zero_shot.py` has the details.
- Real and synthetic examples are shuffled together; an epoch goes through all of them.
- The mean is uniform ("a simple arithmetic mean") over the clients that trained on anything.

Its claim of (0, delta) differential privacy is no guarantee, and none is reported: records and summary have the real
fraction, which is a lower bound of delta, and `formal_dp` "none" with the reason.
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
    ZeroShotParams,
    build_privacy_record,
    require_statistics,
    start_inversion,
)
from fedrpc.methods.fedavg import EqualUpdate, FedAvg, Global
from fedrpc.methods.method import ClientContext, ClientId, Env, Round, on, register
from fedrpc.methods.tools import ReportedValue
from fedrpc.models.state import load


@register
class FedZdac(FedAvg[ZeroShotParams]):
    """FedAvg with a uniform mean, whose clients add synthetic data to their own."""

    name = "fedzdac"
    dp_sgd = REFUSES_DP_SGD

    def check(self, env: Env[ZeroShotParams]) -> None:
        """Refuses networks without BatchNorm."""
        require_statistics(self.name, env.model())

    def report_values(self, params: Any) -> Sequence[ReportedValue]:
        """The real fraction of the training data, and that no guarantee follows from it."""
        return REPORTED

    def count_most_examples(self, env: Env[ZeroShotParams], client: ClientId) -> int:
        """The client's own examples, and those that it makes."""
        return env.num_examples()[client] + env.num_classes * env.params.samples_per_class

    async def round(self, state: Global, rnd: Round[ZeroShotParams]) -> Global:
        """Asks the cohort to train; the next model is the uniform mean."""
        fit = await train_cohort(rnd, FIT, state)
        rnd.record(
            **build_privacy_record(rnd.env, {client: answer.num_examples for client, answer in fit.answers.items()})
        )
        return Global(fit.weights) if fit.clients else state

    @on(FIT)
    def fit(self, ctx: ClientContext[ZeroShotParams], msg: Global) -> EqualUpdate:
        """Trains the received model on own data and, from `t_start` on, on synthetic data from its inversion."""
        model, data = ctx.model(), ctx.data.train
        load(model, msg.weights)
        if ctx.params.generates_in(ctx.round):
            batch = start_inversion(model, ctx.env, ctx.params, ctx.rng("synthesis"), ctx.device)
            batch.advance(ctx.params.iterations, ctx.check)
            synthetic = batch.finish()
            if synthetic.is_usable:
                data = data + Examples.of(synthetic.x, synthetic.y)
        report = ctx.train(model, self.build_loss(ctx, msg), data=data)
        return EqualUpdate(**release_update(ctx, model, report))
