"""FLea: its parameters, what travels in which phase, and the layout of a shared activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import ByteSize, Field
from torch import Tensor, nn

from fedrpc.methods.blocks.pool import Layout
from fedrpc.methods.fedavg import Global, Update, check_update
from fedrpc.methods.method import (
    Env,
    Params,
    Phase,
)
from fedrpc.models import cut, require_stages
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import part

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class FleaParams(Params):
    """The paper's values; it does not say where it cuts, so that is the network's default."""

    alpha: float = Field(0.1, ge=0, le=1, description="share of a client's examples whose activations it shares")
    a: float = Field(2.0, gt=0, description="mix-up weights are sampled from Beta(a, a)")
    lambda1: float = Field(1.0, ge=0, description="weight of the distillation from the received model")
    lambda2: float = Field(3.0, ge=0, description="weight of the distance correlation")
    lambda2_decay: float = Field(
        0.0, ge=0, description="lambda2 falls by this in every round (the authors' code: 0.1) ..."
    )
    lambda2_min: float = Field(1.0, ge=0, description="... down to this, if it starts above it")
    decorrelation: Literal["dcor2", "dcor"] = Field("dcor2", description="equation 8, or its root (the authors' code)")
    split_layer: int | None = Field(None, ge=0, description="the cut; the network's default when left out")
    transport: Literal["float32", "float16", "bfloat16"] = Field("float32", description="dtype of activations")
    max_buffer: ByteSize = Field(ByteSize(1 << 30), gt=0, description="largest buffer in bytes, or like '512MiB'")
    measure: int = Field(32, ge=0, description="examples in a client's distance correlation; 0 measures none")

    def compute_lambda2(self, round_index: int) -> float:
        """The weight of the distance correlation in a round."""
        return max(self.lambda2 - self.lambda2_decay * round_index, min(self.lambda2, self.lambda2_min))


@dataclass(frozen=True)
class Features:
    """Activations with their labels, row by row."""

    activations: Tensor = part(Kind.ACTIVATIONS)
    labels: Tensor = part(Kind.ACTIVATIONS)


@dataclass(frozen=True)
class Start(Global):
    """Down: the global model, and the last cohort's activations once there are any. Also the server's whole state."""

    buffer: Features | None = None


@dataclass(frozen=True)
class Correlation:
    """The squared distance correlation of inputs and activations, and of the same inputs and shuffled activations."""

    dcor2: float = part(Kind.SCALARS)
    null: float = part(Kind.SCALARS)


@dataclass(frozen=True)
class Contribution:
    """Up: what a client adds to the buffer, and its distance correlation; None with too few examples."""

    features: Features | None = None
    measured: Correlation | None = None


@dataclass(frozen=True)
class ChosenExamples:
    """In a client's store: the examples that it shares and measures, the shared ones first."""

    positions: Tensor


FIT = Phase("fit", Start, Update, same=("weights",), check=check_update)
EXTRACT = Phase("extract", Global, Contribution)


def choose_cut(model: nn.Module, params: Any) -> int:
    """The stage after which the network is cut."""
    return require_stages(model, "flea").split_layer_default if params.split_layer is None else int(params.split_layer)


def describe_item(env: Env[FleaParams]) -> Layout:
    """One activation and its label on the wire; raises ConfigError when the network has no such cut."""
    model = env.model().eval()
    head, _ = cut(model, choose_cut(model, env.params))
    with torch.no_grad():
        activation = head(torch.zeros(1, *env.shape))[0]
    return Layout({"activations": (DTYPES[env.params.transport], tuple(activation.shape)), "labels": (torch.int64, ())})
