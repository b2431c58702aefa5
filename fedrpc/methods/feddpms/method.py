"""FedDPMS (Chen and Vikalo, 2022): clients that lack classes decode another client's noisy latent means of them.

The run's network must be `dpms`: encoder, latent mean in [0, 1] and classifier, which all other methods can run on too.
It travels; the head of the log-variance stays on its client, and so does the decoder until the last preliminary round.

Modes:
- `paper`: means over all examples of a class, by the client's own trained encoder; noisy copies are drawn until `alpha`
  of them pass the client's own classifier, or `tries` are up. Nothing of that has a guarantee.
- `private`: means over exactly `m` examples, by the received encoder, each latent vector cut to `clip`; exactly `alpha`
  copies leave, and who gets them drops what the received model does not take for its class. The noise covers the
  latent means alone, given the received model; weights and class indices are not covered.

Departs from the paper:
- sigma is the noise's standard deviation itself (equation 1); records have the epsilons of its three readings.
- Nobody is matched with itself, or with somebody who has none of the classes in question; ties go to the lower id.
- The rejection loop ends after `tries` times `alpha` draws for a class. What is missing is sent as empty rows, so that
  every client's means have one size; records say which classes gave too few, or nothing at all.
- A client that has fewer than `n` classes names fewer.
- `sync_decoder` averages decoders in every preliminary round. In the paper they never meet before the last one.
- The decoder gives [0, 1], which is mapped to the range of the run's inputs.

Where the paper is silent: all decoders start from the same weights; `blocks/vae.py` has the terms of the loss; the
decoder's mean is by sample count, like the network's; of classes with as many examples the lower id is named first, so
a client that lacks more than `n` classes names the lowest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedrpc.data.examples import Examples
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.pool import Nothing
from fedrpc.methods.blocks.updates import release_update
from fedrpc.methods.blocks.vae import Pixels, VaeLoss, decoder_of
from fedrpc.methods.feddpms.client import (
    build_vae,
    count_classes,
    decode_means,
    load_synthetic,
    share_filtered_means,
    share_private_means,
)
from fedrpc.methods.feddpms.cost import Tally
from fedrpc.methods.feddpms.latent_means import NoisyMeans, scarce
from fedrpc.methods.feddpms.messages import (
    FIT,
    NAME,
    PRETRAIN,
    SCARCE,
    SHARE,
    Classes,
    Done,
    FedDpmsParams,
    Invitation,
    Kept,
    Lesson,
    Local,
    Pretrained,
    Shared,
    Start,
    State,
    Trained,
)
from fedrpc.methods.feddpms.privacy import NAMED, reported
from fedrpc.methods.feddpms.server import run_preliminary_round, run_secondary_round
from fedrpc.methods.method import (
    ClientContext,
    Cost,
    Env,
    Method,
    Round,
    Shapes,
    on,
    refused,
    register,
)
from fedrpc.methods.tools import Pictures, Reported
from fedrpc.models.dpms import require_latent
from fedrpc.models.state import load, read_tensors
from fedrpc.privacy.mechanisms import public
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.message import Tensors

_SHOWN = 8  # images of a class, at least, for a row of a contact sheet


@register
class FedDpms(Method[State, FedDpmsParams]):
    """Both halves of FedDPMS."""

    name = NAME
    shares = "which classes are abundant or scarce, and noisy latent means of the abundant ones"
    dp_sgd = refused(
        "class indices leave without noise and decide who gets what, so private training would give the run "
        "no epsilon, and the means are covered for other neighbours than DP-SGD covers"
    )

    def check(self, env: Env[FedDpmsParams]) -> None:
        """Refuses other networks, data without a range, and what can not be shared."""
        params, name = env.params, self.name
        require_latent(env.model(), name)
        Pixels.of(env, name)
        if params.n > env.num_classes:
            raise ConfigError(f"params.n = {params.n} classes, but the data has {env.num_classes}; lower it")
        if params.alpha and not params.preliminary:
            raise ConfigError(
                "params.preliminary = 0 leaves no round to train a decoder in; set it to 1 or more, or "
                "params.alpha to 0"
            )
        if params.alpha and not params.filters and params.m > max(env.num_examples()):
            raise ConfigError(
                f"params.m = {params.m} latent vectors behind a mean, but the largest client has "
                f"{max(env.num_examples())} examples of all classes together; lower it, or nobody can share"
            )

    def reported(self, params: Any) -> Sequence[Reported]:
        """The filter's acceptance, and the claimed epsilons beside the audited ones."""
        return reported(filters=params.filters)

    def init(self, env: Env[FedDpmsParams]) -> State:
        """The network's initial weights."""
        return State(read_tensors(env.model()), None, {}, {}, {}, [], [])

    # The server half

    async def round(self, state: State, rnd: Round[FedDpmsParams]) -> State:
        """A preliminary or a secondary round."""
        preliminary = rnd.index < rnd.params.preliminary
        return await (run_preliminary_round(state, rnd) if preliminary else run_secondary_round(state, rnd))

    def model(self, state: State) -> Tensors:
        """The global model: encoder, latent mean and classifier."""
        return state.weights

    def pictures(self, state: State, env: Env[FedDpmsParams], count: int, rng: np.random.Generator) -> Pictures | None:
        """What the decoder makes of all means that were shared; in private mode only what the model takes for it.

        A row for each class of which there is at least half a row of a contact sheet, as many images in each.
        """
        if state.decoder is None or not state.latents:
            return None
        decoder, model = decoder_of(env, self.name), require_latent(env.model(), self.name)
        load(decoder, state.decoder)
        load(model, state.weights)
        means = NoisyMeans(torch.cat([*state.latents.values()]), torch.cat([*state.labels.values()]))
        made = decode_means(env, decoder, model, means)
        rows = {c: made.x[made.y == c] for c in range(env.num_classes) if int((made.y == c).sum()) >= _SHOWN}
        if not rows:
            return None
        size = min(count, *map(len, rows.values()))
        spread = {c: torch.linspace(0, len(x) - 1, size).long() for c, x in rows.items()}  # over all who shared
        return Pictures({f"class {c}": x[spread[c]] for c, x in rows.items()}, {}, (made.x, made.y))

    # The client half

    @on(PRETRAIN)
    def pretrain(self, ctx: ClientContext[FedDpmsParams], msg: Start) -> Pretrained:
        """Trains the received network together with the client's own log-variance head and decoder."""
        model = require_latent(ctx.model(), self.name)
        load(model, msg.weights)
        vae = build_vae(ctx, model)
        if msg.decoder is not None:
            load(vae.decoder, msg.decoder)
        report = ctx.train(vae, VaeLoss(ctx.params.lam, Pixels.of(ctx.env, self.name)))
        ctx.store.put("local", Local(read_tensors(vae.logvar), read_tensors(vae.decoder)))
        wanted = ctx.params.sends_decoder(ctx.round)
        return Pretrained(**release_update(ctx, model, report), decoder=read_tensors(vae.decoder) if wanted else None)

    @on(SCARCE)
    def lacks(self, ctx: ClientContext[FedDpmsParams], msg: Nothing) -> Classes:
        """The classes that this client has fewest examples of."""
        return Classes(ctx.release("ids", torch.tensor(scarce(count_classes(ctx), ctx.params.n)), NAMED))

    @on(FIT)
    def fit(self, ctx: ClientContext[FedDpmsParams], msg: Lesson) -> Trained:
        """Trains the received network on own and synthetic examples, as many in an epoch as there are own ones."""
        model = require_latent(ctx.model(), self.name)
        load(model, msg.weights)
        own, made = ctx.data.train, load_synthetic(ctx, model, msg)
        ctx.store.delete("local")
        report = ctx.train(model, cross_entropy, data=own + Examples.of(made.x, made.y) if made else own, draw=len(own))
        if ctx.params.alpha and ctx.store.get("shared", Done) is None:
            ctx.store.put("encoder", Kept(read_tensors(model) if ctx.params.filters else msg.weights))
        num_synthetic = len(made.y) if made else 0
        # A client without examples has trained nothing, whatever it was given.
        counted = replace(report, num_examples=len(own) + num_synthetic if len(own) else 0)
        released = ctx.release("num_synthetic", num_synthetic, public("follows from what the server sent"))
        return Trained(**release_update(ctx, model, counted), num_synthetic=released)

    @on(SHARE)
    def share(self, ctx: ClientContext[FedDpmsParams], msg: Invitation) -> Shared:
        """Noisy means of the latent vectors of the most abundant classes, once in a run."""
        kept = ctx.store.get("encoder", Kept)
        if kept is None:
            ctx.abstain("this client has shared its means before, or has not trained in this round")
        model = require_latent(ctx.model().eval(), self.name)
        load(model, kept.weights)
        ctx.store.delete("encoder")
        ctx.store.put("shared", Done(ctx.round))
        return share_filtered_means(ctx, model, msg) if ctx.params.filters else share_private_means(ctx, model)

    def cost(self, shapes: Shapes[FedDpmsParams]) -> Cost:
        """FedAvg's, with decoders, class indices and means; who is matched with whom follows from class counts."""
        return Tally(shapes).cost()
