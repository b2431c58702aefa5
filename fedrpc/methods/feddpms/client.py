"""FedDPMS on a client: its auto-encoder, synthetic examples, and noisy means in both modes."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrpc.methods.blocks.vae import Pixels, build_decoder
from fedrpc.methods.feddpms.latent_means import (
    NONE,
    NoisyMeans,
    build_empty_rows,
    choose_members,
    rank_abundant_classes,
    sample_passing_copies,
)
from fedrpc.methods.feddpms.messages import (
    NAME,
    FedDpmsParams,
    FitRequest,
    LocalNetworks,
    SharedMeans,
    ShareRequest,
    StoredWeights,
    SyntheticExamples,
)
from fedrpc.methods.feddpms.privacy import FILTERED, NAMED, bound_latents, build_mechanism
from fedrpc.methods.method import (
    ClientContext,
    Env,
)
from fedrpc.models.dpms import Decoder, Dpms, Vae
from fedrpc.models.state import load
from fedrpc.privacy.mechanisms import public
from fedrpc.wire.message import Tensors

_BATCH = 256  # of encoding: bounds memory and has no other effect
_MEASURED = 256  # own examples, at most, in the reconstruction error that a client reports


def count_classes(ctx: ClientContext[FedDpmsParams]) -> list[int]:
    """The client's number of examples of each class."""
    counts: list[int] = torch.bincount(ctx.data.train.y, minlength=ctx.env.num_classes).tolist()
    return counts


def build_vae(ctx: ClientContext[FedDpmsParams], model: Dpms) -> Vae:
    """The network with the client's own log-variance head and decoder."""
    vae = ctx.env.build("feddpms-vae", lambda: Vae(model)).to(ctx.device)
    assert isinstance(vae, Vae)
    kept = ctx.store.get("local", LocalNetworks)
    if kept is not None:
        load(vae.logvar, kept.logvar)
        load(vae.decoder, kept.decoder)
    return vae


def _load_decoder(ctx: ClientContext[FedDpmsParams], received: Tensors | None) -> Decoder | None:
    """The averaged decoder, which arrives once and is stored; None when it was lost with the client's store."""
    if received is not None:
        ctx.store.put("decoder", StoredWeights(received))
    kept = ctx.store.get("decoder", StoredWeights)
    if kept is None:
        return None
    decoder = build_decoder(ctx.env, NAME).to(ctx.device)
    load(decoder, kept.weights)
    return decoder


def load_synthetic(ctx: ClientContext[FedDpmsParams], model: nn.Module, msg: FitRequest) -> SyntheticExamples | None:
    """The client's synthetic examples: decoded once, when means arrive, and stored from then on."""
    kept = ctx.store.get("synthetic", SyntheticExamples)
    if kept is not None or msg.means is None:
        return kept
    decoder = _load_decoder(ctx, msg.decoder)
    if decoder is None:
        return None
    means = NoisyMeans(msg.means.latents.to(ctx.device), msg.means.labels.to(ctx.device))
    synthetic = decode_means(ctx.env, decoder, model, means)
    ctx.store.put("synthetic", synthetic)
    return synthetic


def decode_means(env: Env[FedDpmsParams], decoder: Decoder, model: nn.Module, means: NoisyMeans) -> SyntheticExamples:
    """Decodes means; in private mode drops images that the received model does not assign to their class."""
    latents, labels = means.select_rows()
    with torch.no_grad():
        x = Pixels.of(env, NAME).to_inputs(decoder(latents))
        if not env.params.filters:
            passed = model.eval()(x).argmax(dim=1) == labels
            x, labels = x[passed], labels[passed]
    return SyntheticExamples(x.cpu(), labels.cpu())


def _encode(ctx: ClientContext[FedDpmsParams], model: Dpms, positions: Tensor) -> Tensor:
    """The latent vectors of the client's examples at these positions."""
    data = ctx.data.train.subset(positions.numpy())
    with torch.no_grad():
        return torch.cat([model.features(x.to(ctx.device)) for x, _ in data.batches(_BATCH)]).cpu()


def share_filtered_means(ctx: ClientContext[FedDpmsParams], model: Dpms, msg: ShareRequest) -> SharedMeans:
    """Paper mode: noisy copies of each class mean whose decoded images the client's own model assigns to the class."""
    params, pixels = ctx.params, Pixels.of(ctx.env, NAME)
    decoder = _load_decoder(ctx, msg.decoder)
    if decoder is None:
        ctx.abstain("the decoder that the server sent before is not in this client's store")

    def passes(wanted: int, z: Tensor) -> Tensor:
        ctx.check()
        with torch.no_grad():
            predicted: Tensor = model(pixels.to_inputs(decoder(z.to(ctx.device)))).argmax(dim=1)
        return predicted.cpu() == wanted

    classes, noise = rank_abundant_classes(count_classes(ctx), params.n), ctx.noise("means")
    latents, labels = build_empty_rows(params.n, params.alpha, model.latent)
    tried = torch.zeros(params.n, dtype=torch.int64)
    for row, c in enumerate(classes):
        if c == NONE:
            continue
        mean = _encode(ctx, model, (ctx.data.train.y == c).nonzero()[:, 0]).mean(dim=0)
        copies, tried[row] = sample_passing_copies(
            mean, params.sigma, noise, partial(passes, c), quota=params.alpha, tries=params.tries
        )
        latents[row, : len(copies)], labels[row, : len(copies)] = copies, c
    return SharedMeans(
        NoisyMeans(
            ctx.release("means.latents", latents.flatten(0, 1), FILTERED),
            ctx.release("means.labels", labels.flatten(), NAMED),
        ),
        ctx.release("classes", torch.tensor(classes), NAMED),
        tried,
        _measure_reconstruction(ctx, model, decoder, pixels),
    )


def share_private_means(ctx: ClientContext[FedDpmsParams], model: Dpms) -> SharedMeans:
    """Private mode: exactly `alpha` noisy copies of each mean of exactly `m` bounded latent vectors."""
    params, clip, unit = ctx.params, ctx.params.choose_clip(model.latent), not model.code
    classes, y = rank_abundant_classes(count_classes(ctx), params.n, params.least), ctx.data.train.y
    numbers = torch.from_numpy(ctx.rng("means").permutation(len(y)))
    latents, labels = build_empty_rows(params.n, params.alpha, model.latent)
    for row, c in enumerate(classes):
        if c == NONE:
            continue
        chosen = choose_members(y, c, params.m, numbers)
        latents[row], labels[row] = bound_latents(_encode(ctx, model, chosen), clip, unit=unit).mean(dim=0), c
    covered = build_mechanism(
        latent=model.latent, alpha=params.alpha, m=params.m, sigma=params.sigma, clip=clip, unit=unit
    )
    return SharedMeans(
        NoisyMeans(
            ctx.release("means.latents", latents.flatten(0, 1), covered),
            ctx.release("means.labels", labels.flatten(), NAMED),
        ),
        ctx.release("classes", torch.tensor(classes), NAMED),
        ctx.release("tried", torch.full((params.n,), params.alpha), public("alpha draws for every class")),
    )


def _measure_reconstruction(ctx: ClientContext[FedDpmsParams], model: Dpms, decoder: Decoder, pixels: Pixels) -> float:
    """The mean squared error of the averaged decoder after the client's own encoder."""
    data = ctx.data.train
    if not len(data):
        return 0.0
    x = data.subset(torch.arange(min(_MEASURED, len(data))).numpy()).all()[0].to(ctx.device)
    with torch.no_grad():
        return float(F.mse_loss(decoder(model.features(x)), pixels.to_unit(x)))
