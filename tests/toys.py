"""Toy methods with the wire patterns of the real ones to come: they show that the interface carries them unchanged.

Each is as small as its pattern allows and learns something or nothing; what counts is who is asked what, when.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedrpc.aggregation.mean import WeightedMean
from fedrpc.data.examples import Examples
from fedrpc.methods import base
from fedrpc.methods.fedavg import FIT, FedAvg, Global, Update
from fedrpc.methods.method import ClientContext, ClientId, Cost, Env, Method, Phase, Round, Shapes, on
from fedrpc.models.cut import cut
from fedrpc.models.state import load, load_optimizer, read_optimizer, read_tensors
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part


@dataclass(frozen=True)
class Model:
    weights: Tensors = part(Kind.WEIGHTS)


@dataclass(frozen=True)
class Trained:
    weights: Tensors = part(Kind.WEIGHTS)
    num_examples: int


@dataclass(frozen=True)
class Features:
    values: Tensor = part(Kind.ACTIVATIONS)
    labels: Tensor = part(Kind.ACTIVATIONS)


def trained(ctx: ClientContext, weights: Tensors, data: Examples | None = None) -> Trained:
    model = ctx.model()
    load(model, weights)
    report = ctx.train(model, cross_entropy, data=data)
    return Trained(read_tensors(model), report.num_examples)


async def averaged(rnd: Round, replies: Any) -> tuple[Tensors, list[ClientId]]:
    mean, who = WeightedMean(), []
    async for reply in replies:
        await rnd.compute(mean.add, reply.body.weights, reply.body.num_examples)
        who.append(reply.client)
    return mean.value, who


# FLea: a second question to the same cohort after aggregation


@dataclass(frozen=True)
class Start:
    weights: Tensors = part(Kind.WEIGHTS)
    buffer: Features | None  # of last round's cohort


@dataclass(frozen=True)
class Subset:
    index: Tensor


def _labelled(question: Any, answer: Features) -> None:
    if len(answer.values) != len(answer.labels) or (answer.labels < 0).any():
        raise ValueError("features and labels do not fit each other")


FIT_WITH_BUFFER = Phase("fit", Start, Trained, same=("weights",))
EXTRACT = Phase("extract", Model, Features, check=_labelled)


class ToyFlea(Method[Start]):
    """Trains with a buffer of features, averages, then asks the same clients for features of the new model."""

    name = "toy-flea"
    shares = "features of an intermediate layer, with their labels"

    class Params(base.Params):
        """How much is shared, and where the network is cut."""

        alpha: float = Field(0.3, gt=0, le=1)
        layer: int = 0

    def init(self, env: Env) -> Start:
        return Start(read_tensors(env.model()), None)

    async def round(self, state: Start, rnd: Round) -> Start:
        weights, who = await averaged(rnd, rnd.ask(FIT_WITH_BUFFER, state))
        new = Model(weights)
        features = [reply.body async for reply in rnd.ask(EXTRACT, dict.fromkeys(who, new))]
        buffer = Features(torch.cat([f.values for f in features]), torch.cat([f.labels for f in features]))
        return Start(weights, buffer)

    @on(FIT_WITH_BUFFER)
    def fit(self, ctx: ClientContext, msg: Start) -> Trained:
        model = ctx.model()
        load(model, msg.weights)
        buffer, rng = msg.buffer, ctx.rng("buffer")

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            value = cross_entropy(model, x, y)
            if buffer is not None and len(buffer.labels):
                at = torch.from_numpy(rng.integers(len(buffer.labels), size=len(y)))
                tail = cut(model, ctx.params.layer)[1]
                value = value + F.cross_entropy(tail(buffer.values[at]), buffer.labels[at])
            return value

        report = ctx.train(model, loss)
        return Trained(read_tensors(model), report.num_examples)

    @on(EXTRACT)
    def extract(self, ctx: ClientContext, msg: Model) -> Features:
        kept = ctx.store.get("subset", Subset)
        if kept is None:  # drawn once: the total exposure stays small
            size = math.floor(ctx.params.alpha * len(ctx.data.train))
            kept = Subset(torch.from_numpy(ctx.rng("subset").permutation(len(ctx.data.train))[:size].copy()))
            ctx.store.put("subset", kept)
        model = ctx.model().eval()
        load(model, msg.weights)
        x, y = ctx.data.train.batch(kept.index.numpy())
        with torch.no_grad():
            return Features(cut(model, ctx.params.layer)[0](x), y)

    def model(self, state: Start) -> Tensors:
        return state.weights

    def cost(self, shapes: Shapes) -> Cost:
        with torch.no_grad():
            head = cut(shapes.env.model().eval(), shapes.env.params.layer)[0]
            row = 4 * head(torch.zeros(1, *shapes.env.shape)).numel() + 8
        alpha = shapes.env.params.alpha
        pools = [sum(math.floor(alpha * shapes.num_examples[c]) for c in cohort) for cohort in shapes.cohorts]
        cost = Cost()
        for index, cohort in enumerate(shapes.cohorts):
            cost.add("down", Kind.WEIGHTS, 2 * len(cohort) * shapes.weights_bytes)
            cost.add("down", Kind.ACTIVATIONS, len(cohort) * row * (pools[index - 1] if index else 0))
            cost.add("up", Kind.WEIGHTS, len(cohort) * shapes.weights_bytes)
            cost.add("up", Kind.SCALARS, len(cohort) * 8)
            cost.add("up", Kind.ACTIVATIONS, row * pools[index])
        return cost


# FedDPMS: matching, and a message of its own for each client


@dataclass(frozen=True)
class Pool:
    """The server's state: who shared which classes and means, and who was helped."""

    weights: Tensors = part(Kind.WEIGHTS)
    abundant: dict[int, Tensor] = part(Kind.CLASS_ABUNDANCE)
    means: dict[int, Tensors] = part(Kind.LATENT_MEANS)
    helped: list[int] = part(Kind.SCALARS)


@dataclass(frozen=True)
class Nothing:
    pass


@dataclass(frozen=True)
class Classes:
    ids: Tensor = part(Kind.CLASS_ABUNDANCE)


@dataclass(frozen=True)
class Help:
    weights: Tensors = part(Kind.WEIGHTS)
    means: Tensors | None = part(Kind.LATENT_MEANS)  # by class id, once for each client


@dataclass(frozen=True)
class Shared:
    classes: Classes
    means: Tensors = part(Kind.LATENT_MEANS)


@dataclass(frozen=True)
class Kept:
    means: Tensors


SCARCE = Phase("scarce", Nothing, Classes)
TRAIN = Phase("train", Help, Trained, same=("weights",))
SHARE = Phase("share", Model, Shared)


def by_abundance(counts: Sequence[int]) -> list[int]:
    """Class ids, the most abundant first, ties by id."""
    return sorted(range(len(counts)), key=lambda c: (-counts[c], c))


def matched(scarce: Sequence[int], abundant: Mapping[ClientId, Sequence[int]], client: ClientId) -> ClientId | None:
    """The client that has most of what another lacks; ties by id, nobody when there is nothing in common."""
    common = {other: len({*scarce} & {*has}) for other, has in abundant.items() if other != client}
    best = max(sorted(common), key=lambda other: common[other], default=None)
    return best if best is not None and common[best] else None


class ToyDpms(Method[Pool]):
    """Clients that lack classes get another client's class means, each at most once."""

    name = "toy-dpms"
    shares = "which classes are abundant or scarce, and class means of inputs"

    class Params(base.Params):
        """How many classes are named, and how wide a mean is."""

        num_named: int = Field(3, ge=1)
        width: int = 4

    def init(self, env: Env) -> Pool:
        return Pool(read_tensors(env.model()), {}, {}, [])

    async def round(self, state: Pool, rnd: Round) -> Pool:
        partners = await self._match(state, rnd)
        messages = {
            client: Help(state.weights, state.means[partners[client]] if client in partners else None)
            for client in rnd.cohort
        }
        weights, who = await averaged(rnd, rnd.ask(TRAIN, messages))
        abundant, means = dict(state.abundant), dict(state.means)
        new = [client for client in who if client not in abundant]
        async for reply in rnd.ask(SHARE, dict.fromkeys(new, Model(weights)), quorum=0):
            abundant[reply.client] = reply.body.classes.ids.clone()
            means[reply.client] = {name: mean.clone() for name, mean in reply.body.means.items()}
        rnd.record(partners=partners)
        return Pool(weights, abundant, means, [*state.helped, *(client for client in partners if client in who)])

    async def _match(self, state: Pool, rnd: Round) -> dict[ClientId, ClientId]:
        has = {client: ids.tolist() for client, ids in state.abundant.items()}
        asked = [client for client in rnd.cohort if client not in state.helped] if has else []
        found = {}
        async for reply in rnd.ask(SCARCE, dict.fromkeys(asked, Nothing())):
            partner = matched(reply.body.ids.tolist(), has, reply.client)
            if partner is not None:
                found[reply.client] = partner
        return found

    @on(SCARCE)
    def scarce(self, ctx: ClientContext, msg: Nothing) -> Classes:
        return Classes(torch.tensor(self._named(ctx, scarce=True)))

    def _named(self, ctx: ClientContext, *, scarce: bool) -> list[int]:
        counts = torch.bincount(ctx.data.train.y, minlength=ctx.data.num_classes).tolist()
        order = by_abundance(counts)
        return (order[::-1] if scarce else order)[: ctx.params.num_named]

    @on(TRAIN)
    def train(self, ctx: ClientContext, msg: Help) -> Trained:
        if msg.means is not None:
            assert ctx.store.get("means", Kept) is None, "a client is helped at most once"
            ctx.store.put("means", Kept(msg.means))
        kept = ctx.store.get("means", Kept)
        data = ctx.data.train
        if kept is not None:
            y = torch.tensor([int(name) for name in kept.means])
            x = torch.stack([mean.mean().expand(ctx.data.shape) for mean in kept.means.values()])
            data = data + Examples.of(x, y)
        return trained(ctx, msg.weights, data)

    @on(SHARE)
    def share(self, ctx: ClientContext, msg: Model) -> Shared:
        ids = self._named(ctx, scarce=False)
        x, y = ctx.data.train.all()
        flat = F.adaptive_avg_pool1d(x.flatten(1).unsqueeze(1), ctx.params.width).squeeze(1)
        means = {str(c): flat[y == c].mean(0) if (y == c).any() else torch.zeros(ctx.params.width) for c in ids}
        return Shared(Classes(torch.tensor(ids)), means)

    def model(self, state: Pool) -> Tensors:
        return state.weights

    def cost(self, shapes: Shapes) -> Cost:
        named, width = shapes.env.params.num_named, shapes.env.params.width
        order = [by_abundance(counts) for counts in shapes.class_counts]
        shared: dict[ClientId, list[int]] = {}
        helped: set[ClientId] = set()
        cost = Cost()
        for cohort in shapes.cohorts:
            asked = [client for client in cohort if client not in helped] if shared else []
            partners = {client: matched(order[client][::-1][:named], shared, client) for client in asked}
            new = [client for client in cohort if client not in shared]
            num_helped = sum(partner is not None for partner in partners.values())
            helped |= {client for client, partner in partners.items() if partner is not None}
            shared |= {client: order[client][:named] for client in new}
            cost.add("up", Kind.CLASS_ABUNDANCE, 8 * named * (len(asked) + len(new)))
            cost.add("down", Kind.LATENT_MEANS, 4 * width * named * num_helped)
            cost.add("up", Kind.LATENT_MEANS, 4 * width * named * len(new))
            cost.add("down", Kind.WEIGHTS, shapes.weights_bytes * (len(cohort) + len(new)))
            cost.add("up", Kind.WEIGHTS, shapes.weights_bytes * len(cohort))
            cost.add("up", Kind.SCALARS, 8 * len(cohort))
        return cost


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


class ToyMpgan(Method[Gan]):
    """A generator on the server plays against a discriminator on each client, one batch at a time; then FedAvg."""

    name = "toy-mpgan"
    shares = "gradients with respect to generated images"

    class Params(base.Params):
        """How many steps a round has, how many images a step, and how often the game is saved."""

        steps: int = Field(4, ge=0)
        batch: int = Field(3, ge=1)
        save_every: int = Field(2, ge=1)
        global_noise: bool = Field(False, description="draw from torch's global stream, as layers with dropout do")

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
        weights, _ = await averaged(rnd, rnd.ask(FIT, Global(state.weights)))
        return Gan(weights, state.generator, state.moments, 0)

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
        done = trained(ctx, msg.weights)
        return Update(done.weights, done.num_examples, torch.zeros(ctx.env.train.epochs, dtype=torch.float64))

    def model(self, state: Gan) -> Tensors:
        return state.weights

    def cost(self, shapes: Shapes) -> Cost:
        n, params = shapes.num_asked, shapes.env.params
        images = 4 * params.batch * shapes.sample_floats * params.steps * n
        cost = FedAvg().cost(shapes)
        return cost.add("down", Kind.IMAGES, images).add("up", Kind.FEEDBACK, images)


# FedMix and CCVR: something before the first round, and something after the last


@dataclass(frozen=True)
class Means:
    samples: Tensor = part(Kind.MEAN_SAMPLES)
    labels: Tensor = part(Kind.MEAN_SAMPLES)


@dataclass(frozen=True)
class Moments:
    counts: Tensor = part(Kind.MOMENTS)
    sums: Tensor = part(Kind.MOMENTS)


@dataclass(frozen=True)
class Done:
    ok: bool


COLLECT = Phase("collect", Nothing, Means)
SPREAD = Phase("spread", Means, Done)
MOMENTS = Phase("moments", Model, Moments)


class ToyMeans(FedAvg):
    """Set-up pools class means from everybody for everybody; finalize moves the biases by class-wise moments."""

    name = "toy-means"
    shares = "averaged samples, and class-wise sums of logits"

    async def setup(self, state: Global, rnd: Round) -> Global:
        got = [reply.body async for reply in rnd.ask(COLLECT, Nothing())]
        pool = Means(torch.cat([m.samples for m in got]), torch.cat([m.labels for m in got]))
        told = [reply.body.ok async for reply in rnd.ask(SPREAD, pool)]
        rnd.record(told=len(told))
        return state

    @on(COLLECT)
    def collect(self, ctx: ClientContext, msg: Nothing) -> Means:
        x, y = ctx.data.train.all()
        return Means(x.mean(0, keepdim=True), y[:1].clone())

    @on(SPREAD)
    def spread(self, ctx: ClientContext, msg: Means) -> Done:
        ctx.store.put("pool", msg)
        return Done(True)

    @on(FIT)
    def fit(self, ctx: ClientContext, msg: Global) -> Update:
        pool = ctx.store.get("pool", Means)
        assert pool is not None, "set-up came first"
        done = trained(ctx, msg.weights, ctx.data.train + Examples.of(pool.samples, pool.labels))
        return Update(done.weights, len(ctx.data.train), torch.zeros(ctx.env.train.epochs, dtype=torch.float64))

    async def finalize(self, state: Global, rnd: Round) -> Global:
        counts, sums = torch.zeros(rnd.env.num_classes), torch.zeros(rnd.env.num_classes)
        async for reply in rnd.ask(MOMENTS, Model(state.weights)):
            counts, sums = counts + reply.body.counts, sums + reply.body.sums
        weights = dict(state.weights)
        weights["classifier.bias"] = weights["classifier.bias"] - sums / counts.clamp(min=1)
        return Global(weights)

    @on(MOMENTS)
    def moments(self, ctx: ClientContext, msg: Model) -> Moments:
        model = ctx.model().eval()
        load(model, msg.weights)
        x, y = ctx.data.train.all()
        with torch.no_grad():
            own = model(x).gather(1, y.unsqueeze(1)).squeeze(1)
        zeros = torch.zeros(ctx.data.num_classes)
        return Moments(torch.bincount(y, minlength=len(zeros)).float(), zeros.index_add(0, y, own))

    def cost(self, shapes: Shapes) -> Cost:
        clients, mean = shapes.env.num_clients, 4 * shapes.sample_floats + 8
        return (
            super()
            .cost(shapes)
            .add("up", Kind.MEAN_SAMPLES, clients * mean)
            .add("down", Kind.MEAN_SAMPLES, clients * clients * mean)
            .add("up", Kind.SCALARS, clients * 8)
            .add("down", Kind.WEIGHTS, clients * shapes.weights_bytes)
            .add("up", Kind.MOMENTS, clients * 2 * 4 * shapes.env.num_classes)
        )


# Who is missing


@dataclass(frozen=True)
class Loyal:
    weights: Tensors = part(Kind.WEIGHTS)
    last: dict[int, Tensors] = part(Kind.WEIGHTS)  # each client's last update
    missed: dict[int, int] = part(Kind.SCALARS)


class ToyLoyal(Method[Loyal]):
    """Who does not answer is counted, asked once more, and else stands in with its last update."""

    name = "toy-loyal"

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
        done = trained(ctx, msg.weights)
        return Update(done.weights, done.num_examples, torch.zeros(ctx.env.train.epochs, dtype=torch.float64))

    def model(self, state: Loyal) -> Tensors:
        return state.weights

    def cost(self, shapes: Shapes) -> Cost:
        return FedAvg().cost(shapes)


# A projection head: the network that travels is more than the configured one


class Headed(nn.Module):
    """A network with something on top."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.head(self.body(x))
        return out


class ToyHead(FedAvg):
    """FedAvg on a network that the method adds a layer to."""

    name = "toy-head"

    def network(self, build: Any) -> nn.Module:
        return Headed(build())


TOYS: list[type[Method[Any, Any]]] = [ToyFlea, ToyDpms, ToyMpgan, ToyMeans, ToyLoyal, ToyHead]
