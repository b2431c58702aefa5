"""How a step is computed: precision, memory layout and compilation, by the run's settings and the device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from fedrpc.config import TrainConfig
from fedrpc.errors import Diverged

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Of losses in fp16, whose gradients would be lost below 6e-8. A local training is too short to search from PyTorch's
# own start, 65536, at which gradients above 1 overflow.
_FIRST_SCALE = 1024.0
_LEAST_SCALE = 2.0**-20  # at which nearly all gradients that do not overflow are lost
_MODES = {"on": None, "graphs": "reduce-overhead"}  # by the words of `train.compile`; None is PyTorch's default


def wants_channels_last(config: TrainConfig, device: torch.device) -> bool:
    """Whether images are laid out as NHWC: what the tensor cores of a GPU take, which compute in less than fp32."""
    if config.channels_last is not None:
        return config.channels_last
    return device.type == "cuda" and (config.tf32 or config.precision != "fp32")


@contextlib.contextmanager
def accelerating(model: nn.Module, config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Has a network laid out and compiled as the run says, and as it was afterwards."""
    is_relaid = wants_channels_last(config, device)
    if is_relaid:
        model.to(memory_format=torch.channels_last)
    if config.compile != "off":
        # In place, so that losses and methods see the same object. What was compiled is kept by the code and the shapes
        # of a network, not by the network: the next round, and the next client of a host, find it.
        model.compile(mode=_MODES[config.compile])
    try:
        yield
    finally:
        if config.compile != "off":
            model._compiled_call_impl = None
        if is_relaid:
            model.to(memory_format=torch.contiguous_format)


class Precision:
    """Computes the steps of one training; the weights, and what the optimizer keeps of them, are fp32 always."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self._dtype, self._device = _DTYPES.get(config.precision), device
        self._plain: AbstractContextManager[None] = nullcontext()
        self._scaler: torch.amp.GradScaler | None = None
        if config.precision == "fp16":
            # It never grows, so that the halvings tell how many steps were left out.
            self._scaler = torch.amp.GradScaler(device.type, init_scale=_FIRST_SCALE, growth_interval=2**31 - 1)

    def casting(self) -> AbstractContextManager[object]:
        """Where the loss is computed."""
        return self._plain if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def differentiate(self, value: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Adds the gradients of a loss to its parameters, in their true size."""
        if self._scaler is None:
            value.backward()  # type: ignore[no-untyped-call]
            return
        self._scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Changes the parameters; not in fp16 when a gradient overflowed, after which the scale is halved."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()

    def count_left_out(self) -> int:
        """How many steps were left out because a gradient overflowed; waits for the device.

        Raises:
            Diverged: So many that the scale is no help.
        """
        if self._scaler is None:
            return 0
        scale = self._scaler.get_scale()
        if scale < _LEAST_SCALE:
            raise Diverged(
                f"gradients overflowed in fp16 in {round(math.log2(_FIRST_SCALE / _LEAST_SCALE))} steps or more, which "
                "were left out; lower train.lr, or choose --precision bf16 or fp32"
            )
        return round(math.log2(_FIRST_SCALE / scale))
