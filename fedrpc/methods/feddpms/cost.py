"""The bytes of FedDPMS: the formula of a run, and the paper's overheads beside those of this run's networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedrpc.methods.blocks.vae import build_decoder
from fedrpc.methods.cost import Cost, Shapes
from fedrpc.methods.fedavg import FedAvg
from fedrpc.methods.feddpms.latent_means import match_client, rank_abundant_classes, rank_scarce_classes
from fedrpc.methods.phases import ClientId
from fedrpc.methods.runtime import Env
from fedrpc.models.dpms import require_latent
from fedrpc.models.state import count_payload_bytes, read_tensors
from fedrpc.wire.kinds import Direction, Kind

_LABEL = 8  # bytes of a class index


def compute_paper_overhead(
    *, latent: int, alpha: int, n: int, num_parameters: int, rounds: int, preliminary: int, fraction: float
) -> dict[str, float]:
    """The paper's r1 = alpha n l / Theta and r2 (equation 9), as printed.

    r1 is relative to one model in one direction, r2 to all models of a run; r2 assumes a decoder as large as encoder
    and classifier, and ignores that decoders also go up once.

    Args:
        latent: Length of a latent vector, l.
        num_parameters: Of encoder and classifier, Theta.
        fraction: Of the clients in a round's cohort, nu.
    """
    missed = (1 - fraction) ** (rounds - preliminary)
    return {"r1": alpha * n * latent / num_parameters, "r2": (1 - missed) / (2 * fraction * rounds)}


def compute_expected_overhead(
    *, means_bytes: int, decoder_bytes: int, weights_bytes: int, rounds: int, preliminary: int, fraction: float
) -> dict[str, float]:
    """The same two terms for this run's networks, both relative to all of FedAvg's models in a run.

    Worst case as in the paper: every client in the cohort of a secondary round shares its means, receives another's,
    and receives the decoder, each once; and the last preliminary cohort sends its decoders.

    Args:
        means_bytes: One client's noisy means with their labels.
        decoder_bytes: One decoder.
        weights_bytes: Encoder and classifier.
    """
    reached = (1 - (1 - fraction) ** (rounds - preliminary)) / fraction  # clients, in cohorts
    baseline = 2 * rounds * weights_bytes
    return {"means": 2 * reached * means_bytes / baseline, "decoders": (1 + reached) * decoder_bytes / baseline}


def count_means_bytes(env: Env) -> int:
    """The size of one client's means: a latent vector of 4 bytes a value, and a label, for each."""
    latent = require_latent(env.model(), "feddpms").latent
    return int(env.params.alpha * env.params.n * (4 * latent + _LABEL))


def count_decoder_bytes(env: Env) -> int:
    """The size of one decoder."""
    return count_payload_bytes(read_tensors(build_decoder(env, "feddpms")))


def compute_overheads(env: Env, rounds: int) -> dict[str, dict[str, float]]:
    """Both overheads for a run of `rounds` rounds."""
    params, model = env.params, require_latent(env.model(), "feddpms")
    fraction = env.cohort_size / env.num_clients
    when: dict[str, Any] = {"rounds": rounds, "preliminary": params.preliminary, "fraction": fraction}
    return {
        "paper_overhead": compute_paper_overhead(
            latent=model.latent,
            alpha=params.alpha,
            n=params.n,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            **when,
        ),
        "expected_overhead": compute_expected_overhead(
            means_bytes=count_means_bytes(env),
            decoder_bytes=count_decoder_bytes(env),
            weights_bytes=count_payload_bytes(read_tensors(model)),
            **when,
        ),
    }


class Tally:
    """Counts a run's bytes: which clients share and receive means follows from cohorts and class counts alone."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes, self._params = shapes, shapes.env.params
        self._cost = FedAvg().cost(shapes)
        self._decoder, self._means = count_decoder_bytes(shapes.env), count_means_bytes(shapes.env)
        self._labels = _LABEL * self._params.alpha * self._params.n
        self._shared: dict[ClientId, list[int]] = {}
        self._helped: set[ClientId] = set()
        self._holders: set[ClientId] = set()

    def cost(self) -> Cost:
        """The bytes of all rounds."""
        for index, cohort in enumerate(self._shapes.cohorts):
            if index < self._params.preliminary:
                self._pretrain(index, len(cohort))
                continue
            self._cost.add("up", Kind.SCALARS, 8 * len(cohort))
            if self._params.alpha:
                self._help([client for client in cohort if client not in self._helped])
                self._share([client for client in cohort if client not in self._shared])
        return self._cost

    def _pretrain(self, index: int, size: int) -> None:
        if self._params.sync_decoder and index:
            self._cost.add("down", Kind.WEIGHTS, size * self._decoder)
        if self._params.sends_decoder(index):
            self._cost.add("up", Kind.WEIGHTS, size * self._decoder)

    def _help(self, asked: Sequence[ClientId]) -> None:
        if not self._shared:
            return
        n, counts = self._params.n, self._shapes.class_counts
        helped = [c for c in asked if match_client(rank_scarce_classes(counts[c], n), self._shared, c) is not None]
        self._cost.add("up", Kind.CLASS_ABUNDANCE, _LABEL * n * len(asked))
        self._move_means("down", len(helped))
        self._send_decoder(helped)
        self._helped.update(helped)

    def _share(self, new: Sequence[ClientId]) -> None:
        n, counts, filters = self._params.n, self._shapes.class_counts, self._params.filters
        self._shared |= {client: rank_abundant_classes(counts[client], n, self._params.least) for client in new}
        self._move_means("up", len(new))
        self._cost.add("up", Kind.CLASS_ABUNDANCE, _LABEL * n * len(new))
        self._cost.add("up", Kind.SCALARS, 8 * (n + filters) * len(new))
        self._send_decoder(new if filters else [])

    def _send_decoder(self, clients: Sequence[ClientId]) -> None:
        new = set(clients) - self._holders
        self._cost.add("down", Kind.WEIGHTS, len(new) * self._decoder)
        self._holders |= new

    def _move_means(self, direction: Direction, num_clients: int) -> None:
        self._cost.add(direction, Kind.LATENT_MEANS, num_clients * (self._means - self._labels))
        self._cost.add(direction, Kind.CLASS_ABUNDANCE, num_clients * self._labels)
