"""MP-GAN (a thesis on multi-path-generator GANs): clients' discriminators teach a generator, whose images join FedAvg.

Set-up is the GAN phase: in each step the server sends one batch of every path to the cohort, each client takes a step
of its discriminator and returns the gradient of the generator loss with respect to the images, and the server moves
each path along the mean. Rounds are FedAvg, from some round on with floor(A_f n_k) labelled images for client k.

Departs from the thesis and its code:
- Labels come from the global classifier after a warm-up, where it is confident, the same number of each class. The code
  has them from a classifier trained on all clients' raw data: `labels = "oracle"`, for comparison only, and marked so.
- Each client has a discriminator of its own, as the text says; all start equal. In the code all clients share one:
  `discriminators = "shared"`, which goes to a cohort for `cohort_steps` and comes back (the mean of those that were
  trained, where the cohort has several clients), while each client keeps an Adam of its own for it.
- One generator step for the mean over the cohort, not one for each client's batch: clients work at the same time.
- Images are 32x32 (the code: 64x64) in [-1, 1], whatever the run's normalisation is; smaller ones are padded with the
  least value. The target for real images is 0.9.
- Each client has images of its own, sampled at random; in the code all have the same 48.
- No head that tells paths apart: its weight in the code is 0. `diversity` pushes paths apart at the server instead.

`images = "held-out"` is the control with perfect images: real ones that no client holds, with their true labels, and no
GAN phase.

Where the thesis is silent: `warm_up`, `tau`, and that a client samples a new real batch in each step. A pool that came
out smaller than a client's share is repeated for it; one below `min_pool` of the wanted size is not distributed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedrpc.data.examples import Examples
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.earlier import load_earlier_state
from fedrpc.methods.blocks.generation import append_label
from fedrpc.methods.blocks.pool import Nothing
from fedrpc.methods.blocks.updates import release_update
from fedrpc.methods.fedavg import FIT, FedAvg, Global, Update
from fedrpc.methods.method import ClientContext, ClientId, Cost, Env, Method, Round, Shapes, on, refused, register
from fedrpc.methods.mpgan.augment import (
    Candidates,
    LabelledPool,
    Labeller,
    build_labeller,
    collect_pool,
    distribute_level,
    iterate_real,
)
from fedrpc.methods.mpgan.client import load_discriminator, require_shared, sample_real, save_discriminator
from fedrpc.methods.mpgan.game import Canvas, Game, build_gan_record, play_step
from fedrpc.methods.mpgan.gan import MultiPath, compute_feedback, discriminator_loss
from fedrpc.methods.mpgan.messages import (
    AUGMENT,
    GAN_RETURN,
    GAN_STEP,
    ORACLE,
    PERFECT,
    REPORTED,
    SHARED,
    Feedback,
    GanParams,
    GeneratedImages,
    LabelledPortion,
    MpGanParams,
    ReturnRequest,
    State,
    TrainedDiscriminator,
    build_portion_key,
)
from fedrpc.methods.mpgan.schedule import count_added_images
from fedrpc.methods.tools import Pictures, ReportedValue
from fedrpc.models.dcgan import Discriminator, GeneratorPath
from fedrpc.models.state import count_payload_bytes, load, read_tensors
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors

_POOL_BATCH = 100  # images of each path at a time, when a pool is generated

G = TypeVar("G", bound=GanParams)


class GanMethod(Method[State, G]):
    """What both variants share: a multi-path generator taught by clients' discriminators, then FedAvg on more data."""

    shares = "gradients with respect to generated images"
    conditional: ClassVar[bool] = False

    def report_values(self, params: Any) -> Sequence[ReportedValue]:
        """Where the generator is from, and how its images got their labels."""
        return REPORTED

    def check(self, env: Env[G]) -> None:
        """Refuses data that are no images of the right size."""
        size = env.params.size
        shape = "x".join(map(str, env.shape))
        if env.bounds is None or len(env.shape) != 3:
            raise ConfigError(
                f"{self.name} generates images, but examples are signals or rows of a table, of {shape} values; choose "
                "another --dataset or another --method"
            )
        if max(env.shape[1:]) > size:
            raise ConfigError(
                f"{self.name} generates images of up to {size}x{size}, but examples are {shape}; choose another "
                "--dataset, or params.size=64"
            )

    # Networks

    def build_generator(self, env: Env[G]) -> nn.Module:
        """All paths with their initial weights."""
        p = env.params
        noise_dim = p.noise_dim + (env.num_classes if self.conditional else 0)
        build = lambda: GeneratorPath(env.shape[0], noise_dim, p.size, p.width)  # noqa: E731
        return env.build("mpgan-generator", lambda: MultiPath(p.paths, build))

    def build_discriminator(self, env: Env[G]) -> nn.Module:
        """A client's discriminator with its initial weights, which are the same for all clients."""
        classes = env.num_classes if self.conditional else 0
        build = lambda: Discriminator(env.shape[0], env.params.size, env.params.width, classes)  # noqa: E731
        return env.build("mpgan-discriminator", build)

    def sample_noise(self, env: Env[G], count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor | None]:
        """The generator's input, and the labels in it if it is conditional, all classes equally often."""
        z = torch.from_numpy(rng.standard_normal((count, env.params.noise_dim), np.float32))
        if not self.conditional:
            return z, None
        y = torch.from_numpy(rng.permutation(np.arange(count) + rng.integers(env.num_classes)) % env.num_classes)
        return append_label(z, y, env.num_classes), y

    # The GAN phase

    def init(self, env: Env[G]) -> State:
        """Both networks' initial weights."""
        none = torch.empty(0, 2, dtype=torch.float64)
        return State(read_tensors(env.model()), read_tensors(self.build_generator(env)), {}, none, {}, {}, {}, {}, {})

    async def setup(self, state: State, rnd: Round[G]) -> State:
        """Trains the generator, or takes an earlier run's."""
        if self.takes_real(rnd.params):
            rnd.held_out()  # raises where there are none, before any round
            return state
        if rnd.params.gan is not None:
            return await rnd.compute(self._adopt_generator, state, rnd, Path(rnd.params.gan))
        game = await rnd.compute(Game, self, state, rnd)
        for step in range(len(state.losses), rnd.params.steps):
            await play_step(game, rnd, step)
            if (step + 1) % rnd.params.save_every == 0 and step + 1 < rnd.params.steps:
                await rnd.save(await rnd.compute(lambda: game.build_state(over=False)))
        state = game.build_state(over=True)
        rnd.record(**build_gan_record(state, rnd.params.save_every))
        return state

    def _adopt_generator(self, state: State, rnd: Round[G], folder: Path) -> State:
        found, source = load_earlier_state(folder, State, rnd.params.gan_sha256, rnd.env.validation)
        load(self.build_generator(rnd.env), found.generator)  # raises when it is of another shape
        note = "the bytes of its GAN phase, and what clients gave away in it, are in that run's ledgers"
        rnd.record(gan_from=source | {"steps": len(found.losses), "note": note})
        return replace(
            state,
            generator=found.generator,
            losses=found.losses,
            last_steps=found.last_steps,
            sheets=found.sheets,
        )

    @on(GAN_STEP)
    def gan_step(self, ctx: ClientContext[G], msg: GeneratedImages) -> Feedback:
        """Takes a step of the discriminator, then computes its feedback on the same images."""
        if ctx.params.discriminators == "shared" and msg.discriminator is None:
            require_shared(ctx, ctx.params.find_first_step(ctx.step))
        discriminator, optimizer = load_discriminator(ctx, lambda: self.build_discriminator(ctx.env))
        if msg.discriminator is not None:
            load(discriminator, msg.discriminator)
        real, y = sample_real(ctx, msg.images.shape[1])
        real_y = y if self.conditional else None
        generated, generated_y = msg.images.to(ctx.device), None if msg.labels is None else msg.labels.to(ctx.device)
        optimizer.zero_grad(set_to_none=True)
        loss = discriminator_loss(discriminator, real, generated, ctx.params.smoothing, real_y, generated_y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        gradient, generator_loss = compute_feedback(discriminator, generated, generated_y)
        save_discriminator(ctx, discriminator, optimizer)
        return Feedback(gradient.cpu(), float(loss.detach()), generator_loss)

    @on(GAN_RETURN)
    def return_discriminator(self, ctx: ClientContext[G], msg: ReturnRequest) -> TrainedDiscriminator:
        """Gives the shared discriminator back."""
        require_shared(ctx, msg.first_step)
        discriminator, _ = load_discriminator(ctx, lambda: self.build_discriminator(ctx.env))
        return TrainedDiscriminator(read_tensors(discriminator))

    def describe_caveat(self, params: G) -> str:
        """Says that clients share a discriminator, if one ever comes back."""
        comes_back = any(map(params.is_returned_after, range(self.count_steps(params)[GAN_STEP.name])))
        return SHARED if comes_back else ""

    # Labelling

    def takes_real(self, params: G) -> bool:
        """Whether clients get real images instead of generated ones."""
        return False

    def name_labeller(self, params: G) -> str:
        """Where labels come from, for the records."""
        raise NotImplementedError

    async def prepare_labeller(self, state: State, rnd: Round[G]) -> Labeller:
        """The labeller of generated images."""
        raise NotImplementedError

    async def _augment(self, state: State, rnd: Round[G]) -> State:
        """Gives the cohort the images that it lacks of the levels that have begun."""
        labelling: dict[str, Any] = {}
        for index in range(rnd.params.count_levels(rnd.index)):
            if index not in state.made:
                pool = await self._generate_pool(state, rnd, index)
                # Of two confident images every client would train on hundreds of copies.
                enough = 0 < len(pool.y) >= rnd.params.min_pool * pool.num_wanted
                given = "yes" if enough else "no: too few" if pool.num_wanted else "none wanted"
                origin = {"labels_by": self.name_labeller(rnd.params), "given_out": given}
                labelling[str(index)] = pool.build_record(rnd.env.num_classes) | origin
                if enough:
                    made, labels = state.made | {index: pool.x}, state.labels | {index: pool.y}
                    state = replace(state, made=made, labels=labels)
            if index in state.made:
                state = replace(state, given=await distribute_level(state, rnd, index))
        if labelling:
            rnd.record(labelling=labelling)
        return state

    async def _generate_pool(self, state: State, rnd: Round[G], index: int) -> LabelledPool:
        """Labelled images for one level: as many as the client with the most examples needs."""
        wanted = max(count_added_images(rnd.params.levels, index, count) for count in rnd.env.num_examples())
        if not wanted:
            return LabelledPool(torch.empty(0, *rnd.env.shape), torch.empty(0, dtype=torch.int64), 0, 0, 0)
        candidates = await self._list_candidates(state, rnd, index)
        limit = wanted * rnd.params.max_candidates
        return await rnd.compute(collect_pool, candidates, wanted, rnd.env.num_classes, limit)

    async def _list_candidates(self, state: State, rnd: Round[G], index: int) -> Iterator[Candidates]:
        """Endless batches of labelled images for one level."""
        rng = rnd.rng("pool", index)
        if self.takes_real(rnd.params):
            return iterate_real(rnd.held_out(), rng)
        label = await self.prepare_labeller(state, rnd)
        return (label(x, y) for x, y in self.generate_inputs(state, rnd.env, rng, rnd.device))

    def generate_inputs(
        self, state: State, env: Env[G], rng: np.random.Generator, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Endless batches of all paths as inputs, with the labels that a conditional generator was given."""
        generator, canvas = self.build_generator(env).to(device), Canvas(env)
        load(generator, state.generator)
        generator.eval()
        while True:
            z, y = self.sample_noise(env, _POOL_BATCH, rng)
            with torch.no_grad():
                images = canvas.to_inputs(generator(z.to(device)).cpu())
            yield images.flatten(0, 1), None if y is None else y.repeat(len(images))

    @on(AUGMENT)
    def store_portion(self, ctx: ClientContext[G], msg: LabelledPortion) -> Nothing:
        """Keeps images to train on."""
        ctx.store.put(build_portion_key(msg.level), msg)
        return Nothing()

    # FedAvg

    async def round(self, state: State, rnd: Round[G]) -> State:
        """Distributes images where they are due, then asks the cohort to train and averages."""
        state = await self._augment(state, rnd)
        return replace(state, weights=(await FedAvg().round(Global(state.weights), rnd)).weights)

    def count_most_examples(self, env: Env[G], client: ClientId) -> int:
        """The client's own images, and those of all levels."""
        own = env.num_examples()[client]
        return own + env.params.levels[-1].count_images(own)

    @on(FIT)
    def fit(self, ctx: ClientContext[G], msg: Global) -> Update:
        """Trains the received model on the client's own and on generated images."""
        data = ctx.data.train
        for index in range(len(ctx.params.levels)):
            kept = ctx.store.get(build_portion_key(index), LabelledPortion)
            data = data if kept is None else data + Examples.of(kept.x, kept.y)
        model = ctx.model()
        load(model, msg.weights)
        report = ctx.train(model, cross_entropy, data=data)
        return Update(**release_update(ctx, model, report))

    def model(self, state: State) -> Tensors:
        """The global classifier."""
        return state.weights

    def count_steps(self, params: G) -> Mapping[str, int]:
        """The steps of the GAN phase, if this run has one."""
        return {GAN_STEP.name: 0 if params.gan or self.takes_real(params) else params.steps}

    def cost(self, shapes: Shapes[G]) -> Cost:
        """FedAvg's; 4 P b d_x both ways for each GAN step of each client; each image and its label once.

        A shared discriminator goes down to each cohort of the GAN phase, and up but from the last.
        """
        env, p, cost = shapes.env, shapes.env.params, FedAvg().cost(shapes)
        asked = min(env.cohort_size, sum(count > 0 for count in shapes.num_examples))
        steps = self.count_steps(p)[GAN_STEP.name] * asked
        batch_bytes = 4 * p.paths * p.batch * env.shape[0] * p.size**2
        cost.add("down", Kind.IMAGES, steps * (batch_bytes + (8 * p.batch if self.conditional else 0)))
        cost.add("up", Kind.FEEDBACK, steps * batch_bytes)
        cost.add("up", Kind.SCALARS, steps * 16)
        self._add_discriminators(cost, env, asked)
        given: set[tuple[int, ClientId]] = set()
        for index, cohort in enumerate(shapes.cohorts):
            given |= {(level, client) for level in range(p.count_levels(index)) for client in cohort}
        sizes = [count_added_images(p.levels, level, shapes.num_examples[client]) for level, client in given]
        # At most: a pool below `min_pool` is not distributed.
        cost.add("down", Kind.IMAGES, sum(sizes) * (4 * shapes.sample_floats + 8), at_most=True)
        return cost.add("down", Kind.SCALARS, 8 * sum(size > 0 for size in sizes), at_most=True)

    def _add_discriminators(self, cost: Cost, env: Env[G], asked: int) -> None:
        steps = self.count_steps(env.params)[GAN_STEP.name]
        if env.params.discriminators == "own" or not steps:
            return
        size = count_payload_bytes(read_tensors(self.build_discriminator(env)))
        returned = sum(map(env.params.is_returned_after, range(steps)))
        cost.add("down", Kind.WEIGHTS, (returned + 1) * asked * size)
        cost.add("up", Kind.WEIGHTS, returned * asked * size)
        cost.add("down", Kind.SCALARS, returned * asked * 24)

    def generate_pictures(self, state: State, env: Env[G], count: int, rng: np.random.Generator) -> Pictures | None:
        """Fresh images of each path, pictures of the training, and the images that clients were given."""
        if self.takes_real(env.params):
            return None
        images, _ = next(self.generate_inputs(state, env, rng, torch.device("cpu")))
        by_path = images.reshape(env.params.paths, -1, *env.shape)[:, :count]
        canvas, sheets = Canvas(env), state.sheets
        progress = {f"step {step}": canvas.to_inputs(x.float() / 127.5 - 1).flatten(0, 1) for step, x in sheets.items()}
        pools = (torch.cat(list(state.made.values())), torch.cat(list(state.labels.values()))) if state.made else None
        return Pictures({f"path {number}": x for number, x in enumerate(by_path)}, progress, pools)


@register
class MpGan(GanMethod[MpGanParams]):
    """MP-GAN, whose images are labelled by a classifier."""

    name = "mpgan"
    dp_sgd = refused("discriminators have a training loop of their own, and their feedback would leave uncovered")

    def describe_caveat(self, params: MpGanParams) -> str:
        """Says that images are real, labels from the oracle, or discriminators shared, if they are."""
        if self.takes_real(params):
            return PERFECT
        told = [ORACLE] if params.labels == "oracle" else []
        return "; ".join([*told, *filter(None, [super().describe_caveat(params)])])

    def takes_real(self, params: MpGanParams) -> bool:
        """Whether clients get real images that nobody has."""
        return params.images == "held-out"

    def check(self, env: Env[MpGanParams]) -> None:
        """Also refuses labels from an untrained classifier."""
        super().check(env)
        needs_classifier = env.params.labels == "pseudo" and not self.takes_real(env.params)
        if needs_classifier and not env.params.warm_up and env.params.a_f != "0":
            raise ConfigError("params.labels=pseudo needs a trained classifier; set params.warm_up to 1 or more")

    def name_labeller(self, params: MpGanParams) -> str:
        """Where labels come from, for the records."""
        if self.takes_real(params):
            return PERFECT
        return ORACLE if params.labels == "oracle" else "the global classifier"

    async def prepare_labeller(self, state: State, rnd: Round[MpGanParams]) -> Labeller:
        """The global classifier, or the oracle."""
        if rnd.params.labels == "oracle":
            classifier = await rnd.oracle(rnd.params.oracle_epochs)
        else:
            classifier = rnd.model()
            load(classifier, state.weights)
        return build_labeller(classifier, rnd.params.tau, rnd.device)
