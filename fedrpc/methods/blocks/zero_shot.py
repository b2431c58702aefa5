"""Zero-shot data generation (Fed-ZDA, Hao et al., 2021): labelled inputs from a network and its BatchNorm statistics.

Equation 3 is minimised over the inputs, with the network frozen: the squared distances of the mean and the standard
deviation at each BatchNorm layer's input from its running ones, plus the cross-entropy of the wanted labels.

Where the paper is silent: Adam at 0.1 for 500 iterations; all classes in one balanced batch, because
BatchNorm's statistics are of the mixture of classes; deviations are sqrt(variance + 1e-6) on both sides, with the
biased variance of the batch; inputs are clamped to the bounds of the data, where it has any; the best of all iterates
is kept. No jitter and no total variation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedrpc.errors import ConfigError
from fedrpc.methods.fedavg import EqualUpdate, Global, check_update
from fedrpc.methods.method import Params, Phase, refused
from fedrpc.methods.runtime import Env
from fedrpc.methods.tools import ReportedValue

REFUSES_DP_SGD = refused("DP-SGD needs a network without BatchNorm, whose statistics are what data is synthesised from")
NO_FORMAL_DP = (
    "clients always train on real records, and synthetic ones come from models that did: the paper's (0, delta) has no "
    "delta below the real fraction, is of one sample in one round, and does not protect a record"
)
REPORTED = (
    ReportedValue("zda_real_fraction", "real fraction", "the largest share of own data in what a client trained on"),
    ReportedValue("formal_dp", "formal privacy", why="formal_dp_reason"),
)
_EPSILON = 1e-6


FIT = Phase("fit", Global, EqualUpdate, same=("weights",), check=check_update)


class ZeroShotParams(Params):
    """The paper gives equation 3 and its three equal weights; all else is our choice."""

    t_start: int = Field(80, ge=0, description="first round with synthetic data; the paper tries 80, 90 and 95 of 100")
    samples_per_class: int = Field(64, ge=1, description="inputs of each class in each inversion")
    iterations: int = Field(500, ge=1, description="iterations of an inversion")
    synthesis_lr: float = Field(0.1, gt=0, description="learning rate of the Adam that moves the inputs")
    mean_weight: float = Field(1.0, ge=0, description="weight of BatchNorm's means")
    std_weight: float = Field(1.0, ge=0, description="weight of BatchNorm's standard deviations")
    class_weight: float = Field(1.0, ge=0, description="weight of the cross-entropy")

    def generates_in(self, round_index: int) -> bool:
        """Whether data is synthesised in a round."""
        return round_index >= self.t_start


@dataclass(frozen=True)
class SyntheticBatch:
    """A balanced batch of synthetic inputs, on the CPU.

    Attributes:
        loss: The value of equation 3; infinite when it was never finite, and the inputs are then noise.
        loss_at_start: The same before the first iteration.
    """

    x: Tensor
    y: Tensor
    loss: float
    loss_at_start: float

    @property
    def is_usable(self) -> bool:
        """Whether the network could be inverted."""
        return math.isfinite(self.loss)


Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def find_norm_layers(model: nn.Module) -> list[Norm]:
    """The BatchNorm layers that track statistics."""
    return [layer for layer in model.modules() if isinstance(layer, Norm) and layer.running_mean is not None]


def require_statistics(what: str, model: nn.Module) -> None:
    """Raises ConfigError for a network without BatchNorm statistics."""
    if not find_norm_layers(model):
        raise ConfigError(
            f"{what} synthesises data from the statistics of BatchNorm layers, but {type(model).__name__} has no such "
            "layer; choose another --model that has some (zda-mnist and zda-cifar do, for images), or another --method"
        )


def build_balanced_labels(num_classes: int, per_class: int) -> Tensor:
    """Labels, `per_class` of each class."""
    return torch.arange(num_classes).repeat_interleave(per_class)


class MatchedNorm(torch.autograd.Function):
    """BatchNorm in evaluation mode that also measures how far its input's statistics are from the running ones.

    Both share one backward pass, for speed: autograd's through a mean and a variance takes as long as a convolution,
    and torch's through a frozen BatchNorm layer four times as long as this one.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, layer: Norm, weights: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """The layer's output, and the weighted squared distances of means and deviations."""
        assert layer.running_mean is not None and layer.running_var is not None, "only such layers are matched"
        # The kernel of BatchNorm in training: several times as fast as `torch.var_mean`.
        mean, variance = torch.batch_norm_update_stats(z, None, None, 0.0)
        std = (variance + _EPSILON).sqrt()
        off_mean, off_std = mean - layer.running_mean, std - (layer.running_var + _EPSILON).sqrt()
        count = z.numel() / z.shape[1]
        slope = (2 * weights[1] / count) * off_std / std
        shift = (2 * weights[0] / count) * off_mean - slope * mean
        scale = (layer.running_var + layer.eps).rsqrt() * (1 if layer.weight is None else layer.weight)
        offset = (0 if layer.bias is None else layer.bias) - layer.running_mean * scale
        ctx.save_for_backward(z, scale, slope, shift)
        distance = weights[0] * off_mean.square().sum() + weights[1] * off_std.square().sum()
        return torch.addcmul(_shape_by_channel(offset, z), z, _shape_by_channel(scale, z)), distance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_distance: Tensor) -> tuple[Tensor | None, ...]:
        """The incoming gradient times the scale, plus shift + slope z for each channel."""
        z, *rest = ctx.saved_tensors
        scale, slope, shift = (_shape_by_channel(value, z) for value in rest)
        own = torch.addcmul(grad_distance * shift, z, grad_distance * slope)
        return own.addcmul_(grad, scale), None, None


def _shape_by_channel(values: Tensor, z: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (z.dim() - 2))


class Inversion:
    """Moves a batch from noise to inputs that resemble a network's training data.

    Args:
        model: Only read: a frozen copy of it is inverted.
        start: The noise, on the device to use.
        y: The wanted labels.
        bounds: The least and the greatest value of each channel, if there are any.
    """

    def __init__(
        self, model: nn.Module, params: ZeroShotParams, start: Tensor, y: Tensor, bounds: tuple[Tensor, Tensor] | None
    ) -> None:
        require_statistics("zero-shot generation", model)
        self._params, self._y = params, y.to(start.device)
        self._bounds = tuple(bound.to(start.device) for bound in bounds) if bounds else None
        # For images: pooling and convolutions take half the time in this layout.
        layout = torch.channels_last if start.dim() == 4 else torch.contiguous_format
        self._frozen = copy.deepcopy(model).to(start.device).to(memory_format=layout).eval().requires_grad_(False)
        for layer in find_norm_layers(self._frozen):
            layer.forward = partial(self._apply_norm, layer)  # type: ignore[method-assign]
        self._distances: list[Tensor] = []
        self._x = start.clone(memory_format=layout)
        self._clamp()
        self._adam = torch.optim.Adam([self._x.requires_grad_()], lr=params.synthesis_lr, fused=True)
        # On the device, like the choice of the best: reading a loss in each iteration would wait for the device.
        self._best, self._best_loss = self._x.detach().clone(), start.new_full((), math.inf)
        self._first_loss: Tensor | None = None

    def _apply_norm(self, layer: Norm, z: Tensor) -> Tensor:
        weights = self._params.mean_weight, self._params.std_weight
        out: Tensor
        out, distance = MatchedNorm.apply(z, layer, weights)
        self._distances.append(distance)
        return out

    def _evaluate(self) -> Tensor:
        """The loss of the current inputs, which are kept if it is the least so far."""
        self._distances.clear()
        wrong = F.cross_entropy(self._frozen(self._x), self._y)
        loss = self._params.class_weight * wrong + torch.stack(self._distances).sum()
        self._keep_best(loss.detach())
        return loss

    @torch.no_grad()
    def _keep_best(self, value: Tensor) -> None:
        if self._first_loss is None:
            self._first_loss = value
        is_better = value < self._best_loss
        torch.where(is_better, self._x, self._best, out=self._best)
        self._best_loss = torch.where(is_better, value, self._best_loss)

    @torch.no_grad()
    def _clamp(self) -> None:
        if self._bounds is not None:
            self._x.clamp_(*self._bounds)

    def advance(self, iterations: int, check: Callable[[], None] = lambda: None) -> None:
        """Runs some iterations; `check` is called before each and may raise."""
        for _ in range(iterations):
            check()
            loss = self._evaluate()
            self._adam.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            self._adam.step()
            self._clamp()

    def finish(self) -> SyntheticBatch:
        """The best inputs so far."""
        with torch.no_grad():
            self._evaluate()  # the result of the last step
        best = self._best.to("cpu", memory_format=torch.contiguous_format)
        assert self._first_loss is not None
        return SyntheticBatch(best, self._y.cpu(), float(self._best_loss), float(self._first_loss))


def start_inversion(
    model: nn.Module, env: Env, params: ZeroShotParams, rng: np.random.Generator, device: torch.device
) -> Inversion:
    """An inversion of a balanced batch of the run's classes, starting from standard normal noise."""
    y = build_balanced_labels(env.num_classes, params.samples_per_class)
    noise = rng.standard_normal((len(y), *env.shape), np.float32)
    return Inversion(model, params, torch.from_numpy(noise).to(device), y, env.bounds)


def build_privacy_record(env: Env, seen: Mapping[int, int]) -> dict[str, Any]:
    """The privacy part of a round's record: the largest real fraction of any client, and that no guarantee follows.

    Args:
        seen: By client, the number of examples that it trained on, real and synthetic.
    """
    real = env.num_examples()
    fractions = [compute_real_fraction(real[client], count) for client, count in seen.items() if count]
    return {
        "zda_real_fraction": max(fractions, default=1.0),
        "formal_dp": "none",
        "formal_dp_reason": NO_FORMAL_DP,
    }


def compute_real_fraction(num_real: int, num_seen: int) -> float:
    """The share of own data in a client's training set; 1 without synthetic data."""
    return min(1.0, num_real / num_seen)
