"""DP-SGD (Abadi et al., 2016) in a client: Opacus's engine around the run's optimizer and a method's loss."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from opacus import GradSampleModule, PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedrpc.config import PrivacyConfig, TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.errors import ConfigError
from fedrpc.privacy.mechanisms import ZERO_OUT, Coverage, Guarantee, History, Trainings, public
from fedrpc.training.batches import load_batch
from fedrpc.training.dpsgd_plan import plan_cost
from fedrpc.training.loop import TrainReport, build_optimizer
from fedrpc.training.losses import Loss

SIZE_AND_LOSS = public("the number of examples is taken as known, and losses are not released")
NOTHING_SEEN = public("no example was trained on")


def prepare_network(model: nn.Module, what: str) -> nn.Module:
    """Prepares a network for per-example gradients: BatchNorm becomes GroupNorm, from round 0, on both sides.

    Raises:
        ConfigError: Another of its layers mixes the examples of a batch.
    """
    fixed = ModuleValidator.fix(model)
    errors = ModuleValidator.validate(fixed, strict=False)
    if errors:
        raise ConfigError(f"{what} cannot be trained with DP-SGD: {errors[0]}; choose another --model")
    # In the channels-last layout Opacus computes zero per-example gradients of a convolution.
    return fixed.to(memory_format=torch.contiguous_format)  # type: ignore[no-any-return]


class DpSgd:
    """One private training; called like `training.loop.train`.

    Batches are Poisson samples, so they vary in size and may be empty; every step is charged.

    Args:
        trainings: Where it is charged.
        num_rounds: The run's rounds: a target epsilon is meant for a client that takes part in all of them.
        noise: The generator of the noise, on the device of the training.
        sampling: The generator that samples batches; as secret as the noise, because the guarantee relies on it.
        afford: Called with adjacency and cost before training; abstains when the cost exceeds a limit.
    """

    def __init__(
        self,
        config: PrivacyConfig,
        trainings: Trainings,
        *,
        num_rounds: int,
        noise: torch.Generator,
        sampling: torch.Generator,
        afford: Callable[[str, History], None],
    ) -> None:
        assert config.dp_sgd is not None
        self._config, self._dp, self._num_rounds = config, config.dp_sgd, num_rounds
        self._trainings, self._noise, self._sampling, self._afford = trainings, noise, sampling, afford
        self._checked = False

    def __call__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Examples,
        config: TrainConfig,
        *,
        lr: float,
        order: np.random.Generator,
        device: torch.device,
        check: Callable[[], None] = lambda: None,
        on_grad: Callable[[nn.Module], None] | None = None,
        epochs: int | None = None,
        draw: int | None = None,
    ) -> TrainReport:
        """Trains the model in place; `draw` is the expected number of examples in an epoch."""
        size = len(data)
        epochs = config.epochs if epochs is None else epochs
        cost = plan_cost(self._config, config, size, self._num_rounds, epochs=epochs, draw=draw)
        if not cost:
            return TrainReport(size, 0, (math.nan,) * epochs, NOTHING_SEEN, SIZE_AND_LOSS)
        ((multiplier, _, steps),) = cost
        self._afford(ZERO_OUT, cost)
        model.train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Opacus warns about random numbers and hooks
            engine, wrapped, optimizer, batches = self._make_private(model, data, config, lr, multiplier)
            _attach_on_grad(optimizer, on_grad, model)
            for index in _sample_batches(batches, steps):
                check()
                self._step(wrapped, optimizer, loss, load_batch(data, index, device))
        wrapped.to_standard_module()
        history = tuple((float(n), float(q), int(s)) for n, q, s in engine.accountant.history)
        covered = self._trainings.add(self._build_guarantee(history))
        return TrainReport(size, steps, (math.nan,) * epochs, covered, SIZE_AND_LOSS)

    def _make_private(
        self,
        model: nn.Module,
        data: Examples,
        config: TrainConfig,
        lr: float,
        multiplier: float,
    ) -> tuple[PrivacyEngine, GradSampleModule, DPOptimizer, DataLoader[Any]]:
        positions = TensorDataset(torch.arange(len(data)))
        loader = DataLoader(positions, batch_size=config.batch_size, generator=self._sampling)
        engine = PrivacyEngine(accountant="rdp")
        wrapped, optimizer, batches = engine.make_private(
            module=model,
            optimizer=build_optimizer(config, model, lr),
            data_loader=loader,
            noise_multiplier=multiplier,
            max_grad_norm=self._dp.max_grad_norm,
            noise_generator=self._noise,
        )
        # Opacus rounds it down, possibly to 0.
        optimizer.expected_batch_size = max(1, round(len(data) / math.ceil(len(data) / config.batch_size)))
        return engine, wrapped, optimizer, batches

    def _step(
        self,
        model: GradSampleModule,
        optimizer: DPOptimizer,
        loss: Loss,
        batch: tuple[Tensor, Tensor],
    ) -> None:
        x, y = batch
        optimizer.zero_grad(set_to_none=True)
        if len(y):
            loss(model, x, y).backward()  # type: ignore[no-untyped-call]
            self._check_terms(model)
        else:  # an empty sample: noise alone, charged like any step
            for parameter in optimizer.params:
                parameter.grad_sample = parameter.new_zeros(0, *parameter.shape)
        optimizer.step()

    def _check_terms(self, model: GradSampleModule) -> None:
        """Checks once that the loss has no term outside the examples (a penalty on weights), which would be lost."""
        if self._checked:
            return
        self._checked = True
        trained = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
        # Relative to the largest gradient: that of a bias before a norm, for example, is only rounding error.
        largest = max(float(parameter.grad.abs().max()) for _, parameter in trained)
        for name, parameter in trained:
            if not torch.allclose(parameter.grad, parameter.grad_sample.mean(0), rtol=1e-3, atol=1e-4 * largest):
                raise ConfigError(
                    f"DP-SGD needs a loss that is the mean of one term for each example, but in {name} the examples' "
                    "gradients do not add up to the whole; move terms that depend on weights alone to on_grad"
                )

    def _build_guarantee(self, history: History) -> Guarantee:
        parameters = {"max_grad_norm": self._dp.max_grad_norm, "unit": "record", "sampling": "poisson"}
        if not self._multiplier_is_positive(history):
            return Guarantee("dp-sgd", parameters, "the noise is zero", coverage=Coverage.NONE)
        return Guarantee("dp-sgd", parameters, "record-level, given what was received", history, ZERO_OUT)

    @staticmethod
    def _multiplier_is_positive(history: History) -> bool:
        return all(noise > 0 for noise, _, _ in history)


def rehearse(config: PrivacyConfig, num_rounds: int, device: torch.device) -> DpSgd:
    """A private training that is charged to nobody, for measuring what one takes; its result may not leave."""
    noise, sampling = torch.Generator(device), torch.Generator()
    return DpSgd(config, Trainings(), num_rounds=num_rounds, noise=noise, sampling=sampling, afford=lambda *_: None)


def _sample_batches(batches: DataLoader[Any], steps: int) -> Iterator[np.ndarray]:
    """`steps` batches of positions; the loader gives those of one epoch at a time."""
    done = 0
    while done < steps:
        for (index,) in batches:
            if done == steps:
                return
            yield index.long().numpy()
            done += 1


def _attach_on_grad(optimizer: DPOptimizer, on_grad: Callable[[nn.Module], None] | None, model: nn.Module) -> None:
    """Calls `on_grad` on the private gradient, after the accountant has charged the step."""
    if on_grad is None:
        return
    charge = optimizer.step_hook

    def both(stepped: DPOptimizer) -> None:
        charge(stepped)
        on_grad(model)

    optimizer.attach_step_hook(both)
