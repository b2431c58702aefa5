"""FedDPMS: its parameters, what travels in which phase, and what stays on the server and on a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from torch import Tensor

from fedrpc.methods.blocks.pool import Nothing
from fedrpc.methods.fedavg import Global, Update, check_update
from fedrpc.methods.feddpms.latent_means import NoisyMeans
from fedrpc.methods.method import (
    Params,
    Phase,
)
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part

NAME = "feddpms"


class FedDpmsParams(Params):
    """The paper's values for Fashion-MNIST; it has alpha 200 and sigma 4 for CIFAR-10, and n 10 for CIFAR-100."""

    mode: Literal["paper", "private"] = Field("paper", description="as published, or so that the noise covers")
    preliminary: int = Field(20, ge=0, description="rounds before anything is shared; the paper: 40 % of a run")
    lam: float = Field(0.05, ge=0, description="weight of divergence and reconstruction in these")
    alpha: int = Field(50, ge=0, description="noisy means of each class; 0 shares nothing")
    sigma: float = Field(3.0, ge=0, description="standard deviation of the noise on every coordinate")
    n: int = Field(3, ge=1, description="classes that a client names")
    m: int = Field(100, ge=1, description="latent vectors behind a mean: exactly in private mode, else assumed")
    clip: float | None = Field(None, gt=0, description="largest norm of a latent vector in private mode; or fit")
    tries: int = Field(200, ge=1, description="times alpha draws, at most, for a class in paper mode")
    sync_decoder: bool = Field(False, description="average decoders in every preliminary round")

    @property
    def filters(self) -> bool:
        """Whether clients test their means themselves, for which they need the decoder."""
        return self.mode == "paper"

    @property
    def least(self) -> int:
        """How many examples a class must have to be shared."""
        return 1 if self.filters else self.m

    def sends_decoder(self, round_index: int) -> bool:
        """Whether clients send their decoders in a preliminary round."""
        return self.sync_decoder or (self.alpha > 0 and round_index == self.preliminary - 1)

    def clip_for(self, latent: int) -> float:
        """The largest norm of a latent vector in private mode: half of the cube's diagonal when none is given."""
        return float(latent**0.5 / 2 if self.clip is None else self.clip)


# What travels


@dataclass(frozen=True)
class Start(Global):
    """Down, preliminary: the network, and the decoder where decoders are kept the same."""

    decoder: Tensors | None = part(Kind.WEIGHTS, default=None)


@dataclass(frozen=True)
class Pretrained(Update):
    """Up, preliminary: FedAvg's update, and the decoder when it is asked for."""

    decoder: Tensors | None = part(Kind.WEIGHTS, default=None, averaged_by="num_examples")


@dataclass(frozen=True)
class Classes:
    """Up: the classes that a client has fewest examples of."""

    ids: Tensor = part(Kind.CLASS_ABUNDANCE)


@dataclass(frozen=True)
class Lesson(Global):
    """Down, secondary: the network; once for each client another's means; and the decoder unless it was sent before."""

    decoder: Tensors | None = part(Kind.WEIGHTS, default=None)
    means: NoisyMeans | None = None


@dataclass(frozen=True)
class Trained(Update):
    """Up, secondary: FedAvg's update, which counts synthetic examples too, and how many these are."""

    num_synthetic: int = part(Kind.SCALARS)


@dataclass(frozen=True)
class Invitation:
    """Down: share your means; with the decoder where it is needed for that and was not sent before."""

    decoder: Tensors | None = part(Kind.WEIGHTS, default=None)


@dataclass(frozen=True)
class Shared:
    """Up, once: `alpha` noisy means of each of `n` classes.

    Attributes:
        classes: The client's most abundant classes.
        tried: Draws for each of them.
        reconstruction: Mean squared error of the received decoder on own examples, values in [0, 1].
    """

    means: NoisyMeans
    classes: Tensor = part(Kind.CLASS_ABUNDANCE)
    tried: Tensor = part(Kind.SCALARS)
    reconstruction: float | None = part(Kind.SCALARS, default=None)


@dataclass(frozen=True)
class State(Global):
    """The server's state.

    Attributes:
        decoder: The averaged decoder.
        abundant: By client that has shared, its abundant classes.
        latents: Its noisy means.
        labels: Their classes.
        helped: Who has got another client's means.
        holders: Who has got the decoder.
    """

    decoder: Tensors | None = part(Kind.WEIGHTS)
    abundant: dict[int, Tensor] = part(Kind.CLASS_ABUNDANCE)
    latents: dict[int, Tensor] = part(Kind.LATENT_MEANS)
    labels: dict[int, Tensor] = part(Kind.CLASS_ABUNDANCE)
    helped: list[int] = part(Kind.SCALARS)
    holders: list[int] = part(Kind.SCALARS)


PRETRAIN = Phase("pretrain", Start, Pretrained, same=("weights",), check=check_update)
SCARCE = Phase("scarce", Nothing, Classes)
FIT = Phase("fit", Lesson, Trained, same=("weights",), check=check_update)
SHARE = Phase("share", Invitation, Shared)


# What stays on a client, by key in its store


@dataclass(frozen=True)
class Local:
    """`local`: its log-variance head and decoder, while decoders are not shared."""

    logvar: Tensors
    decoder: Tensors


@dataclass(frozen=True)
class Kept:
    """`decoder`: the averaged one. `encoder`: the network to encode with when asked to share, until then."""

    weights: Tensors


@dataclass(frozen=True)
class Synthetic:
    """`synthetic`: the examples that it made, once."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Done:
    """`shared`: the round in which it shared."""

    round: int
