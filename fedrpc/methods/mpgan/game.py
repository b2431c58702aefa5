"""The server's side of MP-GAN's GAN phase: the generator's steps, their records, and pictures of the training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrpc.methods.method import ClientId, Env, Round
from fedrpc.methods.mpgan.gan import Generation, build_adam
from fedrpc.methods.mpgan.messages import (
    GAN_RETURN,
    GAN_STEP,
    GeneratedImages,
    ReturnRequest,
    State,
    TrainedDiscriminator,
)
from fedrpc.models.state import load, load_optimizer, read_optimizer, read_tensors
from fedrpc.wire.message import Tensors

_BUFFERED_BYTES = 4 << 20  # of feedback that is added at a time
_SHEET_IMAGES = 4  # of each path in a picture of the training


class Networks(Protocol):
    """What the game needs to know of the method that it belongs to."""

    def build_generator(self, env: Env[Any]) -> nn.Module:
        """All paths with their initial weights."""
        ...

    def build_discriminator(self, env: Env[Any]) -> nn.Module:
        """A discriminator with its initial weights."""
        ...

    def sample_noise(self, env: Env[Any], count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor | None]:
        """The generator's input, and its labels if it is conditional."""
        ...


class Canvas:
    """Converts between the run's inputs and the generator's images, which are larger and in [-1, 1]."""

    def __init__(self, env: Env) -> None:
        assert env.bounds is not None, "checked before"
        self._low, self._high = env.bounds
        self._shape, size = env.shape, env.params.size
        self._top, self._left = ((size - side) // 2 for side in env.shape[1:])
        self._bottom, self._right = size - env.shape[1] - self._top, size - env.shape[2] - self._left

    def to_images(self, x: Tensor) -> Tensor:
        """Inputs as the discriminator sees them."""
        scaled = 2 * (x - self._low) / (self._high - self._low) - 1
        return F.pad(scaled, (self._left, self._right, self._top, self._bottom), value=-1.0)

    def to_inputs(self, images: Tensor) -> Tensor:
        """Generated images as inputs."""
        height, width = self._shape[1:]
        cut = images[..., self._top : self._top + height, self._left : self._left + width]
        return self._low + (cut + 1) / 2 * (self._high - self._low)


@dataclass
class Game:
    """The generator while it is trained; building it, `generate`, `finish_step` and `build_state` are heavy work."""

    networks: Networks
    state: State
    rnd: Round
    losses: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = self.networks.build_generator(self.rnd.env).to(self.rnd.device)
        load(self.generator, self.state.generator)
        self.optimizer = build_adam(self.generator, self.rnd.params.lr)
        if self.state.moments:
            load_optimizer(self.optimizer, self.state.moments)
        self.last_steps, self.sheets = dict(self.state.last_steps), dict(self.state.sheets)
        self.discriminator = self.state.discriminator
        if self.rnd.params.discriminators == "shared" and self.discriminator is None:
            self.discriminator = read_tensors(self.networks.build_discriminator(self.rnd.env))

    def select_cohort(self, step: int) -> list[ClientId]:
        """The clients of a step: as many as in a round, sampled every `cohort_steps` among those with examples."""
        having = [client for client, count in enumerate(self.rnd.env.num_examples()) if count]
        size = min(self.rnd.env.cohort_size, len(having))
        rng = self.rnd.rng("gan-cohort", step // self.rnd.params.cohort_steps)
        return having if size == len(having) else sorted(rng.choice(having, size, replace=False).tolist())

    def generate(self, step: int) -> tuple[Generation, GeneratedImages]:
        """Generates one batch of every path, and the message that carries it."""
        z, y = self.networks.sample_noise(self.rnd.env, self.rnd.params.batch, self.rnd.rng("synthesis", step))
        self.generator.train()
        images = self.generator(z.to(self.rnd.device))
        generation = Generation(self.optimizer, images, self.rnd.params.diversity)
        return generation, GeneratedImages(generation.images, y)

    def address(self, step: int, message: GeneratedImages) -> dict[ClientId, GeneratedImages]:
        """The message for each client of a step's cohort, with the shared discriminator for those that may lack it.

        Each of the two is one object, so that it is encoded once.
        """
        cohort = self.select_cohort(step)
        if self.discriminator is None:
            return dict.fromkeys(cohort, message)
        full, begins = replace(message, discriminator=self.discriminator), step == self.rnd.params.find_first_step(step)
        return {client: full if begins or self.last_steps.get(client) != step - 1 else message for client in cohort}

    def ask_back(self, step: int) -> dict[ClientId, ReturnRequest]:
        """The question for the shared discriminator after a cohort's last step."""
        first, losses = self.rnd.params.find_first_step(step), torch.tensor(self.losses[-1], dtype=torch.float64)
        return dict.fromkeys(self.select_cohort(step), ReturnRequest(first, losses))

    def check_returned(self, _: ReturnRequest, answer: TrainedDiscriminator) -> None:
        """Raises ValueError unless a client gave back the tensors that it was sent."""
        if _describe(answer.discriminator) != _describe(self.discriminator or {}):
            raise ValueError("the discriminator that came back has other tensors than the one that was sent")

    def finish_step(
        self, step: int, generation: Generation, losses: list[tuple[float, float]], feedback: list[Tensor]
    ) -> None:
        """Ends a step with the last of its feedback; now and then a picture is kept."""
        generation.add(*feedback)
        generation.learn()
        discriminators, generators = zip(*losses, strict=True) if losses else ((float("nan"),), (float("nan"),))
        self.losses.append((sum(discriminators) / len(discriminators), sum(generators) / len(generators)))
        if (step + 1) % self.rnd.params.sheet_every == 0 or step + 1 == self.rnd.params.steps:
            self.sheets[step + 1] = self._draw_sheet()

    def _draw_sheet(self) -> Tensor:
        z, _ = self.networks.sample_noise(self.rnd.env, _SHEET_IMAGES, self.rnd.rng("sheet"))
        with torch.no_grad():
            images: Tensor = self.generator.eval()(z.to(self.rnd.device)).cpu()
        return ((images + 1) * 127.5).round().to(torch.uint8)

    def build_state(self, *, over: bool) -> State:
        """The state so far; Adam's moments are dropped when the game is over."""
        losses = torch.cat([self.state.losses, torch.tensor(self.losses, dtype=torch.float64).reshape(-1, 2)])
        return replace(
            self.state,
            generator=read_tensors(self.generator),
            moments={} if over else read_optimizer(self.optimizer),
            losses=losses,
            last_steps=dict(self.last_steps),
            sheets=dict(self.sheets),
            discriminator=None if over else self.discriminator,
        )


def _describe(tensors: Tensors) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


async def play_step(game: Game, rnd: Round[Any], step: int) -> None:
    """Plays one step."""
    generation, message = await rnd.compute(game.generate, step)
    losses, feedback = [], list[Tensor]()
    async for reply in rnd.ask(GAN_STEP, game.address(step, message)):
        feedback.append(reply.body.images.clone())
        if len(feedback) * feedback[0].nbytes >= _BUFFERED_BYTES:  # several at a time: a hop to the thread costs more
            await rnd.compute(generation.add, *feedback)
            feedback = []
        losses.append((reply.body.judge_loss, reply.body.generator_loss))
        game.last_steps[reply.client] = step
    await rnd.compute(game.finish_step, step, generation, losses, feedback)
    if rnd.params.is_returned_after(step):
        returned = await rnd.mean(GAN_RETURN, game.ask_back(step), check=game.check_returned)
        if returned.clients:
            game.discriminator = returned.averaged["discriminator"]


def build_gan_record(state: State, every: int) -> dict[str, Any]:
    """The GAN phase in the records: losses as means over `every` steps, and each client's last step."""
    windows = [window.mean(dim=0).tolist() for window in torch.split(state.losses, every)] if len(state.losses) else []
    return {
        "gan_steps": len(state.losses),
        "gan_losses_every": every,
        "discriminator_losses": [window[0] for window in windows],
        "generator_losses": [window[1] for window in windows],
        "discriminator_last_steps": state.last_steps,
    }
