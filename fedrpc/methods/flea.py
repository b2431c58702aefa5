"""FLea (Xia et al., KDD 2024): clients train on mix-ups of their own activations and a buffer of other clients'.

Departs from the paper:
- Equation 8 is the de-correlation loss; equation 5 has another denominator, a misprint.
- The fraction alpha that a client shares is sampled once, without replacement, and stays the same in every round, so
  less of its data is ever exposed than with a new sample in each round.
- `transport` can halve the bytes of the activations (float16, bfloat16); the paper sends float32, which is the default.
- With its activations a client reports the distance correlation of a fixed batch of `measure` of its examples, and that
  of unrelated pairs (16 bytes); a round records the means as `dcor2`, `dcor` and `dcor2_null`. The estimate depends on
  the batch size, so a client with fewer examples reports none.

Where the paper is silent:
- BatchNorm. In local training the layers up to the cut see the client's own examples and the layers after it the mixed
  activations, each once a step and in training mode. The received model and the extraction are in evaluation mode.
- The received model's predictions are a target: no gradient flows through them into the activations.
- Before there is a buffer, all three terms use the client's own activations and labels.
- The buffer is used in shuffled passes, in batches of the local size: a buffer smaller than a batch repeats. A client's
  own activations are in it like any other's; its rows are shuffled.

Feature exposure is not recorded here: the ledger has every message with `activations` (phase `extract` up, phase `fit`
of the next round down), and `fedrpc.metrics.exposure` reads it from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ByteSize, Field
from torch import Tensor, nn

from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.mixup import EndlessOrder, mix, one_hot, soft_cross_entropy
from fedrpc.methods.blocks.pool import Layout, check_labels, count_shared
from fedrpc.methods.blocks.updates import release_update, train_cohort
from fedrpc.methods.fedavg import FedAvg, Global, Update, check_update
from fedrpc.methods.method import (
    ClientContext,
    ClientId,
    Cost,
    Env,
    Loss,
    Method,
    Params,
    Phase,
    Reply,
    Round,
    Shapes,
    on,
    refused,
    register,
)
from fedrpc.methods.tools import PastClient, SharedItems, View
from fedrpc.metrics.features import dcor2, distance_correlation, null_value
from fedrpc.models import cut, require_stages
from fedrpc.models.state import load, read_tensors
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MEASURED_BYTES = 16
_BATCH = 256  # of the extraction: bounds memory and has no other effect
_SHUFFLES = 4  # averaged into a null value
_CHOSEN = "chosen"  # its key in a client's store


@dataclass(frozen=True)
class Features:
    """Activations with their labels, row by row."""

    activations: Tensor = part(Kind.ACTIVATIONS)
    labels: Tensor = part(Kind.ACTIVATIONS)


@dataclass(frozen=True)
class Start(Global):
    """Down: the global model, and the last cohort's activations once there are any. Also the server's whole state."""

    buffer: Features | None = None


@dataclass(frozen=True)
class Correlation:
    """The squared distance correlation of inputs and activations, and of the same inputs and shuffled activations."""

    dcor2: float = part(Kind.SCALARS)
    null: float = part(Kind.SCALARS)


@dataclass(frozen=True)
class Contribution:
    """Up: what a client adds to the buffer, and its distance correlation; None with too few examples."""

    features: Features | None = None
    measured: Correlation | None = None


@dataclass(frozen=True)
class ChosenExamples:
    """In a client's store: the examples that it shares and measures, the shared ones first."""

    positions: Tensor


FIT = Phase("fit", Start, Update, same=("weights",), check=check_update)
EXTRACT = Phase("extract", Global, Contribution)


def choose_cut(model: nn.Module, params: Any) -> int:
    """The stage after which the network is cut."""
    return require_stages(model, "flea").split_layer_default if params.split_layer is None else int(params.split_layer)


def describe_item(env: Env[FleaParams]) -> Layout:
    """One activation and its label on the wire; raises ConfigError when the network has no such cut."""
    model = env.model().eval()
    head, _ = cut(model, choose_cut(model, env.params))
    with torch.no_grad():
        activation = head(torch.zeros(1, *env.shape))[0]
    return Layout({"activations": (DTYPES[env.params.transport], tuple(activation.shape)), "labels": (torch.int64, ())})


def kl_divergence(log_p: Tensor, log_g: Tensor) -> Tensor:
    """KL(p || g) of log-probabilities, mean over the batch."""
    return (log_p.exp() * (log_p - log_g)).sum(dim=1).mean()


class Objective:
    """Equation 6 on the batches of one local training.

    Args:
        cut: The stage after which networks are cut.
        received: The received network, which is frozen; without it there is no distillation.
        buffer: The activations to mix with; None in the first round.
        order: Shuffles the buffer.
        weights: Samples the weights of the mix-up.
    """

    def __init__(
        self,
        params: Any,
        layer: int,
        received: nn.Module | None,
        buffer: Features | None,
        *,
        order: np.random.Generator,
        weights: np.random.Generator,
    ) -> None:
        self._params, self._cut, self._buffer, self._weights = params, layer, buffer, weights
        self._received_tail = cut(received.eval().requires_grad_(False), layer)[1] if received is not None else None
        self._order = EndlessOrder(order, len(buffer.labels)) if buffer is not None else None

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch, which passes through every layer of the model once."""
        head, tail = cut(model, self._cut)
        own = head(x)
        activations, wanted = self._mix_batch(own, y, num_classes=require_stages(model, "flea").classifier.out_features)
        log_p = F.log_softmax(tail(activations), dim=1)
        loss = soft_cross_entropy(log_p, wanted)
        if self._received_tail is not None:
            with torch.no_grad():
                log_g = F.log_softmax(self._received_tail(activations), dim=1)
            loss = loss + self._params.lambda1 * kl_divergence(log_p, log_g)
        if self._params.lambda2:
            loss = loss + self._params.lambda2 * dcor2(require_stages(model, "flea").select_input(x), own)
        return loss

    def _mix_batch(self, own: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        """Equation 2: mixed activations and label distributions, each pair with a weight of its own."""
        wanted = one_hot(y, num_classes)
        if self._buffer is None or self._order is None:
            return own, wanted
        index = torch.from_numpy(self._order.take(len(y)))
        theirs, labels = self._buffer.activations[index], self._buffer.labels[index]
        weight = torch.from_numpy(self._weights.beta(self._params.a, self._params.a, len(y)))
        return mix(own, theirs, weight), mix(wanted, one_hot(labels, num_classes), weight)


class NextBuffer:
    """The next buffer while it is gathered, in one block of memory of the expected size.

    Every activation goes to a random row, so the buffer does not reveal which of them are one client's.

    Args:
        expected: By client, the number of activations to come.
        rng: Samples the rows.
    """

    def __init__(
        self, layout: Layout, num_classes: int, expected: Mapping[ClientId, int], rng: np.random.Generator
    ) -> None:
        total = sum(expected.values())
        self._order = torch.from_numpy(rng.permutation(total))
        self._layout, self._num_classes, self._expected = layout, num_classes, expected
        self._rows = Features(**{n: torch.empty(total, *shape, dtype=d) for n, (d, shape) in layout.rows.items()})
        self._filled = 0
        self._measured: list[Correlation] = []
        self._refused: dict[ClientId, str] = {}

    def check(self, _: Global, answer: Contribution) -> None:
        """Raises ValueError when an answer is invalid for any client."""
        if answer.features is not None:
            self._layout.check(answer.features)
            check_labels(answer.features.labels, self._num_classes)
        measured = answer.measured
        if measured is not None and not (0 <= measured.dcor2 <= 1 and 0 <= measured.null <= 1):
            raise ValueError(f"a distance correlation is from 0 to 1, got {measured.dcor2} and {measured.null}")

    def add(self, reply: Reply[Contribution]) -> None:
        """Copies one client's activations, unless they are more or fewer than expected."""
        body = reply.body
        count = 0 if body.features is None else len(body.features.labels)
        if count != self._expected[reply.client]:
            self._refused[reply.client] = f"expected {self._expected[reply.client]} activations, sent {count}"
            return
        if body.measured is not None:
            self._measured.append(body.measured)
        if body.features is not None:
            rows = self._order[self._filled : self._filled + count]
            self._rows.activations[rows], self._rows.labels[rows] = body.features.activations, body.features.labels
            self._filled += count

    @property
    def features(self) -> Features | None:
        """The buffer; None when no client shared anything."""
        if not self._filled:
            return None
        if self._filled == len(self._order):
            return self._rows
        taken = self._order[: self._filled].sort().values
        return Features(self._rows.activations[taken], self._rows.labels[taken])

    def build_record(self) -> dict[str, Any]:
        """The buffer's values in the records; correlations are means over the clients that measured."""
        values = [measured.dcor2 for measured in self._measured]
        record = {
            "buffer_size": self._filled,
            "buffer_bytes": self._filled * self._layout.size_bytes,
            "dcor2": _mean(values),
            "dcor": _mean([math.sqrt(value) for value in values]),
            "dcor2_null": _mean([measured.null for measured in self._measured]),
        }
        return record | ({"refused": self._refused} if self._refused else {})


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


class FleaParams(Params):
    """The paper's values; it does not say where it cuts, so that is the network's default."""

    alpha: float = Field(0.1, ge=0, le=1, description="share of a client's examples whose activations it shares")
    a: float = Field(2.0, gt=0, description="mix-up weights are sampled from Beta(a, a)")
    lambda1: float = Field(1.0, ge=0, description="weight of the distillation from the received model")
    lambda2: float = Field(3.0, ge=0, description="weight of the distance correlation")
    split_layer: int | None = Field(None, ge=0, description="the cut; the network's default when left out")
    transport: Literal["float32", "float16", "bfloat16"] = Field("float32", description="dtype of activations")
    max_buffer: ByteSize = Field(ByteSize(1 << 30), gt=0, description="largest buffer in bytes, or like '512MiB'")
    measure: int = Field(32, ge=0, description="examples in a client's distance correlation; 0 measures none")


@register
class Flea(Method[Start, FleaParams]):
    """Both halves of FLea."""

    name = "flea"
    shares = "activations with labels"
    dp_sgd = refused(
        "distance correlation couples the examples of a batch, so there are no per-example gradients, and the "
        "shared activations have no noise"
    )

    def check(self, env: Env[FleaParams]) -> None:
        """Refuses networks that cannot be cut there, an alpha that shares nothing, and a buffer that is too large."""
        params, size = env.params, describe_item(env).size_bytes
        if not params.alpha:
            return
        counts = sorted(env.num_examples(), reverse=True)
        if not count_shared(params.alpha, counts[0]):
            raise ConfigError(
                f"params.alpha = {params.alpha} gives no activation to share: the largest client has {counts[0]} "
                f"examples; set it to {math.ceil(1000 / counts[0]) / 1000} or more, or to 0 to share nothing"
            )
        largest = sum(count_shared(params.alpha, count) for count in counts[: env.cohort_size])
        if largest * size > params.max_buffer:
            raise ConfigError(
                f"a buffer of up to {largest} activations of {size} bytes takes {largest * size} bytes but "
                f"params.max_buffer is {params.max_buffer}; raise it, lower params.alpha or --fraction, set "
                "params.transport to float16, or cut at another params.split_layer"
            )

    def init(self, env: Env[FleaParams]) -> Start:
        """The configured network's initial weights and no buffer."""
        return Start(read_tensors(env.model()))

    async def round(self, state: Start, rnd: Round[FleaParams]) -> Start:
        """Asks the cohort to train, averages, and asks the same clients for activations under the new model."""
        fit = await train_cohort(rnd, FIT, state)
        if not fit.clients:
            return state
        if rnd.params.alpha == 0:
            return Start(fit.weights)
        return Start(fit.weights, await self._gather_buffer(fit.weights, fit.clients, rnd))

    async def _gather_buffer(
        self, weights: Tensors, trained: Sequence[ClientId], rnd: Round[FleaParams]
    ) -> Features | None:
        layout = await rnd.compute(describe_item, rnd.env)
        # By the partition, not by what clients say: no client decides how much memory is allocated.
        counts = rnd.env.num_examples()
        expected = {client: count_shared(rnd.params.alpha, counts[client]) for client in trained}
        gathered = NextBuffer(layout, rnd.env.num_classes, expected, rnd.rng("buffer"))
        questions = dict.fromkeys(expected, Global(weights))
        async for reply in rnd.ask(EXTRACT, questions, check=gathered.check):
            await rnd.compute(gathered.add, reply)
        rnd.record(transport=rnd.params.transport, **gathered.build_record())
        return gathered.features

    @on(FIT)
    def fit(self, ctx: ClientContext[FleaParams], msg: Start) -> Update:
        """Trains the received model on the client's own examples, mixed with the buffer."""
        model = ctx.model()
        load(model, msg.weights)
        report = ctx.train(model, self.build_loss(ctx, msg))
        return Update(**release_update(ctx, model, report))

    def build_loss(self, ctx: ClientContext[FleaParams], msg: Start) -> Loss:
        """Equation 6, or plain cross-entropy where it is equal to that."""
        params = ctx.params
        if msg.buffer is None and not (params.lambda1 or params.lambda2):
            return cross_entropy
        received = ctx.model()
        load(received, msg.weights)
        return Objective(
            params,
            choose_cut(received, params),
            received if params.lambda1 else None,
            msg.buffer,
            order=ctx.rng("buffer"),
            weights=ctx.rng("mixup"),
        )

    @on(EXTRACT)
    def extract(self, ctx: ClientContext[FleaParams], msg: Global) -> Contribution:
        """The new model's activations of the examples that this client shares, in evaluation mode."""
        count, chosen = self._choose_examples(ctx)
        if not len(chosen):
            return Contribution()
        model = ctx.model().eval()
        load(model, msg.weights)
        head, _ = cut(model, choose_cut(model, ctx.params))
        x, y = ctx.data.train.batch(chosen)
        activations = _compute_activations(head, x, ctx.device)
        shared = (
            Features(_cast_for_transport(activations[:count], ctx.params.transport), y[:count].long())
            if count
            else None
        )
        return Contribution(shared, self._measure(ctx, require_stages(model, "flea").select_input(x), activations))

    def _choose_examples(self, ctx: ClientContext[FleaParams]) -> tuple[int, np.ndarray]:
        """The number of shared examples, and the positions of the shared and the measured ones."""
        size = len(ctx.data.train)
        count = count_shared(ctx.params.alpha, size)
        kept = ctx.store.get(_CHOSEN, ChosenExamples)
        if kept is None:
            measured = ctx.params.measure if ctx.params.measure <= size else 0
            order = ctx.rng("chosen").permutation(size)[: max(count, measured)]
            kept = ChosenExamples(torch.from_numpy(order))
            ctx.store.put(_CHOSEN, kept)
        return count, kept.positions.numpy()

    def _measure(self, ctx: ClientContext[FleaParams], x: Tensor, activations: Tensor) -> Correlation | None:
        # Only batches of one size are comparable, so a client with fewer examples does not measure.
        size: int = ctx.params.measure
        if not 0 < size <= len(ctx.data.train):
            return None
        x, activations = x[:size], activations[:size]
        null = null_value(x, activations, ctx.rng("null"), repeats=_SHUFFLES)
        return Correlation(distance_correlation(x, activations).dcor2, null.dcor2)

    def model(self, state: Start) -> Tensors:
        """The global model."""
        return state.weights

    def collect_shared_items(self, state: Start, clients: Sequence[PastClient]) -> SharedItems | None:
        """The last buffer; those of earlier rounds showed the same examples through earlier models."""
        return None if state.buffer is None else SharedItems(state.buffer.activations, state.buffer.labels)

    def build_view(self, env: Env[FleaParams], weights: Tensors, device: torch.device) -> View:
        """Activations as they travel. A client's are computed in one batch, so that they are rounded alike."""
        model = env.model().eval()
        load(model, weights)
        head = cut(model, choose_cut(model, env.params))[0].to(device)

        def sources(client: PastClient) -> np.ndarray:
            kept = client.store.get(_CHOSEN, ChosenExamples)
            return np.empty((0, 1), dtype=np.int64) if kept is None else kept.positions.numpy()[:, None]

        return View(
            lambda groups: _cast_for_transport(_compute_activations(head, groups[:, 0], device), env.params.transport),
            sources,
        )

    def cost(self, shapes: Shapes[FleaParams]) -> Cost:
        """FedAvg's, plus with a buffer: the model down once more, activations and labels up, and down a round later."""
        params, counts = shapes.env.params, shapes.num_examples
        cost = FedAvg().cost(shapes)
        if params.alpha == 0:
            return cost
        given = [sum(count_shared(params.alpha, counts[k]) for k in cohort) for cohort in shapes.cohorts]
        received = sum(len(cohort) * size for cohort, size in zip(shapes.cohorts[1:], given, strict=False))
        measured = sum(0 < params.measure <= counts[k] for cohort in shapes.cohorts for k in cohort)
        each = describe_item(shapes.env).size_bytes
        return (
            cost.add("down", Kind.WEIGHTS, shapes.num_asked * shapes.weights_bytes)
            .add("down", Kind.ACTIVATIONS, received * each)
            .add("up", Kind.ACTIVATIONS, sum(given) * each)
            .add("up", Kind.SCALARS, measured * _MEASURED_BYTES)
        )


def _compute_activations(head: nn.Module, x: Tensor, device: torch.device) -> Tensor:
    with torch.no_grad():
        parts = [head(x[start : start + _BATCH].to(device)).cpu() for start in range(0, len(x), _BATCH)]
    return torch.cat(parts)


def _cast_for_transport(activations: Tensor, transport: str) -> Tensor:
    """Activations as they travel; values out of float16's range become its largest value, not infinity."""
    dtype = DTYPES[transport]
    if dtype == activations.dtype:
        return activations
    limit = torch.finfo(dtype).max
    return activations.clamp(-limit, limit).to(dtype)
