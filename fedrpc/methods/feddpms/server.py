"""FedDPMS on the server: preliminary and secondary rounds, matching clients, and collecting means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedrpc.methods.blocks.pool import Nothing, check_labels
from fedrpc.methods.blocks.updates import train_cohort
from fedrpc.methods.blocks.vae import build_decoder
from fedrpc.methods.feddpms.cost import compute_overheads
from fedrpc.methods.feddpms.latent_means import NONE, NoisyMeans, match_client
from fedrpc.methods.feddpms.messages import (
    FIT,
    NAME,
    PRETRAIN,
    SCARCE,
    SHARE,
    FedDpmsParams,
    FitRequest,
    PretrainRequest,
    PretrainUpdate,
    ScarceClasses,
    SharedMeans,
    ShareRequest,
    State,
)
from fedrpc.methods.feddpms.privacy import build_privacy_record
from fedrpc.methods.method import (
    ClientId,
    Env,
    Round,
)
from fedrpc.models.dpms import require_latent
from fedrpc.models.state import read_tensors
from fedrpc.wire.message import Tensors


async def run_preliminary_round(state: State, rnd: Round[FedDpmsParams]) -> State:
    """FedAvg on the auto-encoder; the last such round also averages the decoders."""
    wanted = rnd.params.sends_decoder(rnd.index)
    layout = _describe_layout(read_tensors(build_decoder(rnd.env, NAME))) if wanted else {}

    def check(question: PretrainRequest, answer: PretrainUpdate) -> None:
        if (got := _describe_layout(answer.decoder or {})) != layout:
            raise ValueError(f"expected {'the' if wanted else 'no'} decoder, got {len(got)} tensors: {list(got)[:4]}")

    fit = await train_cohort(rnd, PRETRAIN, PretrainRequest(state.weights, state.decoder), check=check)
    if not fit.clients:
        return state
    return replace(state, weights=fit.weights, decoder=fit.averaged.get("decoder"))


def _describe_layout(tensors: Tensors) -> dict[str, Any]:
    return {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}


async def run_secondary_round(state: State, rnd: Round[FedDpmsParams]) -> State:
    """Matches clients, asks the cohort to train, and collects means from clients that have not shared yet."""
    partners = await _match_clients(state, rnd)
    requests = {client: _build_fit_request(state, client, partner) for client, partner in partners.items()}
    plain = FitRequest(state.weights)
    fit = await train_cohort(rnd, FIT, {client: requests.get(client, plain) for client in rnd.cohort})
    synthetic = {client: answer.num_synthetic for client, answer in fit.answers.items() if client in requests}
    received = {client: int((state.labels[partners[client]] != NONE).sum()) for client in synthetic}
    rnd.record(partners=partners, num_received=received, num_synthetic=synthetic, **_build_record(rnd))
    if not fit.clients:
        return state
    new_holders = [client for client in synthetic if requests[client].decoder is not None]
    state = replace(
        state, weights=fit.weights, helped=[*state.helped, *synthetic], holders=[*state.holders, *new_holders]
    )
    return await _collect_means(state, rnd, [client for client in fit.clients if client not in state.abundant])


async def _match_clients(state: State, rnd: Round[FedDpmsParams]) -> dict[ClientId, ClientId]:
    """By client, the one whose means it receives in this round."""
    if not state.abundant:
        return {}
    offered = {client: classes.tolist() for client, classes in state.abundant.items()}
    num_classes, n = rnd.env.num_classes, rnd.params.n

    def check(_: Nothing, answer: ScarceClasses) -> None:
        _check_classes(answer.ids, n, num_classes)

    partners = {}
    asked = [client for client in rnd.cohort if client not in state.helped]
    # A client that does not answer receives no means, and still trains.
    async for reply in rnd.ask(SCARCE, dict.fromkeys(asked, Nothing()), check=check, quorum=0):
        partner = match_client(reply.body.ids.tolist(), offered, reply.client)
        if partner is not None:
            partners[reply.client] = partner
    return partners


def _build_fit_request(state: State, client: ClientId, partner: ClientId) -> FitRequest:
    decoder = None if client in state.holders else state.decoder
    return FitRequest(state.weights, decoder, NoisyMeans(state.latents[partner], state.labels[partner]))


async def _collect_means(state: State, rnd: Round[FedDpmsParams], new: Sequence[ClientId]) -> State:
    """Asks clients that have not shared yet for their means."""
    if not rnd.params.alpha or not new:
        return state
    empty, full = ShareRequest(), ShareRequest(state.decoder)
    requests = {client: full if rnd.params.filters and client not in state.holders else empty for client in new}
    latent = require_latent(rnd.env.model(), NAME).latent

    def check(_: ShareRequest, answer: SharedMeans) -> None:
        _check_shared(answer, rnd.env, latent)

    abundant, latents, labels = dict(state.abundant), dict(state.latents), dict(state.labels)
    tried: dict[ClientId, list[int]] = {}
    errors: dict[ClientId, float | None] = {}
    async for reply in rnd.ask(SHARE, requests, check=check, quorum=0):
        client, body = reply.client, reply.body
        abundant[client], tried[client], errors[client] = body.classes.clone(), body.tried.tolist(), body.reconstruction
        latents[client], labels[client] = body.means.latents.clone(), body.means.labels.clone()
    rnd.record(not_shared=dict(rnd.missing))
    if rnd.params.filters:
        rnd.record(reconstruction=errors, **_summarise_acceptance(tried, abundant, labels))
    holders = [*state.holders, *(client for client in tried if requests[client] is full)]
    return replace(state, abundant=abundant, latents=latents, labels=labels, holders=holders)


def _summarise_acceptance(
    tried: Mapping[ClientId, list[int]], classes: Mapping[ClientId, Tensor], labels: Mapping[ClientId, Tensor]
) -> dict[str, Any]:
    """The rejection filter in the records: the share of copies that passed, and the classes with too few."""
    rates: dict[ClientId, dict[int, float]] = {}
    short: dict[ClientId, dict[int, int]] = {}
    for client, draws in tried.items():
        sampled = {c: count for c, count in zip(classes[client].tolist(), draws, strict=True) if c != NONE}
        passed = {c: int((labels[client] == c).sum()) for c in sampled}
        rates[client] = {c: count / sampled[c] if sampled[c] else 0.0 for c, count in passed.items()}
        quota = len(labels[client]) // len(draws)
        short |= {client: few} if (few := {c: count for c, count in passed.items() if count < quota}) else {}
    return {"acceptance": rates, "short_of_quota": short}


def _build_record(rnd: Round[FedDpmsParams]) -> dict[str, Any]:
    """The paper's values beside the audited ones: epsilons when means are first shared, overheads so far."""
    if not rnd.params.alpha:
        return {}
    first = rnd.index == rnd.params.preliminary
    privacy = {"latent_privacy": build_privacy_record(rnd.env)} if first else {}
    return compute_overheads(rnd.env, rounds=rnd.index + 1) | privacy


def _check_classes(ids: Tensor, n: int, num_classes: int) -> None:
    if ids.dtype != torch.int64 or ids.shape != (n,):
        raise ValueError(f"expected {n} int64 classes, got {ids.dtype} {tuple(ids.shape)}")
    named = ids[ids != NONE]
    check_labels(named, num_classes)
    if len({*named.tolist()}) < len(named):
        raise ValueError("a class is named twice")


def _check_shared(answer: SharedMeans, env: Env[FedDpmsParams], latent: int) -> None:
    n = env.params.n
    _check_classes(answer.classes, n, env.num_classes)
    answer.means.check(env.params.alpha * n, latent, answer.classes)
    if answer.tried.dtype != torch.int64 or answer.tried.shape != (n,) or bool((answer.tried < 0).any()):
        raise ValueError(f"expected {n} int64 counts of draws, got {answer.tried.dtype} {tuple(answer.tried.shape)}")
