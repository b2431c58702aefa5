"""MP-GAN: its parameters, what travels in which phase, and what stays on the server and on a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator
from torch import Tensor

from fedrpc.methods.blocks.pool import Nothing
from fedrpc.methods.method import Params, Phase
from fedrpc.methods.mpgan.schedule import Level, parse_schedule
from fedrpc.methods.tools import ReportedValue
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part

REPORTED = (
    ReportedValue("gan_from.run_id", "generator of run", why="gan_from.note"),
    ReportedValue(
        "labelling",
        "labelling",
        "images for clients, a row for each level of A_f",
        columns={
            "key": "level",
            "labels_by": "labels by",
            "candidates": "generated",
            "acceptance_rate": "share confident",
            "wanted": "wanted",
            "kept": "kept",
            "given_out": "given out",
            "label_histogram": "kept by class",
        },
    ),
)
PERFECT = "clients get real images that no client holds in place of generated ones: for comparison only"
ORACLE = "labels of generated images come from an oracle that sees all raw data: for comparison only, not private"
SHARED = "clients share a discriminator: the server and other clients get what one client's images taught it"


class GanParams(Params):
    """What both variants have; defaults are those of the thesis's code where it has any."""

    paths: int = Field(4, ge=1, description="generators side by side; 1 is the ablation")
    steps: int = Field(600, ge=0, description="steps of the GAN phase")
    batch: int = Field(50, ge=2, description="images of each path in a step, and real images beside them")
    noise_dim: int = Field(128, ge=1, description="length of the generator's noise")
    width: int = Field(64, ge=1, description="width of both networks; DCGAN's is 64")
    size: Literal[32, 64] = Field(32, description="side of generated images")
    lr: float = Field(2e-4, gt=0, description="learning rate of both Adam optimizers")
    smoothing: float = Field(0.9, gt=0, le=1, description="the discriminator's target for real images")
    diversity: float = Field(0.0, ge=0, description="weight of a term at the server that pushes paths apart")
    cohort_steps: int = Field(
        12, ge=1, description="steps with the same clients, after which a shared discriminator comes back"
    )
    discriminators: Literal["own", "shared"] = Field(
        "own", description="shared: one for all, which travels from cohort to cohort, as in the thesis's code"
    )
    save_every: int = Field(20, ge=1, description="steps between durable points; clients keep all versions until then")
    sheet_every: int = Field(100, ge=1, description="steps between pictures of the training")
    gan: str | None = Field(None, description="a run directory whose GAN phase is over, to take the generator from")
    gan_sha256: str | None = Field(None, description="SHA-256 of that run's checkpoint; any other is refused")
    a_f: str = Field("0.1", description='generated images for each real one: "0.1", or "0.01,100:0.1" for a rise')
    warm_up: int = Field(10, ge=0, description="rounds of plain FedAvg before any image is distributed")
    min_pool: float = Field(0.25, ge=0, le=1, description="least share of the wanted images to distribute any")
    max_candidates: int = Field(20, ge=1, description="images generated, at most, for each one that is wanted")

    @field_validator("a_f", mode="before")
    @classmethod
    def _check_a_f(cls, value: Any) -> str:
        text = value if isinstance(value, str) else repr(value)
        parse_schedule(text)
        return text

    @property
    def levels(self) -> tuple[Level, ...]:
        """The schedule of A_f."""
        return parse_schedule(self.a_f)

    def find_first_step(self, step: int) -> int:
        """The first step with the same cohort as this one."""
        return step - step % self.cohort_steps

    def is_returned_after(self, step: int) -> bool:
        """Whether the cohort of a step gives the shared discriminator back, for that of the next step."""
        return self.discriminators == "shared" and (step + 1) % self.cohort_steps == 0 and step + 1 < self.steps

    def count_levels(self, round_index: int) -> int:
        """The number of levels that have begun in a round."""
        return sum(max(level.start, self.warm_up) <= round_index for level in self.levels)


class MpGanParams(GanParams):
    """Where images come from, and how they get their labels."""

    images: Literal["generated", "held-out"] = Field(
        "generated", description="held-out: real images that nobody has instead, the most that any generator could give"
    )
    labels: Literal["pseudo", "oracle"] = Field("pseudo", description="oracle sees all raw data: for comparison")
    tau: float = Field(0.9, ge=0, le=1, description="least confidence in a label")
    oracle_epochs: int = Field(5, ge=1, description="epochs of the oracle's training")


# What travels


@dataclass(frozen=True)
class GeneratedImages:
    """Down: a batch of every path (paths, batch, channels, size, size).

    Attributes:
        labels: If the generator is conditional.
        discriminator: A shared one, for clients that did not answer the step before with the same cohort.
    """

    images: Tensor = part(Kind.IMAGES)
    labels: Tensor | None = part(Kind.IMAGES, default=None)
    discriminator: Tensors | None = part(Kind.WEIGHTS, default=None)


@dataclass(frozen=True)
class Feedback:
    """Up: the generator loss's gradient with respect to the images, and both losses."""

    images: Tensor = part(Kind.FEEDBACK)
    judge_loss: float = part(Kind.SCALARS)
    generator_loss: float = part(Kind.SCALARS)


@dataclass(frozen=True)
class ReturnRequest:
    """Down, after a cohort's last step: asks for the shared discriminator.

    Attributes:
        first_step: The cohort's first step.
        losses: Of its last one, as means over the clients. They tell this question from that of an earlier attempt at
            these steps in which other clients answered: an answer to that one must not stand for this.
    """

    first_step: int = part(Kind.SCALARS)
    losses: Tensor = part(Kind.SCALARS)


@dataclass(frozen=True)
class TrainedDiscriminator:
    """Up, after a cohort's last step: the shared discriminator as the client has trained it."""

    discriminator: Tensors = part(Kind.WEIGHTS, averaged_by=lambda _: 1.0)


@dataclass(frozen=True)
class LabelledPortion:
    """Down: images with labels for one client, of one level of A_f. The client stores them as they are."""

    level: int = part(Kind.SCALARS)
    x: Tensor = part(Kind.IMAGES)
    y: Tensor = part(Kind.IMAGES)


GAN_STEP = Phase("gan_step", GeneratedImages, Feedback, same=("images",))
GAN_RETURN = Phase("gan_return", ReturnRequest, TrainedDiscriminator)
AUGMENT = Phase("augment", LabelledPortion, Nothing)


# What stays


@dataclass(frozen=True)
class State:
    """The server's state.

    Attributes:
        moments: Adam's moments of the generator, while it is trained.
        losses: Discriminator and generator loss of each step, means over clients.
        last_steps: By client, the step in which it last trained a discriminator.
        sheets: Pictures of the training by step, as bytes.
        made: Pools of images by level of A_f, as clients train on them.
        labels: Their labels.
        given: By client, the number of levels that it holds.
        discriminator: The shared one, while there is one and the generator is trained.
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
    discriminator: Tensors | None = part(Kind.WEIGHTS, default=None)


@dataclass(frozen=True)
class StoredDiscriminator:
    """In a client's store: the discriminator with the client's Adam, as `gan.pack` lays them out.

    Attributes:
        first_step: The first step with the cohort in which it was trained last.
    """

    values: Tensor
    first_step: int = 0


DISCRIMINATOR = "discriminator"  # its key in a client's store


def build_portion_key(level: int) -> str:
    """The key of a level's images in a client's store."""
    return f"made-{level}"
