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

    mode: Literal["paper", "private"] = Field("paper", description="as published, or with noise that gives a guarantee")
    vae: Literal["paper", "code"] = Field("paper", description="auto-encoder of its tables, or of the authors' code")
    preliminary: int = Field(20, ge=0, description="rounds before means are shared; the paper: 40 % of a run")
    lam: float = Field(0.05, ge=0, description="weight of divergence and reconstruction in preliminary rounds")
    alpha: int = Field(50, ge=0, description="noisy means of each class; 0 shares nothing")
    sigma: float = Field(3.0, ge=0, description="standard deviation of the noise on every coordinate")
    n: int = Field(3, ge=1, description="classes that a client names")
    m: int = Field(100, ge=1, description="latent vectors averaged into a mean: exact in private mode, else assumed")
    clip: float | None = Field(None, gt=0, description="largest norm of a latent vector in private mode; or chosen")
    tries: int = Field(200, ge=1, description="most tries, of alpha copies each, for a class in paper mode")
    sync_decoder: bool = Field(False, description="average decoders in every preliminary round")

    @property
    def filters(self) -> bool:
        """Whether clients filter their own means, for which they need the decoder."""
        return self.mode == "paper"

    @property
    def least(self) -> int:
        """The least number of examples of a class that is shared."""
        return 1 if self.filters else self.m

    def sends_decoder(self, round_index: int) -> bool:
        """Whether clients send their decoders in a preliminary round."""
        return self.sync_decoder or (self.alpha > 0 and round_index == self.preliminary - 1)

    def choose_clip(self, latent: int) -> float:
        """The largest norm of a latent vector in private mode: half of the unit cube's diagonal by default.

        Two such vectors are at most the cube's diagonal apart, with a bound on each value or without one.
        """
        return float(latent**0.5 / 2 if self.clip is None else self.clip)


# What travels


@dataclass(frozen=True)
class PretrainRequest(Global):
    """Down, preliminary: the network, and the decoder where decoders are synchronised."""

    decoder: Tensors | None = part(Kind.WEIGHTS, default=None)


@dataclass(frozen=True)
class PretrainUpdate(Update):
    """Up, preliminary: FedAvg's update, and the decoder in rounds that average it."""

    decoder: Tensors | None = part(Kind.WEIGHTS, default=None, averaged_by="num_examples")


@dataclass(frozen=True)
class ScarceClasses:
    """Up: the classes of which a client has the fewest examples."""

    ids: Tensor = part(Kind.CLASS_ABUNDANCE)


@dataclass(frozen=True)
class FitRequest(Global):
    """Down, secondary: the network; once for each client another's means, with the decoder unless sent before."""

    decoder: Tensors | None = part(Kind.WEIGHTS, default=None)
    means: NoisyMeans | None = None


@dataclass(frozen=True)
class FitUpdate(Update):
    """Up, secondary: FedAvg's update, which counts synthetic examples too, and the number of these."""

    num_synthetic: int = part(Kind.SCALARS)


@dataclass(frozen=True)
class ShareRequest:
    """Down: asks for means; with the decoder where the client needs it and does not have it."""

    decoder: Tensors | None = part(Kind.WEIGHTS, default=None)


@dataclass(frozen=True)
class SharedMeans:
    """Up, once: `alpha` noisy means of each of `n` classes.

    Attributes:
        classes: The client's most abundant classes.
        tried: The number of copies sampled for each of them.
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
        abundant: The abundant classes of each client that has shared.
        latents: Its noisy means.
        labels: Their classes.
        helped: The clients that have received another client's means.
        holders: The clients that have received the decoder.
    """

    decoder: Tensors | None = part(Kind.WEIGHTS)
    abundant: dict[int, Tensor] = part(Kind.CLASS_ABUNDANCE)
    latents: dict[int, Tensor] = part(Kind.LATENT_MEANS)
    labels: dict[int, Tensor] = part(Kind.CLASS_ABUNDANCE)
    helped: list[int] = part(Kind.SCALARS)
    holders: list[int] = part(Kind.SCALARS)


PRETRAIN = Phase("pretrain", PretrainRequest, PretrainUpdate, same=("weights",), check=check_update)
SCARCE = Phase("scarce", Nothing, ScarceClasses)
FIT = Phase("fit", FitRequest, FitUpdate, same=("weights",), check=check_update)
SHARE = Phase("share", ShareRequest, SharedMeans)


# What stays on a client, by key in its store


@dataclass(frozen=True)
class LocalNetworks:
    """`local`: its log-variance head and decoder, in preliminary rounds."""

    logvar: Tensors
    decoder: Tensors


@dataclass(frozen=True)
class StoredWeights:
    """`decoder`: the averaged one. `encoder`: the network to encode with, until the client has shared its means."""

    weights: Tensors


@dataclass(frozen=True)
class SyntheticExamples:
    """`synthetic`: the examples decoded from another client's means."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class SharedMark:
    """`shared`: the round in which it shared its means."""

    round: int
