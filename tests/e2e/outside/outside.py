"""Methods and a network from outside, by entry point: FedAvg that waits, hurries or only echoes, and two toy GANs."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedrpc.methods.cost import Cost, Shapes
from fedrpc.methods.fedavg import FIT, FedAvg, Global, Update, check_update
from fedrpc.methods.method import ClientContext, Env, Loss, Params, Phase, Round, allowed, on
from fedrpc.methods.mpgan.client import sample_real
from fedrpc.methods.mpgan.gan import MultiPath
from fedrpc.methods.mpgan.messages import GAN_STEP, Feedback, GeneratedImages, StoredDiscriminator
from fedrpc.methods.mpgan.method import MpGan
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import part

_PATIENCE_S = 150.0


class GateParams(Params):
    """Where and how long to wait; none of it changes the model."""

    gates: str = ""  # a folder: a gate is shut while its `.shut` file is there
    delay_s: float = 0.0  # before every answer, at random up to this, by the operating system's entropy
    batch_s: float = 0.0  # before every batch


def pass_gate(folder: str, name: str) -> None:
    """Leaves a note with this process's id, then waits while the gate is shut."""
    if not folder:
        return
    with (Path(folder) / f"{name}.reached").open("a") as notes:
        notes.write(f"{os.getpid()}\n")
    give_up = time.monotonic() + _PATIENCE_S
    while (Path(folder) / f"{name}.shut").exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"gate {name} stayed shut for {_PATIENCE_S:g} s")
        time.sleep(0.01)


class Gated(FedAvg):
    """FedAvg whose server stops before each round's question, and whose clients stop before each training.

    Everybody stops at "load", while the learning problem is put together.
    """

    name = "gated"
    dp_sgd = allowed()
    Params = GateParams

    def check(self, env: Env) -> None:
        pass_gate(env.params.gates, "load")
        super().check(env)

    async def round(self, state: Global, rnd: Round) -> Global:
        await rnd.compute(pass_gate, rnd.params.gates, f"server-{rnd.index}")
        return await super().round(state, rnd)

    def fit(self, ctx: ClientContext, msg: Global) -> Update:
        time.sleep(random.SystemRandom().uniform(0.0, ctx.params.delay_s))
        pass_gate(ctx.params.gates, f"client-{ctx.client}-{ctx.round}")
        return self.work(ctx, msg)

    def work(self, ctx: ClientContext, msg: Global) -> Update:
        return super().fit(ctx, msg)

    def build_loss(self, ctx: ClientContext, msg: Global) -> Loss:
        def slowly(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            time.sleep(ctx.params.batch_s)
            return cross_entropy(model, x, y)

        return slowly


@dataclass(frozen=True)
class LoadedUpdate(Update):
    """An update with room for anything."""

    load: Tensor | None = part(Kind.ACTIVATIONS, default=None)


LOADED_FIT = Phase("fit", Global, LoadedUpdate, same=("weights",), check=check_update)


class Loaded(Gated):
    """The same, with answers of which neither layout nor size is known in advance."""

    name = "loaded"

    async def round(self, state: Global, rnd: Round) -> Global:
        await rnd.compute(pass_gate, rnd.params.gates, f"server-{rnd.index}")
        fit = await rnd.mean(LOADED_FIT, state)
        return Global(fit.weights)

    @on(LOADED_FIT)
    def fit(self, ctx: ClientContext, msg: Global) -> LoadedUpdate:
        return LoadedUpdate(**vars(super().fit(ctx, msg)))


class Held(Gated):
    """The same, and the server stops before each batch of an evaluation."""

    name = "held"

    def check(self, env: Env) -> None:
        super().check(env)
        self._gates = env.params.gates

    def network(self, build: Callable[[], nn.Module], params: Params) -> nn.Module:
        def stop(module: nn.Module, _: object) -> None:
            if not module.training:
                pass_gate(self._gates, "evaluate")

        network = build()
        network.register_forward_pre_hook(stop)
        return network


def wide(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A network of nine chunks that is cheap to evaluate."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 2900), nn.ReLU(), nn.Linear(2900, num_classes))


def medium(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A network of 0.4 MB for a 28 x 28 image: the smallest kind of which the chunks have frames of their own."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 120), nn.ReLU(), nn.Linear(120, num_classes))


def thin(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A network of 2 kB for a 28 x 28 image, which travels in the envelope."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(math.prod(shape) // 16, num_classes))


class Echo(Gated):
    """Every client sends back what it was sent."""

    name = "echo"

    def work(self, ctx: ClientContext, msg: Global) -> Update:
        return Update(msg.weights, len(ctx.data.train), torch.zeros(1, dtype=torch.float64))


class TimedEcho(Echo):
    """The same, with notes of when questions and answers leave one half of the method and are there in the other."""

    name = "timed-echo"
    needs_each_update = "it notes when each answer is there"

    async def round(self, state: Global, rnd: Round) -> Global:
        await rnd.compute(pass_gate, rnd.params.gates, f"server-{rnd.index}")
        _note(rnd.params.gates, rnd.index, "question asked")
        async for _ in rnd.ask(FIT, state):
            _note(rnd.params.gates, rnd.index, "answer here")
        return state

    def work(self, ctx: ClientContext, msg: Global) -> Update:
        _note(ctx.params.gates, ctx.round, "question here")
        update = super().work(ctx, msg)
        _note(ctx.params.gates, ctx.round, "answer given")
        return update


def _note(folder: str, number: int, what: str) -> None:
    """Adds a line with the time by the machine's clock, which is the same for all its processes."""
    line = json.dumps({"round": number, "what": what, "monotonic": time.monotonic()})
    with (Path(folder) / "notes.jsonl").open("a") as notes:
        notes.write(line + "\n")


class Nudged(Gated):
    """Every client moves the weights by a seeded step instead of training: a large model changes in no time.

    A client abstains where a gate has an `.absent` file.
    """

    name = "nudged"

    def work(self, ctx: ClientContext, msg: Global) -> Update:
        if ctx.params.gates and (Path(ctx.params.gates) / f"client-{ctx.client}-{ctx.round}.absent").exists():
            ctx.abstain("this test wants it to be absent")
        step = float(ctx.rng("nudge").uniform(-0.01, 0.01))
        moved = {name: value + step if value.is_floating_point() else value for name, value in msg.weights.items()}
        return Update(moved, len(ctx.data.train), torch.zeros(1, dtype=torch.float64))


class ToyGan(MpGan):
    """MP-GAN with linear networks: its steps cost little but what asking and answering cost."""

    name = "toygan"

    def build_generator(self, env: Env) -> nn.Module:
        shape = (env.shape[0], env.params.size, env.params.size)
        build = lambda: nn.Sequential(nn.Linear(env.params.noise_dim, math.prod(shape)), nn.Unflatten(1, shape))  # noqa: E731
        return env.build("toygan-generator", lambda: MultiPath(env.params.paths, build))

    def build_discriminator(self, env: Env) -> nn.Module:
        floats = env.shape[0] * env.params.size**2
        build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(floats, 1), nn.Flatten(0))  # noqa: E731
        return env.build("toygan-discriminator", build)


class HandGan(ToyGan):
    """The same with a linear discriminator that takes its steps by hand: neither autograd nor Adam.

    It plays the same game over the same wire and store, so what its steps cost is what the protocol costs.
    """

    name = "handgan"

    @on(GAN_STEP)
    def gan_step(self, ctx: ClientContext, msg: GeneratedImages) -> Feedback:
        generated = msg.images.numpy().reshape(-1, math.prod(msg.images.shape[2:]))
        kept = ctx.store.get("discriminator", StoredDiscriminator)
        slope = np.zeros(generated.shape[1], np.float32) if kept is None else kept.values.numpy()
        x = np.concatenate([sample_real(ctx, len(generated))[0].numpy().reshape(generated.shape), generated])
        wanted = np.repeat(np.float32([1, 0]), len(generated))
        error = 1 / (1 + np.exp(-x @ slope)) - wanted
        slope = slope - ctx.params.lr * (error @ x) / len(x)
        doubt = 1 / (1 + np.exp(generated @ slope))  # the probability that a generated image is not real
        feedback = (-doubt[:, None] * slope / len(generated)).astype(np.float32)
        ctx.store.put("discriminator", StoredDiscriminator(torch.from_numpy(slope.astype(np.float32))))
        losses = float(np.square(error).mean()), float(-np.log1p(-doubt).mean())
        return Feedback(torch.from_numpy(feedback).reshape(msg.images.shape), *losses)


class FaultyParams(Params):
    """Which mistake the author made."""

    mistake: str = ""


class Faulty(FedAvg):
    """FedAvg whose author made a mistake: somewhere in the client half, in the server half, or in the formula."""

    name = "faulty"
    Params = FaultyParams

    def init(self, env: Env) -> Global:
        self._mistake = env.params.mistake
        return super().init(env)

    def check(self, env: Env) -> None:
        if env.params.mistake == "check":
            _look_up("bound")

    async def round(self, state: Global, rnd: Round) -> Global:
        if rnd.params.mistake == "server" and rnd.index == 1:
            await rnd.compute(_look_up, "prototypes")
        if rnd.params.mistake and rnd.index == 1 and Path(rnd.params.mistake).exists():  # until the test corrects it
            _look_up("prototypes")
        return await super().round(state, rnd)

    def fit(self, ctx: ClientContext, msg: Global) -> Update:
        if ctx.params.mistake == "client" and ctx.round == 1:
            _multiply()
        if ctx.params.mistake == "one client" and ctx.client == 0:
            _multiply()
        if ctx.params.mistake == "type":
            return msg.weights  # type: ignore[return-value]
        return super().fit(ctx, msg)

    def cost(self, shapes: Shapes) -> Cost:
        cost = super().cost(shapes)
        if self._mistake == "formula":
            cost.add("up", Kind.WEIGHTS, 4)
        return cost


def _look_up(name: str) -> str:
    return {}[name]  # the server


def _multiply() -> Tensor:
    return nn.functional.linear(torch.zeros(2, 3), torch.zeros(4, 5))  # the client
