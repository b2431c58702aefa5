"""Toy methods for what no built-in method does: durable points within a round, and asking absent clients again."""

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


# MP-GAN: many small steps in a round, and an optimizer that stays on the client


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
class Player:
    """What a client keeps of its discriminator from step to step."""

    weights: Tensors
    moments: Tensors


GAN_STEP = Phase("gan_step", Images, Feedback, same=("images",))


class ToyMpganParams(Params):
    """How many steps a round has, how many images a step, and how often the game is saved."""

    steps: int = Field(4, ge=0)
    batch: int = Field(3, ge=1)
    save_every: int = Field(2, ge=1)
    global_noise: bool = Field(False, description="draw from torch's global stream, as layers with dropout do")


class ToyMpgan(Method[Gan, ToyMpganParams]):
    """A generator on the server plays against a discriminator on each client, one batch at a time; then FedAvg."""

    name = "toy-mpgan"
    shares = "gradients with respect to generated images"

    def init(self, env: Env) -> Gan:
        return Gan(read_tensors(env.model()), read_tensors(self._generator(env)), {}, 0)

    def _generator(self, env: Env) -> nn.Module:
        return env.build("generator", lambda: nn.Linear(5, math.prod(env.shape)))

    async def round(self, state: Gan, rnd: Round) -> Gan:
        generator = self._generator(rnd.env)
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
        judge = ctx.env.build("discriminator", lambda: nn.Sequential(nn.Flatten(), nn.Linear(floats, 1)))
        optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3)
        if (kept := ctx.store.get("player", Player)) is not None:
            load(judge, kept.weights)
            load_optimizer(optimizer, kept.moments)
        take = ctx.rng("real").integers(len(ctx.data.train), size=len(msg.images))
        real = ctx.data.train.batch(take)[0]
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        guess = F.binary_cross_entropy_with_logits
        optimizer.zero_grad()
        (guess(judge(real), ones) + guess(judge(msg.images), zeros)).backward()
        optimizer.step()
        ctx.store.put("player", Player(read_tensors(judge), read_optimizer(optimizer)))
        images = msg.images.clone().requires_grad_()
        guess(judge(images), ones).backward()
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


# Who is missing


@dataclass(frozen=True)
class Loyal:
    weights: Tensors = part(Kind.WEIGHTS)
    last: dict[int, Tensors] = part(Kind.WEIGHTS)  # each client's last update
    missed: dict[int, int] = part(Kind.SCALARS)


class ToyLoyal(Method[Loyal]):
    """Who does not answer is counted, asked once more, and else stands in with its last update."""

    name = "toy-loyal"
    needs_each_update = "a client's last update stands in for it when it is away"

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
        return Loyal(mean.value, last, missed)

    @on(FIT)
    def fit(self, ctx: ClientContext, msg: Global) -> Update:
        return train_plainly(ctx, msg)

    def model(self, state: Loyal) -> Tensors:
        return state.weights

    def cost(self, shapes: Shapes) -> Cost:
        return FedAvg().cost(shapes)


TOYS: list[type[Method[Any, Any]]] = [ToyMpgan, ToyLoyal]
