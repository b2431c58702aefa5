"""FedGen-img (our reconstruction of Liu et al., PAKDD 2022): inputs generated with the global model as critic.

Departs from the paper: FLea (Xia et al., KDD 2024) says of its FedGen that four transposed convolutions turn a label
and normal noise into an input, that 30 rounds are plain FedAvg, and that the global model is the critic from then on.
It gives no code; all else is our choice:
- The generator minimises the critic's cross-entropy, the distance of BatchNorm's statistics from the critic's running
  ones, and the diversity loss of Zhu et al. (2021). The critic is frozen, in evaluation mode.
- It is trained further at the start of each round, and travels with the model.
- It ends in BatchNorm, because inputs are standardised; an output larger than an input is cropped to its centre.
- Clients add half as many generated inputs as a batch has examples, with labels sampled uniformly.
- Signals (channels, time) are generated as images that are one pixel wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedrpc.errors import ConfigError
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
    Round,
    Shapes,
    on,
    refused,
    register,
)
from fedrpc.models.state import count_payload_bytes, load, read_tensors
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part

_WIDTHS = (128, 64, 32)
_DOUBLINGS = 3  # by every transposed convolution but the first


@dataclass(frozen=True)
class GuidedGlobal(Global):
    """Down: the global model, and the generator once there is one."""

    generator: Tensors | None = part(Kind.WEIGHTS, default=None)


@dataclass(frozen=True)
class State(GuidedGlobal):
    """The server's state: both networks, and the moments of the generator's Adam."""

    moments: Tensors | None = part(Kind.WEIGHTS, default=None)


FIT = Phase("fit", GuidedGlobal, Update, same=("weights",), check=check_update)


class Generator(nn.Module):
    """From noise and a label to an input.

    Args:
        noise_dim: Length of the noise.
        num_classes: The number of labels.
        shape: Of an input: channels and at most two sides.
    """

    def __init__(self, noise_dim: int, num_classes: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.num_classes, self.shape = num_classes, shape
        self.sides = (*shape[1:], 1, 1)[:2]
        first = tuple(math.ceil(side / 2**_DOUBLINGS) for side in self.sides)
        # A side of one pixel stays one.
        kernel, stride, padding = zip(*((4, 2, 1) if side > 1 else (1, 1, 0) for side in self.sides), strict=True)
        widths = (*_WIDTHS, shape[0])
        layers: list[nn.Module] = [nn.ConvTranspose2d(noise_dim + num_classes, widths[0], first, bias=False)]
        for wide, narrow in pairwise(widths):
            layers += [nn.BatchNorm2d(wide), nn.ReLU()]
            layers += [nn.ConvTranspose2d(wide, narrow, kernel, stride, padding, bias=False)]
        self.layers = nn.Sequential(*layers, nn.BatchNorm2d(widths[-1]))

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        """Inputs for labels."""
        images: Tensor = self.layers(append_label(noise, y, self.num_classes)[:, :, None, None])
        top, left = ((have - want) // 2 for have, want in zip(images.shape[2:], self.sides, strict=True))
        height, width = self.sides
        return images[:, :, top : top + height, left : left + width].reshape(-1, *self.shape)


class Critic:
    """A frozen network that classifies inputs and measures how far their statistics are from its training data's."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model.eval().requires_grad_(False)
        self._distances: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.track_running_stats:
                module.register_forward_pre_hook(self._measure)

    def _measure(self, module: nn.Module, args: tuple[Tensor]) -> None:
        (x,) = args
        others = [axis for axis in range(x.dim()) if axis != 1]
        mean, var = x.mean(dim=others), x.var(dim=others, unbiased=False)
        self._distances.append((mean - module.running_mean).norm() + (var - module.running_var).norm())  # type: ignore[operator]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the distance of BatchNorm's statistics, mean over its layers; 0 without BatchNorm."""
        self._distances.clear()
        logits: Tensor = self._model(x)
        return logits, torch.stack(self._distances).mean() if self._distances else logits.new_zeros(())


@dataclass(frozen=True)
class InputSource:
    """Samples noise and labels, and generates inputs from them."""

    generator: nn.Module
    noise_dim: int
    num_classes: int
    rng: np.random.Generator

    def sample(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Samples noise and labels."""
        noise = self.rng.standard_normal((count, self.noise_dim), np.float32)
        y = self.rng.integers(self.num_classes, size=count)
        return torch.from_numpy(noise).to(device), torch.from_numpy(y).to(device)

    def generate_inputs(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Generates inputs with their labels, without a graph."""
        noise, y = self.sample(count, device)
        with torch.no_grad():
            inputs: Tensor = self.generator(noise, y)
        return inputs, y


class FedGenImgParams(Params):
    """`start` is FLea's; the rest is ours."""

    start: int = Field(30, ge=0, description="rounds of plain FedAvg")
    fakes: float = Field(0.5, ge=0, le=1, description="generated inputs for each example of a batch")
    bn: float = Field(1.0, ge=0, description="weight of BatchNorm's statistics in the generator's loss")
    eta: float = Field(1.0, ge=0, description="weight of diversity in the generator's loss")
    lr: float = Field(1e-3, gt=0, description="learning rate of the generator's Adam")
    steps: int = Field(50, ge=1, description="steps of the generator in each round")
    batch_size: int = Field(32, ge=2, description="batch size of the generator's training")
    noise_dim: int = Field(64, ge=1, description="length of the generator's noise")


@register
class FedGenImg(Method[State, FedGenImgParams]):
    """FedAvg, and later a generator of inputs that travels with the model."""

    name = "fedgen-img"
    dp_sgd = refused("generated inputs follow the size of a batch, so one record changes more than its own gradient")

    def check(self, env: Env[FedGenImgParams]) -> None:
        """Refuses inputs that are neither images nor signals."""
        if len(env.shape) > 3:
            raise ConfigError(f"fedgen-img generates images and signals, but examples have shape {env.shape}")

    def init(self, env: Env[FedGenImgParams]) -> State:
        """The configured network's initial weights and no generator."""
        return State(read_tensors(env.model()))

    async def round(self, state: State, rnd: Round[FedGenImgParams]) -> State:
        """Trains the generator from round `start` on, then asks the cohort to train and averages."""
        generator, moments, record = None, None, {}
        if _generates(rnd.params, rnd.index):
            generator, moments, record["generator_loss"] = await rnd.compute(self._train_generator, state, rnd)
        fit = await train_cohort(rnd, FIT, GuidedGlobal(state.weights, generator))
        rnd.record(**record)
        return State(fit.weights, generator, moments) if fit.clients else state

    def _train_generator(self, state: State, rnd: Round[FedGenImgParams]) -> tuple[Tensors, Tensors, float]:
        params, generator, model = rnd.params, _build_generator(rnd.env).to(rnd.device), rnd.model()
        load(model, state.weights)
        if state.generator is not None:
            load(generator, state.generator)
        critic, source = (
            Critic(model),
            InputSource(generator, params.noise_dim, rnd.env.num_classes, rnd.rng("synthesis")),
        )

        def loss() -> Tensor:
            noise, y = source.sample(params.batch_size, rnd.device)
            generated = generator(noise, y)
            logits, distance = critic(generated)
            total: Tensor = (
                F.cross_entropy(logits, y) + params.bn * distance + params.eta * diversity_loss(noise, generated)
            )
            return total

        return train_generator(generator, state.moments or {}, loss, lr=params.lr, steps=params.steps)

    @on(FIT)
    def fit(self, ctx: ClientContext[FedGenImgParams], msg: GuidedGlobal) -> Update:
        """Trains the received model on own data and on inputs of the received generator."""
        model = ctx.model()
        load(model, msg.weights)
        report = ctx.train(model, self.build_loss(ctx, msg))
        return Update(**release_update(ctx, model, report))

    def build_loss(self, ctx: ClientContext[FedGenImgParams], msg: GuidedGlobal) -> Loss:
        """Cross-entropy on the batch together with generated inputs."""
        if msg.generator is None:
            return cross_entropy
        generator = _build_generator(ctx.env).to(ctx.device).eval()
        load(generator, msg.generator)
        source = InputSource(generator, ctx.params.noise_dim, ctx.env.num_classes, ctx.rng("synthesis"))
        ratio: float = ctx.params.fakes

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            generated, y_generated = source.generate_inputs(int(ratio * len(x)), x.device)
            return cross_entropy(model, torch.cat([x, generated]), torch.cat([y, y_generated]))

        return loss

    def model(self, state: State) -> Tensors:
        """The global model."""
        return state.weights

    def cost(self, shapes: Shapes[FedGenImgParams]) -> Cost:
        """FedAvg's, plus the generator down for each participation from round `start` on."""
        env = shapes.env
        asked = sum(len(cohort) for t, cohort in enumerate(shapes.cohorts) if _generates(env.params, t))
        return (
            FedAvg()
            .cost(shapes)
            .add("down", Kind.WEIGHTS, asked * count_payload_bytes(read_tensors(_build_generator(env))))
        )


def _generates(params: Any, round_index: int) -> bool:
    return bool(params.fakes) and round_index >= params.start


def _build_generator(env: Env[FedGenImgParams]) -> nn.Module:
    return env.build("fedgen-img-generator", lambda: Generator(env.params.noise_dim, env.num_classes, env.shape))
