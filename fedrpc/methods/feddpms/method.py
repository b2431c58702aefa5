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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedrpc.aggregation.mean import WeightedMean
from fedrpc.data.examples import Examples
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.pool import Nothing, check_labels
from fedrpc.methods.blocks.vae import Pixels, VaeLoss, decoder_of
from fedrpc.methods.fedavg import Average, Global, Update, check_update, update_of
from fedrpc.methods.feddpms.cost import Tally, overheads
from fedrpc.methods.feddpms.latent_means import NONE, NoisyMeans, abundant, matched, room, scarce, usable
from fedrpc.methods.feddpms.privacy import FILTERED, NAMED, clipped, covering, privacy_record, reported
from fedrpc.methods.method import (
    ClientContext,
    ClientId,
    Cost,
    Env,
    Method,
    Params,
    Phase,
    Round,
    Shapes,
    on,
    refused,
    register,
)
from fedrpc.methods.tools import Pictures, Reported
from fedrpc.models.dpms import Decoder, Dpms, Vae, require_latent
from fedrpc.models.state import load, read_tensors
from fedrpc.privacy.mechanisms import public
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part

_BATCH = 256  # of encoding: bounds memory, changes nothing else
_SHOWN = 8  # images of a class, at least, for a row of a contact sheet
_MEASURED = 256  # own examples, at most, behind the reconstruction error that a client tells


# What travels


@dataclass(frozen=True)
class Start(Global):
    """Down, preliminary: the network, and the decoder where decoders are kept the same."""

    decoder: Tensors | None = part(Kind.WEIGHTS, default=None)


@dataclass(frozen=True)
class Pretrained(Update):
    """Up, preliminary: FedAvg's update, and the decoder when it is asked for."""

    decoder: Tensors | None = part(Kind.WEIGHTS, default=None)


@dataclass(frozen=True)
class Classes:
    """Up: the classes that a client has fewest examples of."""

    ids: Tensor = part(Kind.CLASS_ABUNDANCE)


@dataclass(frozen=True)
class Lesson(Global):
    """Down, secondary: the network; once for each client another's means; and the decoder unless it was sent before."""

    decoder: Tensors | None = part(Kind.WEIGHTS, default=None)
    means: NoisyMeans | None = None


@dataclass(frozen=True)
class Trained(Update):
    """Up, secondary: FedAvg's update, which counts synthetic examples too, and how many these are."""

    num_synthetic: int = part(Kind.SCALARS)


@dataclass(frozen=True)
class Invitation:
    """Down: share your means; with the decoder where it is needed for that and was not sent before."""

    decoder: Tensors | None = part(Kind.WEIGHTS, default=None)


@dataclass(frozen=True)
class Shared:
    """Up, once: `alpha` noisy means of each of `n` classes.

    Attributes:
        classes: The client's most abundant classes.
        tried: Draws for each of them.
        reconstruction: Mean squared error of the received decoder on own examples, values in [0, 1].
    """

    means: NoisyMeans
    classes: Tensor = part(Kind.CLASS_ABUNDANCE)
    tried: Tensor = part(Kind.SCALARS)
    reconstruction: float | None = part(Kind.SCALARS, default=None)


@dataclass(frozen=True)
class State(Global):
    """The server's state.

    Attributes:
        decoder: The averaged decoder.
        abundant: By client that has shared, its abundant classes.
        latents: Its noisy means.
        labels: Their classes.
        helped: Who has got another client's means.
        holders: Who has got the decoder.
    """

    decoder: Tensors | None = part(Kind.WEIGHTS)
    abundant: dict[int, Tensor] = part(Kind.CLASS_ABUNDANCE)
    latents: dict[int, Tensor] = part(Kind.LATENT_MEANS)
    labels: dict[int, Tensor] = part(Kind.CLASS_ABUNDANCE)
    helped: list[int] = part(Kind.SCALARS)
    holders: list[int] = part(Kind.SCALARS)


PRETRAIN = Phase("pretrain", Start, Pretrained, same=("weights",), check=check_update)
SCARCE = Phase("scarce", Nothing, Classes)
FIT = Phase("fit", Lesson, Trained, same=("weights",), check=check_update)
SHARE = Phase("share", Invitation, Shared)


# What stays on a client, by key in its store


@dataclass(frozen=True)
class Local:
    """`local`: its log-variance head and decoder, while decoders are not shared."""

    logvar: Tensors
    decoder: Tensors


@dataclass(frozen=True)
class Kept:
    """`decoder`: the averaged one. `encoder`: the network to encode with when asked to share, until then."""

    weights: Tensors


@dataclass(frozen=True)
class Synthetic:
    """`synthetic`: the examples that it made, once."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Done:
    """`shared`: the round in which it shared."""

    round: int


class FedDpmsParams(Params):
    """The paper's values for Fashion-MNIST; it has alpha 200 and sigma 4 for CIFAR-10, and n 10 for CIFAR-100."""

    mode: Literal["paper", "private"] = Field("paper", description="as published, or so that the noise covers")
    preliminary: int = Field(20, ge=0, description="rounds before anything is shared; the paper: 40 % of a run")
    lam: float = Field(0.05, ge=0, description="weight of divergence and reconstruction in these")
    alpha: int = Field(50, ge=0, description="noisy means of each class; 0 shares nothing")
    sigma: float = Field(3.0, ge=0, description="standard deviation of the noise on every coordinate")
    n: int = Field(3, ge=1, description="classes that a client names")
    m: int = Field(100, ge=1, description="latent vectors behind a mean: exactly in private mode, else assumed")
    clip: float | None = Field(None, gt=0, description="largest norm of a latent vector in private mode; or fit")
    tries: int = Field(200, ge=1, description="times alpha draws, at most, for a class in paper mode")
    sync_decoder: bool = Field(False, description="average decoders in every preliminary round")

    @property
    def filters(self) -> bool:
        """Whether clients test their means themselves, for which they need the decoder."""
        return self.mode == "paper"

    @property
    def least(self) -> int:
        """How many examples a class must have to be shared."""
        return 1 if self.filters else self.m

    def sends_decoder(self, round_index: int) -> bool:
        """Whether clients send their decoders in a preliminary round."""
        return self.sync_decoder or (self.alpha > 0 and round_index == self.preliminary - 1)

    def clip_for(self, latent: int) -> float:
        """The largest norm of a latent vector in private mode: half of the cube's diagonal when none is given."""
        return float(latent**0.5 / 2 if self.clip is None else self.clip)


@register
class FedDpms(Method[State, FedDpmsParams]):
    """Both halves of FedDPMS."""

    name = "feddpms"
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
        return await (_pretrained(state, rnd) if rnd.index < rnd.params.preliminary else _secondary(state, rnd))

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
        made = _synthesis(env, decoder, model, means)
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
        vae = _around(ctx, model)
        if msg.decoder is not None:
            load(vae.decoder, msg.decoder)
        report = ctx.train(vae, VaeLoss(ctx.params.lam, Pixels.of(ctx.env, self.name)))
        ctx.store.put("local", Local(read_tensors(vae.logvar), read_tensors(vae.decoder)))
        wanted = ctx.params.sends_decoder(ctx.round)
        return Pretrained(**vars(update_of(ctx, model, report)), decoder=read_tensors(vae.decoder) if wanted else None)

    @on(SCARCE)
    def lacks(self, ctx: ClientContext[FedDpmsParams], msg: Nothing) -> Classes:
        """The classes that this client has fewest examples of."""
        return Classes(ctx.release("ids", torch.tensor(scarce(_counts(ctx), ctx.params.n)), NAMED))

    @on(FIT)
    def fit(self, ctx: ClientContext[FedDpmsParams], msg: Lesson) -> Trained:
        """Trains the received network on own and synthetic examples, as many in an epoch as there are own ones."""
        model = require_latent(ctx.model(), self.name)
        load(model, msg.weights)
        own, made = ctx.data.train, _made(ctx, model, msg)
        ctx.store.delete("local")
        report = ctx.train(model, cross_entropy, data=own + Examples.of(made.x, made.y) if made else own, draw=len(own))
        if ctx.params.alpha and ctx.store.get("shared", Done) is None:
            ctx.store.put("encoder", Kept(read_tensors(model) if ctx.params.filters else msg.weights))
        num_synthetic = len(made.y) if made else 0
        # A client without examples has trained nothing, whatever it was given.
        counted = replace(report, num_examples=len(own) + num_synthetic if len(own) else 0)
        told = ctx.release("num_synthetic", num_synthetic, public("follows from what the server sent"))
        return Trained(**vars(update_of(ctx, model, counted)), num_synthetic=told)

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
        return _filtered(ctx, model, msg) if ctx.params.filters else _private(ctx, model)

    def cost(self, shapes: Shapes[FedDpmsParams]) -> Cost:
        """FedAvg's, with decoders, class indices and means; who is matched with whom follows from class counts."""
        return Tally(shapes).cost()


# The server half, round by round


async def _pretrained(state: State, rnd: Round[FedDpmsParams]) -> State:
    wanted = rnd.params.sends_decoder(rnd.index)
    layout = _layout(read_tensors(decoder_of(rnd.env, FedDpms.name))) if wanted else {}

    def check(question: Start, answer: Pretrained) -> None:
        check_update(question, answer)
        if (got := _layout(answer.decoder or {})) != layout:
            raise ValueError(f"expected {'the' if wanted else 'no'} decoder, got {len(got)} tensors: {list(got)[:4]}")

    average, decoders = Average(rnd), WeightedMean()
    async for reply in rnd.ask(replace(PRETRAIN, check=check), Start(state.weights, state.decoder)):
        await average.add(reply.client, reply.body)
        if reply.body.decoder is not None:
            await rnd.compute(decoders.add, reply.body.decoder, reply.body.num_examples)
    if not average.losses:
        return state
    return replace(state, weights=average.weights, decoder=decoders.value if wanted else None)


def _layout(found: Tensors) -> dict[str, Any]:
    return {name: (value.dtype, tuple(value.shape)) for name, value in found.items()}


async def _secondary(state: State, rnd: Round[FedDpmsParams]) -> State:
    partners = await _matching(state, rnd)
    lessons = {client: _lesson(state, client, partner) for client, partner in partners.items()}
    plain = Lesson(state.weights)
    average, made = Average(rnd), {}
    async for reply in rnd.ask(FIT, {client: lessons.get(client, plain) for client in rnd.cohort}):
        await average.add(reply.client, reply.body)
        if reply.client in lessons:
            made[reply.client] = reply.body.num_synthetic
    given = {client: int((state.labels[partners[client]] != NONE).sum()) for client in made}
    rnd.record(partners=partners, num_received=given, num_synthetic=made, **_figures(rnd))
    if not average.losses:
        return state
    got = [client for client in made if lessons[client].decoder is not None]
    state = replace(state, weights=average.weights, helped=[*state.helped, *made], holders=[*state.holders, *got])
    return await _gathered(state, rnd, [client for client in average.losses if client not in state.abundant])


async def _matching(state: State, rnd: Round[FedDpmsParams]) -> dict[ClientId, ClientId]:
    """Who gets whose means in this round."""
    if not state.abundant:
        return {}
    offered = {client: classes.tolist() for client, classes in state.abundant.items()}
    num_classes, n = rnd.env.num_classes, rnd.params.n

    def check(_: Nothing, answer: Classes) -> None:
        _check_classes(answer.ids, n, num_classes)

    found = {}
    asked = [client for client in rnd.cohort if client not in state.helped]
    # Who says nothing gets nothing, and trains all the same.
    async for reply in rnd.ask(replace(SCARCE, check=check), dict.fromkeys(asked, Nothing()), quorum=0):
        partner = matched(reply.body.ids.tolist(), offered, reply.client)
        if partner is not None:
            found[reply.client] = partner
    return found


def _lesson(state: State, client: ClientId, partner: ClientId) -> Lesson:
    decoder = None if client in state.holders else state.decoder
    return Lesson(state.weights, decoder, NoisyMeans(state.latents[partner], state.labels[partner]))


async def _gathered(state: State, rnd: Round[FedDpmsParams], new: Sequence[ClientId]) -> State:
    """Asks those who have not shared yet for their means."""
    if not rnd.params.alpha or not new:
        return state
    empty, full = Invitation(), Invitation(state.decoder)
    invited = {client: full if rnd.params.filters and client not in state.holders else empty for client in new}
    latent = require_latent(rnd.env.model(), FedDpms.name).latent
    phase = replace(SHARE, check=lambda _, answer: _check_shared(answer, rnd.env, latent))
    abundant, latents, labels = dict(state.abundant), dict(state.latents), dict(state.labels)
    tried: dict[ClientId, list[int]] = {}
    errors: dict[ClientId, float | None] = {}
    async for reply in rnd.ask(phase, invited, quorum=0):
        client, body = reply.client, reply.body
        abundant[client], tried[client], errors[client] = body.classes.clone(), body.tried.tolist(), body.reconstruction
        latents[client], labels[client] = body.means.latents.clone(), body.means.labels.clone()
    rnd.record(not_shared=dict(rnd.missing))
    if rnd.params.filters:
        rnd.record(reconstruction=errors, **_acceptance(tried, abundant, labels))
    holders = [*state.holders, *(client for client in tried if invited[client] is full)]
    return replace(state, abundant=abundant, latents=latents, labels=labels, holders=holders)


def _acceptance(
    tried: Mapping[ClientId, list[int]], classes: Mapping[ClientId, Tensor], labels: Mapping[ClientId, Tensor]
) -> dict[str, Any]:
    """What records have of the rejection filter: which share of the draws passed, and which classes gave too few."""
    rates: dict[ClientId, dict[int, float]] = {}
    short: dict[ClientId, dict[int, int]] = {}
    for client, draws in tried.items():
        drawn = {c: count for c, count in zip(classes[client].tolist(), draws, strict=True) if c != NONE}
        passed = {c: int((labels[client] == c).sum()) for c in drawn}
        rates[client] = {c: count / drawn[c] if drawn[c] else 0.0 for c, count in passed.items()}
        quota = len(labels[client]) // len(draws)
        short |= {client: few} if (few := {c: count for c, count in passed.items() if count < quota}) else {}
    return {"acceptance": rates, "short_of_quota": short}


def _figures(rnd: Round[FedDpmsParams]) -> dict[str, Any]:
    """The paper's figures beside those that hold: epsilons when means are first shared, overheads so far."""
    if not rnd.params.alpha:
        return {}
    found = overheads(rnd.env, rounds=rnd.index + 1)
    return found | ({"latent_privacy": privacy_record(rnd.env)} if rnd.index == rnd.params.preliminary else {})


def _check_classes(ids: Tensor, n: int, num_classes: int) -> None:
    if ids.dtype != torch.int64 or ids.shape != (n,):
        raise ValueError(f"expected {n} int64 classes, got {ids.dtype} {tuple(ids.shape)}")
    named = ids[ids != NONE]
    check_labels(named, num_classes)
    if len({*named.tolist()}) < len(named):
        raise ValueError("a class is named twice")


def _check_shared(answer: Shared, env: Env[FedDpmsParams], latent: int) -> None:
    n = env.params.n
    _check_classes(answer.classes, n, env.num_classes)
    answer.means.check(env.params.alpha * n, latent, answer.classes)
    if answer.tried.dtype != torch.int64 or answer.tried.shape != (n,) or bool((answer.tried < 0).any()):
        raise ValueError(f"expected {n} int64 counts of draws, got {answer.tried.dtype} {tuple(answer.tried.shape)}")


# The client half, step by step


def _counts(ctx: ClientContext[FedDpmsParams]) -> list[int]:
    counts: list[int] = torch.bincount(ctx.data.train.y, minlength=ctx.env.num_classes).tolist()
    return counts


def _around(ctx: ClientContext[FedDpmsParams], model: Dpms) -> Vae:
    """The network itself, with the client's own log-variance head and decoder on it."""
    vae = ctx.env.build("feddpms-vae", lambda: Vae(model)).to(ctx.device)
    assert isinstance(vae, Vae)
    kept = ctx.store.get("local", Local)
    if kept is not None:
        load(vae.logvar, kept.logvar)
        load(vae.decoder, kept.decoder)
    return vae


def _averaged_decoder(ctx: ClientContext[FedDpmsParams], received: Tensors | None) -> Decoder | None:
    """The averaged decoder, which comes once and is kept; None when it was lost with the client's store."""
    if received is not None:
        ctx.store.put("decoder", Kept(received))
    kept = ctx.store.get("decoder", Kept)
    if kept is None:
        return None
    decoder = decoder_of(ctx.env, FedDpms.name).to(ctx.device)
    load(decoder, kept.weights)
    return decoder


def _made(ctx: ClientContext[FedDpmsParams], model: nn.Module, msg: Lesson) -> Synthetic | None:
    """The client's synthetic examples: made when means come, once, and kept from then on."""
    kept = ctx.store.get("synthetic", Synthetic)
    if kept is not None or msg.means is None:
        return kept
    decoder = _averaged_decoder(ctx, msg.decoder)
    if decoder is None:
        return None
    means = NoisyMeans(msg.means.latents.to(ctx.device), msg.means.labels.to(ctx.device))
    made = _synthesis(ctx.env, decoder, model, means)
    ctx.store.put("synthetic", made)
    return made


def _synthesis(env: Env[FedDpmsParams], decoder: Decoder, model: nn.Module, means: NoisyMeans) -> Synthetic:
    """Decodes means; in private mode drops what the public model does not take for its class."""
    latents, labels = means.rows()
    with torch.no_grad():
        x = Pixels.of(env, FedDpms.name).inputs(decoder(latents))
        if not env.params.filters:
            passed = model.eval()(x).argmax(dim=1) == labels
            x, labels = x[passed], labels[passed]
    return Synthetic(x.cpu(), labels.cpu())


def _latents(ctx: ClientContext[FedDpmsParams], model: Dpms, positions: Tensor) -> Tensor:
    """The latent vectors of own examples."""
    data = ctx.data.train.subset(positions.numpy())
    with torch.no_grad():
        return torch.cat([model.features(x.to(ctx.device)).cpu() for x, _ in data.batches(_BATCH)])


def _filtered(ctx: ClientContext[FedDpmsParams], model: Dpms, msg: Invitation) -> Shared:
    """Paper mode: copies of each class mean that the client's own model, after decoding, takes for the class."""
    params, pixels = ctx.params, Pixels.of(ctx.env, FedDpms.name)
    decoder = _averaged_decoder(ctx, msg.decoder)
    if decoder is None:
        ctx.abstain("the decoder that the server sent before is not in this client's store")

    def passes(wanted: int, z: Tensor) -> Tensor:
        ctx.check()
        with torch.no_grad():
            predicted: Tensor = model(pixels.inputs(decoder(z.to(ctx.device)))).argmax(dim=1)
        return predicted.cpu() == wanted

    classes, noise = abundant(_counts(ctx), params.n), ctx.noise("means")
    latents, labels = room(params.n, params.alpha, model.latent)
    tried = torch.zeros(params.n, dtype=torch.int64)
    for row, c in enumerate(classes):
        if c == NONE:
            continue
        mean = _latents(ctx, model, (ctx.data.train.y == c).nonzero()[:, 0]).mean(dim=0)
        found, tried[row] = usable(
            mean, params.sigma, noise, partial(passes, c), quota=params.alpha, tries=params.tries
        )
        latents[row, : len(found)], labels[row, : len(found)] = found, c
    return Shared(
        NoisyMeans(
            ctx.release("means.latents", latents.flatten(0, 1), FILTERED),
            ctx.release("means.labels", labels.flatten(), NAMED),
        ),
        ctx.release("classes", torch.tensor(classes), NAMED),
        tried,
        _reconstruction_error(ctx, model, decoder, pixels),
    )


def _private(ctx: ClientContext[FedDpmsParams], model: Dpms) -> Shared:
    """Private mode: exactly `alpha` noisy copies of each mean of exactly `m` latent vectors."""
    params, clip = ctx.params, ctx.params.clip_for(model.latent)
    classes, draw = abundant(_counts(ctx), params.n, params.least), ctx.rng("means")
    latents, labels = room(params.n, params.alpha, model.latent)
    for row, c in enumerate(classes):
        if c == NONE:
            continue
        mine = (ctx.data.train.y == c).nonzero()[:, 0]
        chosen = mine[torch.from_numpy(draw.permutation(len(mine))[: params.m])]
        latents[row], labels[row] = clipped(_latents(ctx, model, chosen), clip).mean(dim=0), c
    covered = covering(latent=model.latent, alpha=params.alpha, m=params.m, sigma=params.sigma, clip=clip)
    return Shared(
        NoisyMeans(
            ctx.release("means.latents", latents.flatten(0, 1), covered),
            ctx.release("means.labels", labels.flatten(), NAMED),
        ),
        ctx.release("classes", torch.tensor(classes), NAMED),
        ctx.release("tried", torch.full((params.n,), params.alpha), public("alpha draws for every class")),
    )


def _reconstruction_error(ctx: ClientContext[FedDpmsParams], model: Dpms, decoder: Decoder, pixels: Pixels) -> float:
    """How well the averaged decoder undoes the client's own encoder."""
    data = ctx.data.train
    if not len(data):
        return 0.0
    x = data.subset(torch.arange(min(_MEASURED, len(data))).numpy()).all()[0].to(ctx.device)
    with torch.no_grad():
        return float(F.mse_loss(decoder(model.features(x)), pixels.unit(x)))
