"""MP-GAN (a thesis on multi-path-generator GANs): clients' discriminators teach a generator, whose images join FedAvg.

Set-up is the GAN phase: in each step the server sends one batch of every path to the cohort, each client takes a step
of its own discriminator and returns the gradient of the generator loss with respect to the images, and the server moves
each path along the mean. Rounds are FedAvg, from some round on with floor(A_f n_k) labelled images for client k.

Departs from the thesis and its code:
- Labels come from the global classifier after a warm-up, where it is confident, as many of each class. The code has
  them from a classifier trained on all clients' raw data: `labels = "oracle"`, for comparison only, and marked so.
- Each client has a discriminator of its own, as the text says (in the code all clients share one), equal at first.
- One generator step for the mean over the cohort, not one for each client's batch: clients work at the same time.
- Images are 32x32 (the code: 64x64) in [-1, 1], whatever the run's normalisation is; smaller ones are padded with the
  least value. Real images are called 0.9 real.
- Each client has images of its own, drawn at random; in the code all have the same 48.
- No head that tells paths apart: its weight in the code is 0. `diversity` pushes paths apart at the server instead.
Where the thesis is silent: `warm_up`, `tau`, and that a client draws each real batch anew. A pool that came out smaller
than a client's share is repeated for it; one that is smaller than `min_pool` of it waits, and nothing is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from fedrpc.data.examples import Examples
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.earlier import earlier_state
from fedrpc.methods.blocks.generation import conditioned
from fedrpc.methods.blocks.pool import Nothing
from fedrpc.methods.blocks.updates import release_update
from fedrpc.methods.fedavg import FIT, FedAvg, Global, Update
from fedrpc.methods.method import (
    ClientContext,
    ClientId,
    Cost,
    Env,
    Method,
    Params,
    Phase,
    Round,
    Shapes,
    on,
    refused,
    register,
)
from fedrpc.methods.mpgan.augment import Candidates, Labelled, Level, accepted, added, drawn, judged_by, schedule
from fedrpc.methods.mpgan.gan import Generation, MultiPath, adam, feedback_on, judge_loss, packed, unpack
from fedrpc.methods.tools import Pictures, Reported
from fedrpc.models.dcgan import Discriminator, GeneratorPath
from fedrpc.models.state import load, load_optimizer, read_optimizer, read_tensors
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part

REPORTED = (
    Reported("gan_from.run_id", "generator of run", why="gan_from.note"),
    Reported(
        "labelling",
        "labelling",
        "images for clients, a row for each level of A_f",
        columns={
            "key": "level",
            "labels_by": "labels by",
            "candidates": "made",
            "acceptance_rate": "share confident",
            "wanted": "wanted",
            "kept": "kept",
            "given_out": "given out",
            "label_histogram": "kept by class",
        },
    ),
)
ORACLE = "labels of generated images come from an oracle that sees all raw data: for comparison only, not private"
_PLAYER = "discriminator"  # its key in a client's store
_POOL_BATCH = 100  # of each path, when images are made for clients
_HEARD_BYTES = 4 << 20  # of feedback that is added up at a time
_SHOWN = 4  # of each path in a picture of the training


@dataclass(frozen=True)
class Made:
    """Down: what every path made (paths, batch, channels, size, size), and for what labels if it was told any."""

    images: Tensor = part(Kind.IMAGES)
    labels: Tensor | None = part(Kind.IMAGES, default=None)


@dataclass(frozen=True)
class Feedback:
    """Up: the generator loss's gradient with respect to the images, and both losses."""

    images: Tensor = part(Kind.FEEDBACK)
    judge_loss: float = part(Kind.SCALARS)
    generator_loss: float = part(Kind.SCALARS)


@dataclass(frozen=True)
class Portion:
    """Down: images with labels for one client, of one level of A_f; it keeps them as they are."""

    level: int = part(Kind.SCALARS)
    x: Tensor = part(Kind.IMAGES)
    y: Tensor = part(Kind.IMAGES)


@dataclass(frozen=True)
class Player:
    """A client's discriminator and its Adam, from step to step."""

    values: Tensor


@dataclass(frozen=True)
class Live:
    """The two in memory, with what they are worth: putting them together again costs as much as half a small step."""

    judge: nn.Module
    optimizer: torch.optim.Adam
    values: Tensor


@dataclass(frozen=True)
class State:
    """The server's state.

    Attributes:
        moments: Adam's of the generator, while it is trained.
        losses: Of each step, discriminators' and generator's, means over clients.
        last_steps: When each client's discriminator was last trained.
        sheets: Pictures of the training by step, in bytes.
        made: Pools of images by level of A_f, as clients train on them.
        labels: Theirs.
        given: How many levels each client holds.
    """

    weights: Tensors = part(Kind.WEIGHTS)
    generator: Tensors = part(Kind.WEIGHTS)
    moments: Tensors = part(Kind.WEIGHTS)
    losses: Tensor = part(Kind.SCALARS)
    last_steps: dict[int, int] = part(Kind.SCALARS)
    sheets: dict[int, Tensor] = part(Kind.IMAGES)
    made: dict[int, Tensor] = part(Kind.IMAGES)
    labels: dict[int, Tensor] = part(Kind.IMAGES)
    given: dict[int, int] = part(Kind.SCALARS)


Judge = Callable[[Tensor, Tensor | None], Candidates]
GAN_STEP = Phase("gan_step", Made, Feedback, same=("images",))
AUGMENT = Phase("augment", Portion, Nothing)


class Canvas:
    """Between the run's inputs and the generator's images, which are larger and in [-1, 1]."""

    def __init__(self, env: Env) -> None:
        assert env.bounds is not None, "checked before"
        self._low, self._high = env.bounds
        self._shape, size = env.shape, env.params.size
        self._top, self._left = ((size - side) // 2 for side in env.shape[1:])
        self._bottom, self._right = size - env.shape[1] - self._top, size - env.shape[2] - self._left

    def on(self, x: Tensor) -> Tensor:
        """Inputs as the discriminator sees them."""
        scaled = 2 * (x - self._low) / (self._high - self._low) - 1
        return F.pad(scaled, (self._left, self._right, self._top, self._bottom), value=-1.0)

    def off(self, images: Tensor) -> Tensor:
        """Generated images as inputs."""
        height, width = self._shape[1:]
        cut = images[..., self._top : self._top + height, self._left : self._left + width]
        return self._low + (cut + 1) / 2 * (self._high - self._low)


@dataclass
class Game:
    """The server's side of the GAN phase; every method but `cohort` is heavy work."""

    method: GanMethod[Any]
    state: State
    rnd: Round
    losses: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = self.method.generator(self.rnd.env).to(self.rnd.device)
        load(self.generator, self.state.generator)
        self.optimizer = adam(self.generator, self.rnd.params.lr)
        if self.state.moments:
            load_optimizer(self.optimizer, self.state.moments)
        self.last_steps, self.sheets = dict(self.state.last_steps), dict(self.state.sheets)

    def cohort(self, step: int) -> list[ClientId]:
        """Who is asked: as many as in a round, drawn anew every `cohort_steps`, among those who have examples."""
        having = [client for client, count in enumerate(self.rnd.env.num_examples()) if count]
        size = min(self.rnd.env.cohort_size, len(having))
        rng = self.rnd.rng("gan-cohort", step // self.rnd.params.cohort_steps)
        return having if size == len(having) else sorted(rng.choice(having, size, replace=False).tolist())

    def make(self, step: int) -> tuple[Generation, Made]:
        """One batch of every path, and the same as it travels."""
        z, y = self.method.noise(self.rnd.env, self.rnd.params.batch, self.rnd.rng("synthesis", step))
        self.generator.train()
        images = self.generator(z.to(self.rnd.device))
        generation = Generation(self.optimizer, images, self.rnd.params.diversity)
        return generation, Made(generation.images, y)

    def learn(self, step: int, generation: Generation, losses: list[tuple[float, float]], heard: list[Tensor]) -> None:
        """Ends a step with the last of its feedback; now and then a picture is kept."""
        generation.add(*heard)
        generation.learn()
        judges, generators = zip(*losses, strict=True) if losses else ((float("nan"),), (float("nan"),))
        self.losses.append((sum(judges) / len(judges), sum(generators) / len(generators)))
        if (step + 1) % self.rnd.params.sheet_every == 0 or step + 1 == self.rnd.params.steps:
            self.sheets[step + 1] = self._sheet()

    def _sheet(self) -> Tensor:
        z, _ = self.method.noise(self.rnd.env, _SHOWN, self.rnd.rng("sheet"))
        with torch.no_grad():
            images: Tensor = self.generator.eval()(z.to(self.rnd.device)).cpu()
        return ((images + 1) * 127.5).round().to(torch.uint8)

    def reached(self, *, over: bool) -> State:
        """The state so far; Adam is forgotten when the game is over."""
        losses = torch.cat([self.state.losses, torch.tensor(self.losses, dtype=torch.float64).reshape(-1, 2)])
        return replace(
            self.state,
            generator=read_tensors(self.generator),
            moments={} if over else read_optimizer(self.optimizer),
            losses=losses,
            last_steps=dict(self.last_steps),
            sheets=dict(self.sheets),
        )


class GanParams(Params):
    """What both variants have; the thesis's code where it says something."""

    paths: int = Field(4, ge=1, description="generators side by side; 1 is the ablation")
    steps: int = Field(600, ge=0, description="of the GAN phase")
    batch: int = Field(50, ge=2, description="images of each path in a step, and real ones beside them")
    noise_dim: int = Field(128, ge=1)
    width: int = Field(64, ge=1, description="of both networks; DCGAN's is 64")
    size: Literal[32, 64] = Field(32, description="side of generated images")
    lr: float = Field(2e-4, gt=0, description="of both Adams")
    smoothing: float = Field(0.9, gt=0, le=1, description="what a discriminator should call real images")
    diversity: float = Field(0.0, ge=0, description="weight of a term at the server that pushes paths apart")
    cohort_steps: int = Field(12, ge=1, description="steps with the same clients, where a cohort is not all of them")
    save_every: int = Field(20, ge=1, description="steps between durable points; clients keep all of them till then")
    sheet_every: int = Field(100, ge=1, description="steps between pictures of the training")
    gan: str | None = Field(None, description="a run directory whose GAN phase is over, to take the generator from")
    gan_sha256: str | None = Field(None, description="of its checkpoint; another one is refused")
    a_f: str = Field("0.1", description='generated images for each real one: "0.1", or "0.01,100:0.1" for a rise')
    warm_up: int = Field(10, ge=0, description="rounds of plain FedAvg before any image is given out")
    min_pool: float = Field(0.25, ge=0, le=1, description="share of the wanted images without which none is given out")
    max_candidates: int = Field(20, ge=1, description="images looked at for each one that is wanted")

    @field_validator("a_f", mode="before")
    @classmethod
    def _a_f(cls, value: Any) -> str:
        text = value if isinstance(value, str) else repr(value)
        schedule(text)
        return text

    @property
    def levels(self) -> tuple[Level, ...]:
        """The schedule of A_f."""
        return schedule(self.a_f)

    def num_levels(self, round_index: int) -> int:
        """How many levels have begun in a round."""
        return sum(max(level.start, self.warm_up) <= round_index for level in self.levels)


G = TypeVar("G", bound=GanParams)


class GanMethod(Method[State, G]):
    """A multi-path generator taught by clients' discriminators, then FedAvg on more data."""

    shares = "gradients with respect to generated images"
    conditional: ClassVar[bool] = False

    def reported(self, params: Any) -> Sequence[Reported]:
        """Where the generator is from, and how its images got their labels."""
        return REPORTED

    def check(self, env: Env[G]) -> None:
        """Refuses what are no images of the right size, and labels by an untrained classifier."""
        size = env.params.size
        if env.bounds is None or len(env.shape) != 3 or max(env.shape[1:]) > size:
            raise ConfigError(
                f"{self.name} makes images of up to {size}x{size}, but samples are {'x'.join(map(str, env.shape))}"
                f"{' signals' if env.bounds is None else ''}; choose another --dataset, or params.size=64"
            )

    # Networks

    def generator(self, env: Env[G]) -> nn.Module:
        """All paths with their initial weights."""
        p = env.params
        noise_dim = p.noise_dim + (env.num_classes if self.conditional else 0)
        make = lambda: GeneratorPath(env.shape[0], noise_dim, p.size, p.width)  # noqa: E731
        return env.build("mpgan-generator", lambda: MultiPath(p.paths, make))

    def discriminator(self, env: Env[G]) -> nn.Module:
        """A client's, with its initial weights: everybody's are the same."""
        classes = env.num_classes if self.conditional else 0
        make = lambda: Discriminator(env.shape[0], env.params.size, env.params.width, classes)  # noqa: E731
        return env.build("mpgan-discriminator", make)

    def noise(self, env: Env[G], count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor | None]:
        """What the generator makes images of, and their labels if it is conditional, all classes alike."""
        z = torch.from_numpy(rng.standard_normal((count, env.params.noise_dim), np.float32))
        if not self.conditional:
            return z, None
        y = torch.from_numpy(rng.permutation(np.arange(count) + rng.integers(env.num_classes)) % env.num_classes)
        return conditioned(z, y, env.num_classes), y

    # The GAN phase

    def init(self, env: Env[G]) -> State:
        """Both networks' initial weights."""
        none = torch.empty(0, 2, dtype=torch.float64)
        return State(read_tensors(env.model()), read_tensors(self.generator(env)), {}, none, {}, {}, {}, {}, {})

    async def setup(self, state: State, rnd: Round[G]) -> State:
        """Trains the generator, or takes an earlier run's."""
        if rnd.params.gan is not None:
            return await rnd.compute(self._adopt, state, rnd, Path(rnd.params.gan))
        game = await rnd.compute(Game, self, state, rnd)
        for step in range(len(state.losses), rnd.params.steps):
            await _play(game, rnd, step)
            if (step + 1) % rnd.params.save_every == 0 and step + 1 < rnd.params.steps:
                await rnd.save(await rnd.compute(lambda: game.reached(over=False)))
        state = game.reached(over=True)
        rnd.record(**_gan_record(state, rnd.params.save_every))
        return state

    def _adopt(self, state: State, rnd: Round[G], folder: Path) -> State:
        found, source = earlier_state(folder, State, rnd.params.gan_sha256)
        load(self.generator(rnd.env), found.generator)  # says so when it is of another shape
        told = "the bytes and the feedback of its GAN phase are in that run's ledgers"
        rnd.record(gan_from=source | {"steps": len(found.losses), "note": told})
        return replace(
            state,
            generator=found.generator,
            losses=found.losses,
            last_steps=found.last_steps,
            sheets=found.sheets,
        )

    @on(GAN_STEP)
    def gan_step(self, ctx: ClientContext[G], msg: Made) -> Feedback:
        """Takes a step of the client's own discriminator, then has it judge the same images."""
        judge, optimizer = self._player(ctx)
        real, real_y = self._real(ctx, msg.images.shape[1])
        made, made_y = msg.images.to(ctx.device), None if msg.labels is None else msg.labels.to(ctx.device)
        optimizer.zero_grad(set_to_none=True)
        loss = judge_loss(judge, real, made, ctx.params.smoothing, real_y, made_y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        gradient, generator_loss = feedback_on(judge, made, made_y)
        values = packed(judge, optimizer)
        ctx.cache[_PLAYER] = Live(judge, optimizer, values)
        ctx.store.put(_PLAYER, Player(values))
        return Feedback(gradient.cpu(), float(loss.detach()), generator_loss)

    def _player(self, ctx: ClientContext[G]) -> tuple[nn.Module, torch.optim.Adam]:
        """This client's discriminator and its Adam, as they are in the store: those in memory, where they are equal."""
        kept = ctx.store.get(_PLAYER, Player)
        live: Live | None = ctx.cache.pop(_PLAYER, None)  # from here on they change, and count once the step is over
        if kept and live and torch.equal(live.values, kept.values):
            return live.judge, live.optimizer
        judge = self.discriminator(ctx.env).to(ctx.device).train()
        optimizer = adam(judge, ctx.params.lr)
        if kept:
            unpack(judge, optimizer, kept.values)
        return judge, optimizer

    def _real(self, ctx: ClientContext[G], count: int) -> tuple[Tensor, Tensor | None]:
        """A batch of own images; of fewer examples than that, some come twice."""
        data = ctx.data.train
        index = ctx.rng("real").choice(len(data), count, replace=len(data) < count)
        x, y = data.batch(index)
        return Canvas(ctx.env).on(x).to(ctx.device), y.to(ctx.device) if self.conditional else None

    # Labelling

    def labelled_by(self, params: G) -> str:
        """Where labels come from, for the records."""
        raise NotImplementedError

    async def judge(self, state: State, rnd: Round[G]) -> Judge:
        """Who labels images, whatever they were made for."""
        raise NotImplementedError

    async def _augment(self, state: State, rnd: Round[G]) -> State:
        """Gives the cohort what it lacks of the levels that have begun."""
        told: dict[str, Any] = {}
        for index in range(rnd.params.num_levels(rnd.index)):
            if index not in state.made:
                pool = await self._pool(state, rnd, index)
                # A classifier that is sure of two images would have everybody learn these two a hundred times over.
                enough = 0 < len(pool.y) >= rnd.params.min_pool * pool.num_wanted
                given = "yes" if enough else "no: too few" if pool.num_wanted else "none wanted"
                words = {"labels_by": self.labelled_by(rnd.params), "given_out": given}
                told[str(index)] = pool.record(rnd.env.num_classes) | words
                if enough:
                    made, labels = state.made | {index: pool.x}, state.labels | {index: pool.y}
                    state = replace(state, made=made, labels=labels)
            if index in state.made:
                state = replace(state, given=await _give(state, rnd, index))
        if told:
            rnd.record(labelling=told)
        return state

    async def _pool(self, state: State, rnd: Round[G], index: int) -> Labelled:
        """Labelled images for one level: as many as the client with the most examples needs."""
        wanted = max(added(rnd.params.levels, index, count) for count in rnd.env.num_examples())
        if not wanted:
            return Labelled(torch.empty(0, *rnd.env.shape), torch.empty(0, dtype=torch.int64), 0, 0, 0)
        judge = await self.judge(state, rnd)

        def work() -> Labelled:
            made = self.candidates(state, rnd.env, rnd.rng("pool", index), rnd.device)
            limit = wanted * rnd.params.max_candidates
            return accepted((judge(x, y) for x, y in made), wanted, rnd.env.num_classes, limit)

        return await rnd.compute(work)

    def candidates(
        self, state: State, env: Env[G], rng: np.random.Generator, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Images of all paths without end, as inputs, with the labels that a conditional generator was given."""
        generator, canvas = self.generator(env).to(device), Canvas(env)
        load(generator, state.generator)
        generator.eval()
        while True:
            z, y = self.noise(env, _POOL_BATCH, rng)
            with torch.no_grad():
                images = canvas.off(generator(z.to(device)).cpu())
            yield images.flatten(0, 1), None if y is None else y.repeat(len(images))

    @on(AUGMENT)
    def keep(self, ctx: ClientContext[G], msg: Portion) -> Nothing:
        """Keeps images to train on."""
        ctx.store.put(_key(msg.level), msg)
        return Nothing()

    # FedAvg

    async def round(self, state: State, rnd: Round[G]) -> State:
        """Gives out images where they are due, then asks the cohort to train and averages."""
        state = await self._augment(state, rnd)
        return replace(state, weights=(await FedAvg().round(Global(state.weights), rnd)).weights)

    @on(FIT)
    def fit(self, ctx: ClientContext[G], msg: Global) -> Update:
        """Trains the received model on own and generated images."""
        data = ctx.data.train
        for index in range(len(ctx.params.levels)):
            kept = ctx.store.get(_key(index), Portion)
            data = data if kept is None else data + Examples.of(kept.x, kept.y)
        model = ctx.model()
        load(model, msg.weights)
        report = ctx.train(model, cross_entropy, data=data)
        return Update(**release_update(ctx, model, report))

    def model(self, state: State) -> Tensors:
        """The global classifier."""
        return state.weights

    def cost(self, shapes: Shapes[G]) -> Cost:
        """FedAvg's; 4 P b d_x both ways for each GAN step of each client; each image and its label once."""
        env, p, cost = shapes.env, shapes.env.params, FedAvg().cost(shapes)
        steps = 0 if p.gan else p.steps * min(env.cohort_size, sum(count > 0 for count in shapes.num_examples))
        batch_bytes = 4 * p.paths * p.batch * env.shape[0] * p.size**2
        cost.add("down", Kind.IMAGES, steps * (batch_bytes + (8 * p.batch if self.conditional else 0)))
        cost.add("up", Kind.FEEDBACK, steps * batch_bytes)
        cost.add("up", Kind.SCALARS, steps * 16)
        given: set[tuple[int, ClientId]] = set()
        for index, cohort in enumerate(shapes.cohorts):
            given |= {(level, client) for level in range(p.num_levels(index)) for client in cohort}
        sizes = [added(p.levels, level, shapes.num_examples[client]) for level, client in given]
        cost.add("down", Kind.IMAGES, sum(sizes) * (4 * shapes.sample_floats + 8))
        return cost.add("down", Kind.SCALARS, 8 * sum(size > 0 for size in sizes))

    def pictures(self, state: State, env: Env[G], count: int, rng: np.random.Generator) -> Pictures:
        """What each path makes, how that came about, and the images that clients were given."""
        images, _ = next(self.candidates(state, env, rng, torch.device("cpu")))
        by_path = images.reshape(env.params.paths, -1, *env.shape)[:, :count]
        canvas = Canvas(env)
        progress = {f"step {step}": canvas.off(x.float() / 127.5 - 1).flatten(0, 1) for step, x in state.sheets.items()}
        pools = (torch.cat(list(state.made.values())), torch.cat(list(state.labels.values()))) if state.made else None
        return Pictures({f"path {number}": x for number, x in enumerate(by_path)}, progress, pools)


def _key(level: int) -> str:
    return f"made-{level}"


async def _play(game: Game, rnd: Round[Any], step: int) -> None:
    """One step: one message for the whole cohort, encoded once."""
    generation, message = await rnd.compute(game.make, step)
    losses, heard = [], list[Tensor]()
    async for reply in rnd.ask(GAN_STEP, dict.fromkeys(game.cohort(step), message)):
        heard.append(reply.body.images.clone())
        if len(heard) * heard[0].nbytes >= _HEARD_BYTES:  # small ones together: a hop to the thread costs more
            await rnd.compute(generation.add, *heard)
            heard = []
        losses.append((reply.body.judge_loss, reply.body.generator_loss))
        game.last_steps[reply.client] = step
    await rnd.compute(game.learn, step, generation, losses, heard)


def _gan_record(state: State, every: int) -> dict[str, Any]:
    """Losses as means over so many steps, and when each discriminator was last trained."""
    windows = [window.mean(dim=0).tolist() for window in torch.split(state.losses, every)] if len(state.losses) else []
    return {
        "gan_steps": len(state.losses),
        "gan_losses_every": every,
        "discriminator_losses": [window[0] for window in windows],
        "generator_losses": [window[1] for window in windows],
        "discriminator_last_steps": state.last_steps,
    }


async def _give(state: State, rnd: Round[Any], index: int) -> dict[int, int]:
    """Sends one level's images to those of the cohort who lack only them; how many levels each client then holds."""
    lacking = [client for client in rnd.cohort if state.given.get(client, 0) == index]
    sizes = {client: added(rnd.params.levels, index, rnd.env.num_examples()[client]) for client in lacking}
    x, y = state.made[index], state.labels[index]
    messages = {}
    for client, size in sizes.items():
        if size:
            # The level counts too, so that a rise of A_f draws from the new pool independently.
            rows = torch.from_numpy(drawn(len(y), size, rnd.rng(f"assign-{index}", client)))
            messages[client] = Portion(index, x[rows], y[rows])
    holding = {client for client, size in sizes.items() if not size}
    if messages:
        holding |= {reply.client async for reply in rnd.ask(AUGMENT, messages, quorum=0)}
        rnd.record(**{f"given_{index}": {client: sizes[client] for client in sorted(holding)}})
    return state.given | dict.fromkeys(sorted(holding), index + 1)


class MpGanParams(GanParams):
    """How images get their labels."""

    labels: Literal["pseudo", "oracle"] = Field("pseudo", description="oracle sees all raw data: for comparison")
    tau: float = Field(0.9, ge=0, le=1, description="least confidence in a label")
    oracle_epochs: int = Field(5, ge=1)


@register
class MpGan(GanMethod[MpGanParams]):
    """MP-GAN, whose images are labelled by a classifier."""

    name = "mpgan"
    dp_sgd = refused("discriminators have a training loop of their own, and their feedback would leave uncovered")

    def caveat(self, params: MpGanParams) -> str:
        """Says so when labels come from the oracle."""
        return ORACLE if params.labels == "oracle" else ""

    def check(self, env: Env[MpGanParams]) -> None:
        """Refuses labels by an untrained classifier, too."""
        super().check(env)
        if env.params.labels == "pseudo" and not env.params.warm_up and env.params.a_f != "0":
            raise ConfigError("params.labels=pseudo needs a trained classifier; set params.warm_up to 1 or more")

    def labelled_by(self, params: MpGanParams) -> str:
        """Where labels come from, for the records."""
        return ORACLE if params.labels == "oracle" else "the global classifier"

    async def judge(self, state: State, rnd: Round[MpGanParams]) -> Judge:
        """Who labels images, whatever they were made for."""
        if rnd.params.labels == "oracle":
            classifier = await rnd.oracle(rnd.params.oracle_epochs)
        else:
            classifier = rnd.model()
            load(classifier, state.weights)
        by_classifier = judged_by(classifier, rnd.params.tau, rnd.device)
        return lambda x, y: by_classifier(x)
