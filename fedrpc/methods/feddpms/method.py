"""FedDPMS (Chen and Vikalo, 2022): clients that lack classes decode another client's noisy latent means of them.

The run's network must be `dpms`: encoder, latent mean in [0, 1] and classifier, on which all other methods can run too.
It travels; the log-variance head stays on its client, and so does the decoder until the last preliminary round.

Modes:
- `paper`: means over all examples of a class, by the client's own trained encoder; noisy copies are sampled until
  `alpha` of them pass the client's own classifier, or `tries` are used up. None of that has a guarantee.
- `private`: means over exactly `m` examples, by the received encoder, each latent vector clipped to norm `clip`;
  exactly `alpha` copies leave, and the receiving client drops images that the received model does not assign to their
  class. Which `m` follows from positions and labels alone, so that one record changes one member of a mean. The noise
  covers the latent means alone, given the received model; weights and class indices are not covered.

`vae = "code"` is the auto-encoder of the authors' code, network and losses: on `dpms-code`, which it takes by itself
and FedAvg takes as `--model`. Its latent mean has no sigmoid; in `private` mode clipping alone bounds latent vectors.

Departs from the paper:
- sigma is the noise's standard deviation itself (equation 1); records have the epsilons of its three readings.
- No client is matched with itself, or with one that has none of the classes in question; ties go to the lower id.
- The rejection loop ends after `tries` times `alpha` copies of a class. Missing ones are sent as empty rows, so that
  every client's means have one size; records say which classes gave too few, or none at all.
- A client that has fewer than `n` classes names fewer.
- `sync_decoder` averages decoders in every preliminary round. In the paper they are averaged only in the last one.
- The decoder gives [0, 1], which is mapped to the range of the run's inputs.

Where the paper is silent: all decoders start from the same weights; `blocks/vae.py` has the terms of the loss; the
decoder's mean is weighted by examples, like the network's; of classes with equally many examples the lower id is named
first, so a client that lacks more than `n` classes names the lowest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedrpc.data.examples import Examples
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.pool import Nothing
from fedrpc.methods.blocks.updates import release_update
from fedrpc.methods.blocks.vae import Pixels, VaeLoss, build_decoder
from fedrpc.methods.feddpms.client import (
    build_vae,
    count_classes,
    decode_means,
    load_synthetic,
    share_filtered_means,
    share_private_means,
)
from fedrpc.methods.feddpms.cost import Tally
from fedrpc.methods.feddpms.latent_means import NoisyMeans, rank_scarce_classes
from fedrpc.methods.feddpms.messages import (
    FIT,
    NAME,
    PRETRAIN,
    SCARCE,
    SHARE,
    FedDpmsParams,
    FitRequest,
    FitUpdate,
    LocalNetworks,
    PretrainRequest,
    PretrainUpdate,
    ScarceClasses,
    SharedMark,
    SharedMeans,
    ShareRequest,
    State,
    StoredWeights,
)
from fedrpc.methods.feddpms.privacy import NAMED, build_mechanism, list_reported_values
from fedrpc.methods.feddpms.server import run_preliminary_round, run_secondary_round
from fedrpc.methods.method import (
    ClientContext,
    ClientId,
    Cost,
    Env,
    Method,
    Round,
    Shapes,
    on,
    refused,
    register,
)
from fedrpc.methods.tools import Pictures, ReportedValue
from fedrpc.models.dpms import Dpms, DpmsCode, require_latent
from fedrpc.models.state import load, read_tensors
from fedrpc.privacy.mechanisms import Histories, public
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.message import Tensors

_MIN_ROW = 8  # least images of a class for a row of a contact sheet


@register
class FedDpms(Method[State, FedDpmsParams]):
    """Both halves of FedDPMS."""

    name = NAME
    needs_model = "dpms"
    shares = "which classes are abundant or scarce, and noisy latent means of the abundant ones"
    dp_sgd = refused(
        "class indices leave without noise and decide which client gets which means, so private training would give "
        "the run no epsilon, and the means are covered for other neighbours than DP-SGD covers"
    )

    def network(self, build: Callable[[], nn.Module], params: FedDpmsParams) -> nn.Module:
        """The configured network, or that of the authors' code in its place."""
        network = build()
        if params.vae == "paper" or not isinstance(network, Dpms) or network.code:
            return network
        return DpmsCode(network.shape, network.classifier.out_features, network.latent)

    def check(self, env: Env[FedDpmsParams]) -> None:
        """Refuses other networks, data without bounds, and parameters with which no means could be shared."""
        params, name = env.params, self.name
        if require_latent(env.model(), name).code and params.vae == "paper":
            raise ConfigError("model 'dpms-code' is the authors' auto-encoder: set params.vae=code, or --model dpms")
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
                f"params.m = {params.m} latent vectors in a mean, but the largest client has "
                f"{max(env.num_examples())} examples of all classes together; lower it, or no client can share"
            )

    def report_values(self, params: Any) -> Sequence[ReportedValue]:
        """The filter's acceptance, and the claimed epsilons beside the audited ones."""
        return list_reported_values(filters=params.filters)

    def init(self, env: Env[FedDpmsParams]) -> State:
        """The network's initial weights."""
        return State(read_tensors(env.model()), None, {}, {}, {}, [], [])

    def count_most_examples(self, env: Env[FedDpmsParams], client: ClientId) -> int:
        """The client's own examples, and one for each mean that it receives."""
        return env.num_examples()[client] + env.params.alpha * env.params.n

    # The server half

    async def round(self, state: State, rnd: Round[FedDpmsParams]) -> State:
        """A preliminary or a secondary round."""
        preliminary = rnd.index < rnd.params.preliminary
        return await (run_preliminary_round(state, rnd) if preliminary else run_secondary_round(state, rnd))

    def model(self, state: State) -> Tensors:
        """The global model: encoder, latent mean and classifier."""
        return state.weights

    def generate_pictures(
        self, state: State, env: Env[FedDpmsParams], count: int, rng: np.random.Generator
    ) -> Pictures | None:
        """Images decoded from all shared means; in private mode only those that the model assigns to their class.

        A row for each class with at least half a row of a contact sheet, the same number of images in each.
        """
        if state.decoder is None or not state.latents:
            return None
        decoder, model = build_decoder(env, self.name), require_latent(env.model(), self.name)
        load(decoder, state.decoder)
        load(model, state.weights)
        means = NoisyMeans(torch.cat([*state.latents.values()]), torch.cat([*state.labels.values()]))
        decoded = decode_means(env, decoder, model, means)
        x, y = decoded.x, decoded.y
        rows = {c: x[y == c] for c in range(env.num_classes) if int((y == c).sum()) >= _MIN_ROW}
        if not rows:
            return None
        size = min(count, *map(len, rows.values()))
        spread = {c: torch.linspace(0, len(row) - 1, size).long() for c, row in rows.items()}  # over all clients
        return Pictures({f"class {c}": row[spread[c]] for c, row in rows.items()}, {}, (x, y))

    # The client half

    @on(PRETRAIN)
    def pretrain(self, ctx: ClientContext[FedDpmsParams], msg: PretrainRequest) -> PretrainUpdate:
        """Trains the received network together with the client's own log-variance head and decoder."""
        model = require_latent(ctx.model(), self.name)
        load(model, msg.weights)
        vae = build_vae(ctx, model)
        if msg.decoder is not None:
            load(vae.decoder, msg.decoder)
        report = ctx.train(vae, VaeLoss(ctx.params.lam, Pixels.of(ctx.env, self.name)))
        ctx.store.put("local", LocalNetworks(read_tensors(vae.logvar), read_tensors(vae.decoder)))
        wanted = ctx.params.sends_decoder(ctx.round)
        return PretrainUpdate(
            **release_update(ctx, model, report), decoder=read_tensors(vae.decoder) if wanted else None
        )

    @on(SCARCE)
    def rank_scarce(self, ctx: ClientContext[FedDpmsParams], msg: Nothing) -> ScarceClasses:
        """The classes of which this client has the fewest examples."""
        return ScarceClasses(
            ctx.release("ids", torch.tensor(rank_scarce_classes(count_classes(ctx), ctx.params.n)), NAMED)
        )

    @on(FIT)
    def fit(self, ctx: ClientContext[FedDpmsParams], msg: FitRequest) -> FitUpdate:
        """Trains the received network on own and synthetic examples; an epoch has as many as the client's own."""
        model = require_latent(ctx.model(), self.name)
        load(model, msg.weights)
        own, synthetic = ctx.data.train, load_synthetic(ctx, model, msg)
        ctx.store.delete("local")
        data = own + Examples.of(synthetic.x, synthetic.y) if synthetic else own
        report = ctx.train(model, cross_entropy, data=data, draw=len(own))
        if ctx.params.alpha and ctx.store.get("shared", SharedMark) is None:
            ctx.store.put("encoder", StoredWeights(read_tensors(model) if ctx.params.filters else msg.weights))
        num_synthetic = len(synthetic.y) if synthetic else 0
        # A client without examples has not trained, even if it has synthetic ones.
        counted = replace(report, num_examples=len(own) + num_synthetic if len(own) else 0)
        released = ctx.release("num_synthetic", num_synthetic, public("follows from what the server sent"))
        return FitUpdate(**release_update(ctx, model, counted), num_synthetic=released)

    @on(SHARE)
    def share(self, ctx: ClientContext[FedDpmsParams], msg: ShareRequest) -> SharedMeans:
        """Shares noisy means of the latent vectors of its most abundant classes, once in a run."""
        kept = ctx.store.get("encoder", StoredWeights)
        if kept is None:
            ctx.abstain("this client has shared its means before, or has not trained in this round")
        model = require_latent(ctx.model().eval(), self.name)
        load(model, kept.weights)
        ctx.store.delete("encoder")
        ctx.store.put("shared", SharedMark(ctx.round))
        return share_filtered_means(ctx, model, msg) if ctx.params.filters else share_private_means(ctx, model)

    def cost(self, shapes: Shapes[FedDpmsParams]) -> Cost:
        """FedAvg's, plus decoders, class indices and means; the matching follows from class counts."""
        return Tally(shapes).cost()

    def expect_cost(self, phase: str, env: Env[FedDpmsParams], training: Histories) -> Histories:
        """In private mode shared means cost the draws of their noise, however many classes a client can name."""
        params = env.params
        if phase != SHARE.name:
            return super().expect_cost(phase, env, training)
        if params.filters or not params.alpha:
            return {}
        network = require_latent(env.model(), self.name)
        clip = params.choose_clip(network.latent)
        mechanism = build_mechanism(
            latent=network.latent,
            alpha=params.alpha,
            m=params.m,
            sigma=params.sigma,
            clip=clip,
            unit=not network.code,
        )
        return mechanism.guarantee.histories
