"""FLea (Xia et al., KDD 2024): clients train on mix-ups of their own activations and a buffer of other clients' ones.

Departs from the paper:
- Equation 8 is the de-correlation loss; equation 5 has another denominator, a misprint.
- The fraction alpha that a client shares is drawn once, without replacement, and stays the same in every round, so less
  of its data is ever exposed than if it were drawn anew.
- `transport` can halve the bytes of the activations (float16, bfloat16); the paper sends float32, which is the default.
- With its activations a client reports the distance correlation of a fixed batch of `measure` of its examples, and that
  of unrelated pairs (16 bytes); a round records the means as `dcor2`, `dcor` and `dcor2_null`. The estimate depends on
  the batch size, so a client with fewer examples reports none.

Where the paper is silent:
- BatchNorm. In local training the layers up to the cut see the client's own examples and the layers after it the mixed
  activations, each once a step and in training mode. The received model and the extraction are in evaluation mode.
- The received model's predictions are a target: no gradient flows through them into the activations.
- Before there is a buffer, all three terms are on the client's own activations and labels.
- The buffer is run through in shuffled passes, a batch of the size of the local one at a time: a buffer smaller than a
  batch repeats. A client's own activations are in it like any other's; its rows are shuffled.

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
from fedrpc.methods.blocks.pool import Layout, check_labels, share
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
_BATCH = 256  # of the extraction: bounds its memory, changes nothing else
_SHUFFLES = 4  # behind a null value
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
class Measured:
    """The squared distance correlation of inputs and activations, and of the same inputs and shuffled activations."""

    dcor2: float = part(Kind.SCALARS)
    null: float = part(Kind.SCALARS)


@dataclass(frozen=True)
class Shared:
    """Up: what a client adds to the buffer, and what its activations tell of its inputs; None with too few examples."""

    features: Features | None = None
    measured: Measured | None = None


@dataclass(frozen=True)
class Chosen:
    """In a client's store: which of its examples it shares and measures, the shared ones first."""

    positions: Tensor


FIT = Phase("fit", Start, Update, same=("weights",), check=check_update)
EXTRACT = Phase("extract", Global, Shared)


def cut_of(model: nn.Module, params: Any) -> int:
    """After which stage the network is cut."""
    return require_stages(model, "flea").split_layer_default if params.split_layer is None else int(params.split_layer)


def layout_of(env: Env[FleaParams]) -> Layout:
    """One activation and its label on the wire; raises ConfigError when the network has no such cut."""
    model = env.model().eval()
    head, _ = cut(model, cut_of(model, env.params))
    with torch.no_grad():
        activation = head(torch.zeros(1, *env.shape))[0]
    return Layout({"activations": (DTYPES[env.params.transport], tuple(activation.shape)), "labels": (torch.int64, ())})


def divergence(log_p: Tensor, log_g: Tensor) -> Tensor:
    """KL(p || g) of log-probabilities, mean over the batch."""
    return (log_p.exp() * (log_p - log_g)).sum(dim=1).mean()


class Objective:
    """Equation 6 on the batches of one local training.

    Args:
        layer: After which stage networks are cut.
        received: The received network, which stays as it is; without it there is no distillation.
        buffer: What to mix with; nothing in the first round.
        order: Shuffles the buffer.
        weights: Draws the weights of the mix-up.
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
        """The loss of a batch; every layer of the model sees it once."""
        head, tail = cut(model, self._cut)
        own = head(x)
        activations, wanted = self._mixed(own, y, num_classes=require_stages(model, "flea").classifier.out_features)
        log_p = F.log_softmax(tail(activations), dim=1)
        loss = soft_cross_entropy(log_p, wanted)
        if self._received_tail is not None:
            with torch.no_grad():
                log_g = F.log_softmax(self._received_tail(activations), dim=1)
            loss = loss + self._params.lambda1 * divergence(log_p, log_g)
        if self._params.lambda2:
            loss = loss + self._params.lambda2 * dcor2(require_stages(model, "flea").select_input(x), own)
        return loss

    def _mixed(self, own: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        """Equation 2: activations and label distributions, each pair with a weight of its own."""
        wanted = one_hot(y, num_classes)
        if self._buffer is None or self._order is None:
            return own, wanted
        index = torch.from_numpy(self._order.take(len(y)))
        theirs, labels = self._buffer.activations[index], self._buffer.labels[index]
        weight = torch.from_numpy(self._weights.beta(self._params.a, self._params.a, len(y)))
        return mix(own, theirs, weight), mix(wanted, one_hot(labels, num_classes), weight)


class NextBuffer:
    """The next buffer while it is being gathered, in one piece of memory of the size that was promised.

    Every activation goes to a random row, so that nobody who gets the buffer sees which of them are one client's.

    Args:
        promised: How many activations each client owes.
        rng: Draws the rows.
    """

    def __init__(
        self, layout: Layout, num_classes: int, promised: Mapping[ClientId, int], rng: np.random.Generator
    ) -> None:
        total = sum(promised.values())
        self._order = torch.from_numpy(rng.permutation(total))
        self._layout, self._num_classes, self._promised = layout, num_classes, promised
        self._rows = Features(**{n: torch.empty(total, *shape, dtype=d) for n, (d, shape) in layout.rows.items()})
        self._filled = 0
        self._measured: list[Measured] = []
        self._refused: dict[ClientId, str] = {}

    def check(self, _: Global, answer: Shared) -> None:
        """Raises ValueError when an answer makes no sense, whoever it is from."""
        if answer.features is not None:
            self._layout.check(answer.features)
            check_labels(answer.features.labels, self._num_classes)
        measured = answer.measured
        if measured is not None and not (0 <= measured.dcor2 <= 1 and 0 <= measured.null <= 1):
            raise ValueError(f"a distance correlation is from 0 to 1, got {measured.dcor2} and {measured.null}")

    def add(self, reply: Reply[Shared]) -> None:
        """Copies one client's activations, unless they are more or fewer than it promised."""
        body = reply.body
        count = 0 if body.features is None else len(body.features.labels)
        if count != self._promised[reply.client]:
            self._refused[reply.client] = f"expected {self._promised[reply.client]} activations, sent {count}"
            return
        if body.measured is not None:
            self._measured.append(body.measured)
        if body.features is not None:
            rows = self._order[self._filled : self._filled + count]
            self._rows.activations[rows], self._rows.labels[rows] = body.features.activations, body.features.labels
            self._filled += count

    @property
    def features(self) -> Features | None:
        """The buffer; None when nobody gave anything."""
        if not self._filled:
            return None
        if self._filled == len(self._order):
            return self._rows
        taken = self._order[: self._filled].sort().values
        return Features(self._rows.activations[taken], self._rows.labels[taken])

    def figures(self) -> dict[str, Any]:
        """What a round records of its buffer; correlations are means over the clients that could measure."""
        values = [measured.dcor2 for measured in self._measured]
        found = {
            "buffer_size": self._filled,
            "buffer_bytes": self._filled * self._layout.size_bytes,
            "dcor2": _mean(values),
            "dcor": _mean([math.sqrt(value) for value in values]),
            "dcor2_null": _mean([measured.null for measured in self._measured]),
        }
        return found | ({"refused": self._refused} if self._refused else {})


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


class FleaParams(Params):
    """The paper's values; it does not say where it cuts, which is the network's default here."""

    alpha: float = Field(0.1, ge=0, le=1, description="share of a client's examples whose activations it shares")
    a: float = Field(2.0, gt=0, description="mix-up weights are drawn from Beta(a, a)")
    lambda1: float = Field(1.0, ge=0, description="weight of the distillation from the received model")
    lambda2: float = Field(3.0, ge=0, description="weight of the distance correlation")
    split_layer: int | None = Field(None, ge=0, description="the cut; the network's own when left out")
    transport: Literal["float32", "float16", "bfloat16"] = Field("float32", description="dtype of activations")
    max_buffer: ByteSize = Field(ByteSize(1 << 30), gt=0, description="bytes of the largest buffer, or '512MiB'")
    measure: int = Field(32, ge=0, description="examples behind a client's distance correlation; 0 for none")


@register
class Flea(Method[Start, FleaParams]):
    """Both halves of FLea."""

    name = "flea"
    shares = "activations with labels"
    dp_sgd = refused(
        "distance correlation couples the examples of a batch, so there is no gradient of one example, and "
        "the shared activations have no noise"
    )

    def check(self, env: Env[FleaParams]) -> None:
        """Refuses networks that can not be cut there, an alpha that gives no activation, and a buffer too large."""
        params, size = env.params, layout_of(env).size_bytes
        if not params.alpha:
            return
        counts = sorted(env.num_examples(), reverse=True)
        if not share(params.alpha, counts[0]):
            raise ConfigError(
                f"params.alpha = {params.alpha} gives no activation to share: the largest client has {counts[0]} "
                f"examples; set it to {math.ceil(1000 / counts[0]) / 1000} or more, or to 0 to share nothing"
            )
        largest = sum(share(params.alpha, count) for count in counts[: env.cohort_size])
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
        """Asks the cohort to train, averages, and has the same clients extract the next buffer with the average."""
        fit = await train_cohort(rnd, FIT, state)
        if not fit.clients:
            return state
        if rnd.params.alpha == 0:
            return Start(fit.weights)
        return Start(fit.weights, await self._gather(fit.weights, fit.clients, rnd))

    async def _gather(self, weights: Tensors, trained: Sequence[ClientId], rnd: Round[FleaParams]) -> Features | None:
        layout = await rnd.compute(layout_of, rnd.env)
        # What the split gives a client, not what it says it has: nobody's word decides how much memory goes.
        counts = rnd.env.num_examples()
        promised = {client: share(rnd.params.alpha, counts[client]) for client in trained}
        gathered = NextBuffer(layout, rnd.env.num_classes, promised, rnd.rng("buffer"))
        questions = dict.fromkeys(promised, Global(weights))
        async for reply in rnd.ask(EXTRACT, questions, check=gathered.check):
            await rnd.compute(gathered.add, reply)
        rnd.record(transport=rnd.params.transport, **gathered.figures())
        return gathered.features

    @on(FIT)
    def fit(self, ctx: ClientContext[FleaParams], msg: Start) -> Update:
        """Trains the received model on the client's own examples, mixed with the buffer."""
        model = ctx.model()
        load(model, msg.weights)
        report = ctx.train(model, self.build_loss(ctx, msg))
        return Update(**release_update(ctx, model, report))

    def build_loss(self, ctx: ClientContext[FleaParams], msg: Start) -> Loss:
        """Equation 6, or plain cross-entropy where nothing else is left of it."""
        params = ctx.params
        if msg.buffer is None and not (params.lambda1 or params.lambda2):
            return cross_entropy
        received = ctx.model()
        load(received, msg.weights)
        return Objective(
            params,
            cut_of(received, params),
            received if params.lambda1 else None,
            msg.buffer,
            order=ctx.rng("buffer"),
            weights=ctx.rng("mixup"),
        )

    @on(EXTRACT)
    def extract(self, ctx: ClientContext[FleaParams], msg: Global) -> Shared:
        """The new model's activations of the examples that this client shares, in evaluation mode."""
        count, chosen = self._chosen(ctx)
        if not len(chosen):
            return Shared()
        model = ctx.model().eval()
        load(model, msg.weights)
        head, _ = cut(model, cut_of(model, ctx.params))
        x, y = ctx.data.train.batch(chosen)
        activations = _activations(head, x, ctx.device)
        shared = Features(_sent(activations[:count], ctx.params.transport), y[:count].long()) if count else None
        return Shared(shared, self._measure(ctx, require_stages(model, "flea").select_input(x), activations))

    def _chosen(self, ctx: ClientContext[FleaParams]) -> tuple[int, np.ndarray]:
        """How many examples are shared, and the positions of them and of those that are measured."""
        size = len(ctx.data.train)
        count = share(ctx.params.alpha, size)
        kept = ctx.store.get(_CHOSEN, Chosen)
        if kept is None:
            measured = ctx.params.measure if ctx.params.measure <= size else 0
            order = ctx.rng("chosen").permutation(size)[: max(count, measured)]
            kept = Chosen(torch.from_numpy(order))
            ctx.store.put(_CHOSEN, kept)
        return count, kept.positions.numpy()

    def _measure(self, ctx: ClientContext[FleaParams], x: Tensor, activations: Tensor) -> Measured | None:
        # Only batches of one size compare, so a client with fewer examples does not measure.
        size: int = ctx.params.measure
        if not 0 < size <= len(ctx.data.train):
            return None
        x, activations = x[:size], activations[:size]
        null = null_value(x, activations, ctx.rng("null"), repeats=_SHUFFLES)
        return Measured(distance_correlation(x, activations).dcor2, null.dcor2)

    def model(self, state: Start) -> Tensors:
        """The global model."""
        return state.weights

    def shared(self, state: Start, clients: Sequence[PastClient]) -> SharedItems | None:
        """The last buffer; those of earlier rounds showed the same examples through earlier models."""
        return None if state.buffer is None else SharedItems(state.buffer.activations, state.buffer.labels)

    def view(self, env: Env[FleaParams], weights: Tensors, device: torch.device) -> View:
        """Activations as they travel. A client's are computed together, or rounding could tell them apart."""
        model = env.model().eval()
        load(model, weights)
        head = cut(model, cut_of(model, env.params))[0].to(device)

        def sources(client: PastClient) -> np.ndarray:
            kept = client.store.get(_CHOSEN, Chosen)
            return np.empty((0, 1), dtype=np.int64) if kept is None else kept.positions.numpy()[:, None]

        return View(lambda groups: _sent(_activations(head, groups[:, 0], device), env.params.transport), sources)

    def cost(self, shapes: Shapes[FleaParams]) -> Cost:
        """FedAvg's, and with a buffer: the model down once more, activations and labels up, and down a round later."""
        params, counts = shapes.env.params, shapes.num_examples
        cost = FedAvg().cost(shapes)
        if params.alpha == 0:
            return cost
        given = [sum(share(params.alpha, counts[k]) for k in cohort) for cohort in shapes.cohorts]
        received = sum(len(cohort) * size for cohort, size in zip(shapes.cohorts[1:], given, strict=False))
        measured = sum(0 < params.measure <= counts[k] for cohort in shapes.cohorts for k in cohort)
        each = layout_of(shapes.env).size_bytes
        return (
            cost.add("down", Kind.WEIGHTS, shapes.num_asked * shapes.weights_bytes)
            .add("down", Kind.ACTIVATIONS, received * each)
            .add("up", Kind.ACTIVATIONS, sum(given) * each)
            .add("up", Kind.SCALARS, measured * _MEASURED_BYTES)
        )


def _activations(head: nn.Module, x: Tensor, device: torch.device) -> Tensor:
    with torch.no_grad():
        parts = [head(x[start : start + _BATCH].to(device)).cpu() for start in range(0, len(x), _BATCH)]
    return torch.cat(parts)


def _sent(activations: Tensor, transport: str) -> Tensor:
    """Activations as they travel; what float16 can not hold becomes its largest value, not infinity."""
    dtype = DTYPES[transport]
    if dtype == activations.dtype:
        return activations
    limit = torch.finfo(dtype).max
    return activations.clamp(-limit, limit).to(dtype)
