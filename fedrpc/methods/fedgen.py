"""FedGen (Zhu et al., ICML 2021): a generator of features on the server, taught by client classifiers, guides clients.

Departs from the paper:
- Noise is uniform, as in the authors' code, for which its values were chosen; `noise = "normal"` is the paper's.
- The generator's student term has weight 0 in the authors' code and is left out.
- Labels are drawn among those that the generator was ever taught; a buffer of the generator says which these are.
- A client draws as many generated features as its batch has examples, times `gen_ratio`.
- Label counts are those of a client's data, not of the batches that it happened to see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedrpc.methods.blocks.generation import conditioned, diversity, train_generator
from fedrpc.methods.blocks.updates import release_update, train_cohort
from fedrpc.methods.fedavg import FedAvg, Global, Update, check_update
from fedrpc.methods.method import (
    ClientContext,
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
from fedrpc.models import require_stages
from fedrpc.models.state import count_payload_bytes, load, read_tensors
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part

_HEAD = ("classifier.weight", "classifier.bias")


@dataclass(frozen=True)
class Guide(Global):
    """Down: the global model and the generator."""

    generator: Tensors = part(Kind.WEIGHTS)


@dataclass(frozen=True)
class State(Guide):
    """The server's state: both networks, and Adam's moments of the generator."""

    moments: Tensors = part(Kind.WEIGHTS)


@dataclass(frozen=True)
class Counted(Update):
    """Up: FedAvg's update, and how many examples of each label it comes from."""

    label_counts: Tensor = part(Kind.CLASS_ABUNDANCE)


def _check(question: Guide, answer: Counted) -> None:
    check_update(question, answer)
    counts, num_classes = answer.label_counts, len(question.weights[_HEAD[0]])
    if counts.dtype != torch.int32 or counts.shape != (num_classes,) or bool((counts < 0).any()):
        raise ValueError(f"label counts should be {num_classes} int32 of 0 or more")
    if int(counts.sum()) != answer.num_examples:
        raise ValueError(f"{int(counts.sum())} labels were counted in {answer.num_examples} examples")


FIT = Phase("fit", Guide, Counted, same=("weights",), check=_check)


class Generator(nn.Module):
    """From noise and a label to features.

    Args:
        noise_dim: Length of the noise.
        num_classes: Labels.
        hidden: Width of the layer between.
        features: Width of what comes out.
    """

    taught: Tensor

    def __init__(self, noise_dim: int, num_classes: int, hidden: int, features: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.layers = nn.Sequential(
            nn.Linear(noise_dim + num_classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, features)
        )
        self.register_buffer("taught", torch.zeros(num_classes, dtype=torch.bool))

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        """Features for labels."""
        features: Tensor = self.layers(conditioned(noise, y, self.num_classes))
        return features


@dataclass(frozen=True)
class Source:
    """Draws noise and labels, and has the generator make features of them."""

    generator: Generator
    params: Any
    rng: np.random.Generator

    def noise(self, count: int, device: torch.device) -> Tensor:
        """Noise of the configured kind."""
        shape = (count, self.params.noise_dim)
        uniform = self.params.noise == "uniform"
        drawn = self.rng.random(shape, np.float32) if uniform else self.rng.standard_normal(shape, np.float32)
        return torch.from_numpy(drawn).to(device)

    def labels(self, count: int, device: torch.device) -> Tensor:
        """Labels that the generator was taught."""
        known = self.generator.taught.cpu().nonzero()[:, 0].numpy()
        return torch.from_numpy(self.rng.choice(known, count)).to(device)

    def features(self, y: Tensor) -> Tensor:
        """Features for labels, one each, as they are."""
        with torch.no_grad():
            made: Tensor = self.generator(self.noise(len(y), y.device), y)
        return made


class Teachers:
    """The classifiers of one round's clients, each with a say in a label by its share of the examples.

    Args:
        heads: Weight and bias of every classifier.
        counts: Every client's label counts.
    """

    def __init__(self, heads: list[tuple[Tensor, Tensor]], counts: list[Tensor], device: torch.device) -> None:
        self._weights, self._biases = (torch.stack(values).to(device) for values in zip(*heads, strict=True))
        by_label = torch.stack(counts, dim=1).double()  # (label, client)
        totals = by_label.sum(dim=1, keepdim=True)
        self.known = totals[:, 0] > 0
        self._say = (by_label / totals.clamp_min(1)).float().to(device)

    def loss(self, features: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of every classifier on generated features, weighted by label, a mean over the batch."""
        logits = torch.einsum("bd,kcd->bkc", features, self._weights) + self._biases
        loss = F.cross_entropy(logits.transpose(1, 2), y[:, None].expand(-1, logits.shape[1]), reduction="none")
        return (self._say[y] * loss).sum(dim=1).mean()


class FedGenParams(Params):
    """The values of the authors' code."""

    alpha: float = Field(10.0, ge=0, description="weight of generated features in a client's loss")
    beta: float = Field(10.0, ge=0, description="weight of the client's distillation from generated features")
    decay: float = Field(0.98, gt=0, le=1, description="of alpha, beta and lr, each round")
    gen_ratio: float = Field(1.0, gt=0, description="generated features for each example of a batch")
    eta: float = Field(1.0, ge=0, description="weight of diversity in the generator's loss")
    lr: float = Field(1e-4, gt=0, description="of the generator's Adam")
    steps: int = Field(50, ge=0, description="of the generator in each round")
    batch_size: int = Field(32, ge=2, description="of the generator's training")
    noise_dim: int = Field(32, ge=1)
    hidden: int = Field(256, ge=1)
    noise: Literal["uniform", "normal"] = "uniform"


@register
class FedGen(Method[State, FedGenParams]):
    """FedAvg with a generator of features that travels with the model."""

    name = "fedgen"
    needs_each_update = "the clients' classifiers teach the generator"
    shares = "label counts"
    dp_sgd = refused("generated features are classified beside private ones, and have no example's gradient to be in")

    def check(self, env: Env[FedGenParams]) -> None:
        """Refuses networks without features."""
        require_stages(env.model(), self.name)

    def init(self, env: Env[FedGenParams]) -> State:
        """Both networks' initial weights."""
        return State(read_tensors(env.model()), read_tensors(_generator(env)), {})

    async def round(self, state: State, rnd: Round[FedGenParams]) -> State:
        """Has the cohort train, averages its models, and teaches the generator with its classifiers."""
        heads: list[tuple[Tensor, Tensor]] = []

        async def keep_head(reply: Reply[Counted]) -> None:
            heads.append(_head(reply.body.weights))

        fit = await train_cohort(rnd, FIT, Guide(state.weights, state.generator), each=keep_head)
        if not fit.clients:
            return state
        counts = [answer.label_counts for answer in fit.answers.values()]
        generator, moments, loss = await rnd.compute(self._teach, state, Teachers(heads, counts, rnd.device), rnd)
        rnd.record(generator_loss=loss)
        return State(fit.weights, generator, moments)

    def _teach(self, state: State, teachers: Teachers, rnd: Round[FedGenParams]) -> tuple[Tensors, Tensors, float]:
        params, generator = rnd.params, _generator(rnd.env).to(rnd.device)
        load(generator, state.generator)
        source = Source(generator, params, rnd.rng("synthesis"))
        labels = teachers.known.nonzero()[:, 0].numpy()

        def loss() -> Tensor:
            y = torch.from_numpy(source.rng.choice(labels, params.batch_size)).to(rnd.device)
            noise = source.noise(params.batch_size, rnd.device)
            features = generator(noise, y)
            total: Tensor = teachers.loss(features, y) + params.eta * diversity(noise, features)
            return total

        if params.steps:
            generator.taught |= teachers.known.to(rnd.device)
        lr = params.lr * params.decay**rnd.index
        return train_generator(generator, state.moments, loss, lr=lr, steps=params.steps)

    @on(FIT)
    def fit(self, ctx: ClientContext[FedGenParams], msg: Guide) -> Counted:
        """Trains the received model on own data, guided by the received generator."""
        model = ctx.model()
        load(model, msg.weights)
        report = ctx.train(model, self.build_loss(ctx, msg))
        counts = torch.bincount(ctx.data.train.y, minlength=ctx.env.num_classes).int()
        return Counted(**release_update(ctx, model, report), label_counts=counts)

    def build_loss(self, ctx: ClientContext[FedGenParams], msg: Guide) -> Loss:
        """Cross-entropy on own data and on generated features, and agreement between the two."""
        params, fade = ctx.params, ctx.params.decay**ctx.round
        alpha, beta = params.alpha * fade, params.beta * fade
        if not (alpha or beta) or not bool(msg.generator["taught"].any()):
            return cross_entropy
        generator = _generator(ctx.env).to(ctx.device).eval()
        load(generator, msg.generator)
        source = Source(generator, params, ctx.rng("synthesis"))

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            parts = require_stages(model, self.name)
            logits = parts(x)
            with torch.no_grad():
                wanted = F.softmax(parts.classifier(source.features(y)), dim=1)
            y_made = source.labels(max(1, round(params.gen_ratio * len(x))), x.device)
            made = F.cross_entropy(parts.classifier(source.features(y_made)), y_made)
            agreement = F.kl_div(F.log_softmax(logits, dim=1), wanted, reduction="batchmean")
            total: Tensor = F.cross_entropy(logits, y) + params.gen_ratio * alpha * made + beta * agreement
            return total

        return loss

    def model(self, state: State) -> Tensors:
        """The global model."""
        return state.weights

    def cost(self, shapes: Shapes[FedGenParams]) -> Cost:
        """FedAvg's, with the generator down and 4 bytes a label up for each participation."""
        n, env = shapes.num_asked, shapes.env
        return (
            FedAvg()
            .cost(shapes)
            .add("down", Kind.WEIGHTS, n * count_payload_bytes(read_tensors(_generator(env))))
            .add("up", Kind.CLASS_ABUNDANCE, n * 4 * env.num_classes)
        )


def _head(weights: Tensors) -> tuple[Tensor, Tensor]:
    """A copy of the classifier; one without a bias has a bias of 0."""
    weight = weights[_HEAD[0]].clone()
    bias = weights.get(_HEAD[1])
    return weight, weight.new_zeros(len(weight)) if bias is None else bias.clone()


def _generator(env: Env[FedGenParams]) -> Generator:
    features = require_stages(env.model(), "fedgen").classifier.in_features
    made = env.build(
        "fedgen-generator", lambda: Generator(env.params.noise_dim, env.num_classes, env.params.hidden, features)
    )
    assert isinstance(made, Generator)
    return made
