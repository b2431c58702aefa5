"""FLea (Xia et al., KDD 2024): clients train on mix-ups of their own activations and a buffer of other clients'.

Departs from the paper:
- Equation 8 is the de-correlation loss; equation 5 has another denominator, a misprint.
- The fraction alpha that a client shares is sampled once, without replacement, and stays the same in every round, so
  less of its data is ever exposed than with a new sample in each round.
- `lambda2_decay` 0.1 with `decorrelation` "dcor" is the schedule of the authors' code, 3 - 0.1 t down to 1, on the root
  of equation 8. The paper has a constant 3 on equation 8 itself, which is the default.
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

The paper trains with Adam at 0.001. SGD at the default 0.02 is too fast on HARNet, which has 8,448 features: from one
state, a round came out the better the lower the rate. That the loss's gradient, which mixed labels keep from
vanishing, grows with the classifier's features is an explanation that nobody has tested; the de-correlation's gradient,
with its weight, was about a tenth of the rest or less. `advise` warns of such a rate.

Feature exposure is not recorded here: the ledger has every message with `activations` (phase `extract` up, phase `fit`
of the next round down), and `fedrpc.metrics.exposure` reads it from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.pool import count_shared
from fedrpc.methods.blocks.updates import release_update, train_cohort
from fedrpc.methods.fedavg import FedAvg, Global, Update
from fedrpc.methods.flea.buffer import NextBuffer
from fedrpc.methods.flea.messages import (
    DTYPES,
    EXTRACT,
    FIT,
    ChosenExamples,
    Contribution,
    Correlation,
    Features,
    FleaParams,
    Start,
    choose_cut,
    describe_item,
)
from fedrpc.methods.flea.objective import Objective
from fedrpc.methods.method import (
    ClientContext,
    ClientId,
    Cost,
    Env,
    Loss,
    Method,
    Round,
    Shapes,
    on,
    refused,
    register,
)
from fedrpc.methods.tools import PastClient, SharedItems, View
from fedrpc.metrics.features import distance_correlation, null_value
from fedrpc.models import cut, require_stages
from fedrpc.models.state import load, read_tensors
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors

MOST_RATE = 100.0  # of SGD, times the classifier's features: FLea learns on zda-mnist at 31, and not on HARNet at 169
_MEASURED_BYTES = 16
_BATCH = 256  # of the extraction: bounds memory and has no other effect
_SHUFFLES = 4  # averaged into a null value
_CHOSEN = "chosen"  # its key in a client's store


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

    def advise(self, env: Env[FleaParams]) -> str:
        """Warns of a rate of SGD that is too high for the network's number of features."""
        features = require_stages(env.model(), "flea").classifier.in_features
        if env.train.optimizer != "sgd" or env.train.lr * features <= MOST_RATE:
            return ""
        return (
            f"SGD with train.lr {env.train.lr:g} is likely too fast for FLea on this network, whose classifier has "
            f"{features} features: accuracy may fall again; set train.optimizer=adam and train.lr=0.001 as in the "
            f"paper, or train.lr={MOST_RATE / 4 / features:.1g}"
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
        params, lambda2 = ctx.params, ctx.params.compute_lambda2(ctx.round)
        if msg.buffer is None and not (params.lambda1 or lambda2):
            return cross_entropy
        received = ctx.model()
        load(received, msg.weights)
        return Objective(
            params,
            choose_cut(received, params),
            received if params.lambda1 else None,
            msg.buffer,
            lambda2=lambda2,
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
        parts = [head(x[start : start + _BATCH].to(device)) for start in range(0, len(x), _BATCH)]
    return torch.cat(parts).cpu()


def _cast_for_transport(activations: Tensor, transport: str) -> Tensor:
    """Activations as they travel; values out of float16's range become its largest value, not infinity."""
    dtype = DTYPES[transport]
    if dtype == activations.dtype:
        return activations
    limit = torch.finfo(dtype).max
    return activations.clamp(-limit, limit).to(dtype)
