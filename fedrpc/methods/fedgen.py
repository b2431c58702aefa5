"""FedGen (Zhu et al., ICML 2021): a server-side generator of features, trained with clients' classifiers, guides them.

Departs from the paper:
- Noise is uniform, as in the authors' code, whose parameters these are; `noise = "normal"` is the paper's.
- The generator's student term has weight 0 in the authors' code and is left out.
- Labels are sampled among those that the generator has been trained on; a buffer of the generator lists them.
- A client generates `gen_ratio` features for each example of its batch.
- Label counts are those of a client's data, not of the batches that it trained on.

With `alpha` and `beta` 10 the loss, and its gradient, are about 21 times cross-entropy's in the second round, and fade
by 2 % a round. SGD at the default 0.02 loses the model in the second round, although the generator has learned its
labels by then; at 0.002 it learns about as fast as FedAvg at 0.02. So `advise` warns of such a rate.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedrpc.methods.blocks.generation import append_label, diversity_loss, train_generator
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
MOST_RATE = 0.1  # of SGD, times the weight of the whole loss: 0.42 loses the model, 0.042 does not


@dataclass(frozen=True)
class GuidedGlobal(Global):
    """Down: the global model and the generator."""

    generator: Tensors = part(Kind.WEIGHTS)


@dataclass(frozen=True)
class State(GuidedGlobal):
    """The server's state: both networks, and the moments of the generator's Adam."""

    moments: Tensors = part(Kind.WEIGHTS)


@dataclass(frozen=True)
class CountedUpdate(Update):
    """Up: FedAvg's update, and the client's number of examples of each label."""

    label_counts: Tensor = part(Kind.CLASS_ABUNDANCE)


def _check(question: GuidedGlobal, answer: CountedUpdate) -> None:
    check_update(question, answer)
    counts, num_classes = answer.label_counts, len(question.weights[_HEAD[0]])
    if counts.dtype != torch.int32 or counts.shape != (num_classes,) or bool((counts < 0).any()):
        raise ValueError(f"label counts should be {num_classes} int32 of 0 or more")
    if int(counts.sum()) != answer.num_examples:
        raise ValueError(f"{int(counts.sum())} labels were counted in {answer.num_examples} examples")


FIT = Phase("fit", GuidedGlobal, CountedUpdate, same=("weights",), check=_check)


class Generator(nn.Module):
    """From noise and a label to features.

    Args:
        noise_dim: Length of the noise.
        num_classes: The number of labels.
        hidden: Width of the hidden layer.
        features: The number of features.
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
        features: Tensor = self.layers(append_label(noise, y, self.num_classes))
        return features


@dataclass(frozen=True)
class FeatureSource:
    """Samples noise and labels, and generates features from them."""

    generator: Generator
    params: Any
    rng: np.random.Generator

    def sample_noise(self, count: int, device: torch.device) -> Tensor:
        """Samples noise of the configured kind."""
        shape = (count, self.params.noise_dim)
        uniform = self.params.noise == "uniform"
        sampled = self.rng.random(shape, np.float32) if uniform else self.rng.standard_normal(shape, np.float32)
        return torch.from_numpy(sampled).to(device)

    @functools.cached_property
    def _known(self) -> np.ndarray:
        """The labels that the generator has been trained on, read once: reading waits for the device."""
        known: np.ndarray = self.generator.taught.cpu().nonzero()[:, 0].numpy()
        return known

    def sample_labels(self, count: int, device: torch.device) -> Tensor:
        """Samples labels that the generator has been trained on."""
        return torch.from_numpy(self.rng.choice(self._known, count)).to(device)

    def generate_features(self, y: Tensor) -> Tensor:
        """Generates one feature vector for each label, without a graph."""
        with torch.no_grad():
            features: Tensor = self.generator(self.sample_noise(len(y), y.device), y)
        return features


class Teachers:
    """The classifiers of one round's clients, each weighted for a label by its share of that label's examples.

    Args:
        heads: Weight and bias of each classifier.
        counts: Each client's label counts.
    """

    def __init__(self, heads: list[tuple[Tensor, Tensor]], counts: list[Tensor], device: torch.device) -> None:
        self._weights, self._biases = (torch.stack(values).to(device) for values in zip(*heads, strict=True))
        by_label = torch.stack(counts, dim=1).double()  # (label, client)
        totals = by_label.sum(dim=1, keepdim=True)
        self.known = totals[:, 0] > 0
        self._shares = (by_label / totals.clamp_min(1)).float().to(device)

    def loss(self, features: Tensor, y: Tensor) -> Tensor:
        """The classifiers' cross-entropy on generated features, weighted by label, mean over the batch."""
        logits = torch.einsum("bd,kcd->bkc", features, self._weights) + self._biases
        loss = F.cross_entropy(logits.transpose(1, 2), y[:, None].expand(-1, logits.shape[1]), reduction="none")
        return (self._shares[y] * loss).sum(dim=1).mean()


class FedGenParams(Params):
    """The values of the authors' code."""

    alpha: float = Field(10.0, ge=0, description="weight of generated features in a client's loss")
    beta: float = Field(10.0, ge=0, description="weight of the client's distillation from generated features")
    decay: float = Field(0.98, gt=0, le=1, description="decay of alpha, beta and lr in each round")
    gen_ratio: float = Field(1.0, gt=0, description="generated features for each example of a batch")
    eta: float = Field(1.0, ge=0, description="weight of diversity in the generator's loss")
    lr: float = Field(1e-4, gt=0, description="learning rate of the generator's Adam")
    steps: int = Field(50, ge=0, description="steps of the generator in each round")
    batch_size: int = Field(32, ge=2, description="batch size of the generator's training")
    noise_dim: int = Field(32, ge=1, description="length of the generator's noise")
    hidden: int = Field(256, ge=1, description="width of the generator's hidden layer")
    noise: Literal["uniform", "normal"] = Field("uniform", description="distribution of the noise")


@register
class FedGen(Method[State, FedGenParams]):
    """FedAvg with a generator of features that travels with the model."""

    name = "fedgen"
    needs_each_update = "the clients' classifiers train the generator"
    shares = "label counts"
    dp_sgd = refused("the loss has terms of generated features that belong to no example")

    def check(self, env: Env[FedGenParams]) -> None:
        """Refuses networks without features."""
        require_stages(env.model(), self.name)

    def advise(self, env: Env[FedGenParams]) -> str:
        """Warns of a rate of SGD that is too high for the weights of the loss's terms."""
        p, train = env.params, env.train
        weight = 1 + p.gen_ratio * p.alpha + p.beta
        if train.optimizer != "sgd" or train.lr * weight <= MOST_RATE or weight == 1:
            return ""
        return (
            f"with alpha {p.alpha:g} and beta {p.beta:g} FedGen's loss weighs {weight:g} times cross-entropy, so SGD "
            f"with train.lr {train.lr:g} loses the model in the second round; set train.lr={MOST_RATE / 2 / weight:.1g}"
        )

    def init(self, env: Env[FedGenParams]) -> State:
        """Both networks' initial weights."""
        return State(read_tensors(env.model()), read_tensors(_build_generator(env)), {})

    async def round(self, state: State, rnd: Round[FedGenParams]) -> State:
        """Asks the cohort to train, averages its models, and trains the generator with its classifiers."""
        heads: list[tuple[Tensor, Tensor]] = []

        async def keep_head(reply: Reply[CountedUpdate]) -> None:
            heads.append(_copy_head(reply.body.weights))

        fit = await train_cohort(rnd, FIT, GuidedGlobal(state.weights, state.generator), each=keep_head)
        if not fit.clients:
            return state
        counts = [answer.label_counts for answer in fit.answers.values()]
        generator, moments, loss = await rnd.compute(
            self._train_generator, state, Teachers(heads, counts, rnd.device), rnd
        )
        rnd.record(generator_loss=loss)
        return State(fit.weights, generator, moments)

    def _train_generator(
        self, state: State, teachers: Teachers, rnd: Round[FedGenParams]
    ) -> tuple[Tensors, Tensors, float]:
        params, generator = rnd.params, _build_generator(rnd.env).to(rnd.device)
        load(generator, state.generator)
        source = FeatureSource(generator, params, rnd.rng("synthesis"))
        labels = teachers.known.nonzero()[:, 0].numpy()

        def loss() -> Tensor:
            y = torch.from_numpy(source.rng.choice(labels, params.batch_size)).to(rnd.device)
            noise = source.sample_noise(params.batch_size, rnd.device)
            features = generator(noise, y)
            total: Tensor = teachers.loss(features, y) + params.eta * diversity_loss(noise, features)
            return total

        if params.steps:
            generator.taught |= teachers.known.to(rnd.device)
        lr = params.lr * params.decay**rnd.index
        return train_generator(generator, state.moments, loss, lr=lr, steps=params.steps)

    @on(FIT)
    def fit(self, ctx: ClientContext[FedGenParams], msg: GuidedGlobal) -> CountedUpdate:
        """Trains the received model on own data, guided by the received generator."""
        model = ctx.model()
        load(model, msg.weights)
        report = ctx.train(model, self.build_loss(ctx, msg))
        counts = torch.bincount(ctx.data.train.y, minlength=ctx.env.num_classes).int()
        return CountedUpdate(**release_update(ctx, model, report), label_counts=counts)

    def build_loss(self, ctx: ClientContext[FedGenParams], msg: GuidedGlobal) -> Loss:
        """Cross-entropy on own data and on generated features, and agreement between the two."""
        params, fade = ctx.params, ctx.params.decay**ctx.round
        alpha, beta = params.alpha * fade, params.beta * fade
        if not (alpha or beta) or not bool(msg.generator["taught"].any()):
            return cross_entropy
        generator = _build_generator(ctx.env).to(ctx.device).eval()
        load(generator, msg.generator)
        source = FeatureSource(generator, params, ctx.rng("synthesis"))

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            parts = require_stages(model, self.name)
            logits = parts(x)
            with torch.no_grad():
                wanted = F.softmax(parts.classifier(source.generate_features(y)), dim=1)
            y_generated = source.sample_labels(max(1, round(params.gen_ratio * len(x))), x.device)
            generated = F.cross_entropy(parts.classifier(source.generate_features(y_generated)), y_generated)
            agreement = F.kl_div(F.log_softmax(logits, dim=1), wanted, reduction="batchmean")
            total: Tensor = F.cross_entropy(logits, y) + params.gen_ratio * alpha * generated + beta * agreement
            return total

        return loss

    def model(self, state: State) -> Tensors:
        """The global model."""
        return state.weights

    def cost(self, shapes: Shapes[FedGenParams]) -> Cost:
        """FedAvg's, plus the generator down and 4 bytes a label up for each participation."""
        n, env = shapes.num_asked, shapes.env
        return (
            FedAvg()
            .cost(shapes)
            .add("down", Kind.WEIGHTS, n * count_payload_bytes(read_tensors(_build_generator(env))))
            .add("up", Kind.CLASS_ABUNDANCE, n * 4 * env.num_classes)
        )


def _copy_head(weights: Tensors) -> tuple[Tensor, Tensor]:
    """Copies the classifier; one without a bias gets a bias of 0."""
    weight = weights[_HEAD[0]].clone()
    bias = weights.get(_HEAD[1])
    return weight, weight.new_zeros(len(weight)) if bias is None else bias.clone()


def _build_generator(env: Env[FedGenParams]) -> Generator:
    features = require_stages(env.model(), "fedgen").classifier.in_features
    generator = env.build(
        "fedgen-generator", lambda: Generator(env.params.noise_dim, env.num_classes, env.params.hidden, features)
    )
    assert isinstance(generator, Generator)
    return generator
