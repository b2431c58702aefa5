"""Toy methods for what no built-in method does: durable points within a round, and asking missing clients again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedrpc.aggregation.mean import WeightedMean
from fedrpc.methods.fedavg import FIT, FedAvg, Global, Update
from fedrpc.methods.method import ClientContext, Cost, Env, Method, Params, Phase, Round, Shapes, on
from fedrpc.models.state import load, load_optimizer, read_optimizer, read_tensors
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part


def train_plainly(ctx: ClientContext, msg: Global) -> Update:
    model = ctx.model()
    load(model, msg.weights)
    report = ctx.train(model, cross_entropy)
    return Update(read_tensors(model), report.num_examples, torch.zeros(ctx.env.train.epochs, dtype=torch.float64))


# Many small steps in a round, with saves, and an optimizer that stays on the client


@dataclass(frozen=True)
class Gan:
    weights: Tensors = part(Kind.WEIGHTS)
    generator: Tensors = part(Kind.WEIGHTS)
    moments: Tensors = part(Kind.WEIGHTS)
    done: int


@dataclass(frozen=True)
class Images:
    images: Tensor = part(Kind.IMAGES)


@dataclass(frozen=True)
class Feedback:
    images: Tensor = part(Kind.FEEDBACK)


@dataclass(frozen=True)
class StoredDiscriminator:
    """A client's discriminator and its optimizer, from step to step."""

    weights: Tensors
    moments: Tensors


GAN_STEP = Phase("gan_step", Images, Feedback, same=("images",))


class ToyMpganParams(Params):
    """The steps of a round, the images of a step, and how often the state is saved."""

    steps: int = Field(4, ge=0)
    batch: int = Field(3, ge=1)
    save_every: int = Field(2, ge=1)
    global_noise: bool = Field(False, description="sample from torch's global generator, as dropout does")


class ToyMpgan(Method[Gan, ToyMpganParams]):
    """Trains a generator on the server against a discriminator on each client, one batch at a time; then FedAvg."""

    name = "toy-mpgan"
    shares = "gradients with respect to generated images"

    def init(self, env: Env) -> Gan:
        return Gan(read_tensors(env.model()), read_tensors(self._build_generator(env)), {}, 0)

    def _build_generator(self, env: Env) -> nn.Module:
        return env.build("generator", lambda: nn.Linear(5, math.prod(env.shape)))

    async def round(self, state: Gan, rnd: Round) -> Gan:
        generator = self._build_generator(rnd.env)
        load(generator, state.generator)
        optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
        load_optimizer(optimizer, state.moments)
        for step in range(state.done, rnd.params.steps):
            noise = torch.from_numpy(rnd.rng("synthesis", step).normal(size=(rnd.params.batch, 5))).float()
            if rnd.params.global_noise:
                noise = await rnd.compute(torch.randn_like, noise)
            images = generator(noise).reshape(-1, *rnd.env.shape)
            feedback = [reply.body.images async for reply in rnd.ask(GAN_STEP, Images(images.detach()))]
            await rnd.compute(self._learn, optimizer, images, feedback)
            state = Gan(state.weights, read_tensors(generator), read_optimizer(optimizer), step + 1)
            if (step + 1) % rnd.params.save_every == 0:
                await rnd.save(state)
        fit = await rnd.mean(FIT, Global(state.weights))
        return Gan(fit.weights, state.generator, state.moments, 0)

    @staticmethod
    def _learn(optimizer: torch.optim.Optimizer, images: Tensor, feedback: list[Tensor]) -> None:
        optimizer.zero_grad()
        images.backward(torch.stack(feedback).mean(0))
        optimizer.step()

    @on(GAN_STEP)
    def gan_step(self, ctx: ClientContext, msg: Images) -> Feedback:
        floats = math.prod(ctx.env.shape)
        discriminator = ctx.env.build("discriminator", lambda: nn.Sequential(nn.Flatten(), nn.Linear(floats, 1)))
        optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
        if (kept := ctx.store.get("discriminator", StoredDiscriminator)) is not None:
            load(discriminator, kept.weights)
            load_optimizer(optimizer, kept.moments)
        take = ctx.rng("real").integers(len(ctx.data.train), size=len(msg.images))
        real = ctx.data.train.batch(take)[0]
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        loss = F.binary_cross_entropy_with_logits
        optimizer.zero_grad()
        (loss(discriminator(real), ones) + loss(discriminator(msg.images), zeros)).backward()
        optimizer.step()
        ctx.store.put("discriminator", StoredDiscriminator(read_tensors(discriminator), read_optimizer(optimizer)))
        images = msg.images.clone().requires_grad_()
        loss(discriminator(images), ones).backward()
        assert images.grad is not None
        return Feedback(images.grad)

    @on(FIT)
    def fit(self, ctx: ClientContext, msg: Global) -> Update:
        return train_plainly(ctx, msg)

    def model(self, state: Gan) -> Tensors:
        return state.weights

    def cost(self, shapes: Shapes) -> Cost:
        n, params = shapes.num_asked, shapes.env.params
        images = 4 * params.batch * shapes.sample_floats * params.steps * n
        cost = FedAvg().cost(shapes)
        return cost.add("down", Kind.IMAGES, images).add("up", Kind.FEEDBACK, images)


# Missing clients


@dataclass(frozen=True)
class Loyal:
    weights: Tensors = part(Kind.WEIGHTS)
    last: dict[int, Tensors] = part(Kind.WEIGHTS)  # each client's last update
    missed: dict[int, int] = part(Kind.SCALARS)


class ToyLoyal(Method[Loyal]):
    """Counts missing clients, asks them once more, and uses their last update if they are still missing."""

    name = "toy-loyal"
    needs_each_update = "a missing client's last update is used in its place"

    def init(self, env: Env) -> Loyal:
        return Loyal(read_tensors(env.model()), {}, {})

    async def round(self, state: Loyal, rnd: Round) -> Loyal:
        last, missed = dict(state.last), dict(state.missed)
        question = Global(state.weights)
        replies = [reply async for reply in rnd.ask(FIT, question)]
        late = list(rnd.missing)
        if late:
            replies += [reply async for reply in rnd.ask(FIT, dict.fromkeys(late, question), quorum=0)]
        for client in rnd.missing:
            missed[client] = missed.get(client, 0) + 1
        rnd.record(asked_again=late, missing=dict(rnd.missing))
        for reply in replies:
            last[reply.client] = {name: tensor.clone() for name, tensor in reply.body.weights.items()}
        mean = WeightedMean()
        for client in rnd.cohort:
            if client in last:
                mean.add(last[client], 1)
        return Loyal(mean.combine(), last, missed)

    @on(FIT)
    def fit(self, ctx: ClientContext, msg: Global) -> Update:
        return train_plainly(ctx, msg)

    def model(self, state: Loyal) -> Tensors:
        return state.weights

    def cost(self, shapes: Shapes) -> Cost:
        return FedAvg().cost(shapes)


TOYS: list[type[Method[Any, Any]]] = [ToyMpgan, ToyLoyal]
