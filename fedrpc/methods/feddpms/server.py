"""FedDPMS, the server half: preliminary and secondary rounds, matching, and the collection of means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedrpc.methods.blocks.pool import Nothing, check_labels
from fedrpc.methods.blocks.updates import train_cohort
from fedrpc.methods.blocks.vae import decoder_of
from fedrpc.methods.feddpms.cost import overheads
from fedrpc.methods.feddpms.latent_means import NONE, NoisyMeans, matched
from fedrpc.methods.feddpms.messages import (
    FIT,
    NAME,
    PRETRAIN,
    SCARCE,
    SHARE,
    Classes,
    FedDpmsParams,
    Invitation,
    Lesson,
    Pretrained,
    Shared,
    Start,
    State,
)
from fedrpc.methods.feddpms.privacy import privacy_record
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
    layout = _layout(read_tensors(decoder_of(rnd.env, NAME))) if wanted else {}

    def check(question: Start, answer: Pretrained) -> None:
        if (got := _layout(answer.decoder or {})) != layout:
            raise ValueError(f"expected {'the' if wanted else 'no'} decoder, got {len(got)} tensors: {list(got)[:4]}")

    fit = await train_cohort(rnd, PRETRAIN, Start(state.weights, state.decoder), check=check)
    if not fit.clients:
        return state
    return replace(state, weights=fit.weights, decoder=fit.averaged.get("decoder"))


def _layout(found: Tensors) -> dict[str, Any]:
    return {name: (value.dtype, tuple(value.shape)) for name, value in found.items()}


async def run_secondary_round(state: State, rnd: Round[FedDpmsParams]) -> State:
    """Matches clients, has the cohort train, and collects means from clients that have not shared yet."""
    partners = await _match_clients(state, rnd)
    lessons = {client: _build_lesson(state, client, partner) for client, partner in partners.items()}
    plain = Lesson(state.weights)
    fit = await train_cohort(rnd, FIT, {client: lessons.get(client, plain) for client in rnd.cohort})
    made = {client: answer.num_synthetic for client, answer in fit.answers.items() if client in lessons}
    given = {client: int((state.labels[partners[client]] != NONE).sum()) for client in made}
    rnd.record(partners=partners, num_received=given, num_synthetic=made, **_compute_overheads(rnd))
    if not fit.clients:
        return state
    got = [client for client in made if lessons[client].decoder is not None]
    state = replace(state, weights=fit.weights, helped=[*state.helped, *made], holders=[*state.holders, *got])
    return await _collect_means(state, rnd, [client for client in fit.clients if client not in state.abundant])


async def _match_clients(state: State, rnd: Round[FedDpmsParams]) -> dict[ClientId, ClientId]:
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
    async for reply in rnd.ask(SCARCE, dict.fromkeys(asked, Nothing()), check=check, quorum=0):
        partner = matched(reply.body.ids.tolist(), offered, reply.client)
        if partner is not None:
            found[reply.client] = partner
    return found


def _build_lesson(state: State, client: ClientId, partner: ClientId) -> Lesson:
    decoder = None if client in state.holders else state.decoder
    return Lesson(state.weights, decoder, NoisyMeans(state.latents[partner], state.labels[partner]))


async def _collect_means(state: State, rnd: Round[FedDpmsParams], new: Sequence[ClientId]) -> State:
    """Asks those who have not shared yet for their means."""
    if not rnd.params.alpha or not new:
        return state
    empty, full = Invitation(), Invitation(state.decoder)
    invited = {client: full if rnd.params.filters and client not in state.holders else empty for client in new}
    latent = require_latent(rnd.env.model(), NAME).latent

    def check(_: Invitation, answer: Shared) -> None:
        _check_shared(answer, rnd.env, latent)

    abundant, latents, labels = dict(state.abundant), dict(state.latents), dict(state.labels)
    tried: dict[ClientId, list[int]] = {}
    errors: dict[ClientId, float | None] = {}
    async for reply in rnd.ask(SHARE, invited, check=check, quorum=0):
        client, body = reply.client, reply.body
        abundant[client], tried[client], errors[client] = body.classes.clone(), body.tried.tolist(), body.reconstruction
        latents[client], labels[client] = body.means.latents.clone(), body.means.labels.clone()
    rnd.record(not_shared=dict(rnd.missing))
    if rnd.params.filters:
        rnd.record(reconstruction=errors, **_summarise_acceptance(tried, abundant, labels))
    holders = [*state.holders, *(client for client in tried if invited[client] is full)]
    return replace(state, abundant=abundant, latents=latents, labels=labels, holders=holders)


def _summarise_acceptance(
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


def _compute_overheads(rnd: Round[FedDpmsParams]) -> dict[str, Any]:
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
