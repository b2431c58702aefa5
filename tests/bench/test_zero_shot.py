"""How fast zero-shot generation is: an iteration of it against one plain forward and input-gradient pass."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedrpc import models
from fedrpc.methods.blocks.zero_shot import Inversion, ZeroShotParams, build_balanced_labels
from tests.bench.measures import show

pytestmark = [pytest.mark.timeout(900), pytest.mark.aside]

NUM_CLASSES, PASSES = 10, 15
LEAST = 0.8


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor, layout: torch.memory_format) -> Callable[[], None]:
    """A forward pass and the gradient of the inputs alone: what no generation can do without."""
    frozen = copy.deepcopy(model).eval().requires_grad_(False).to(memory_format=layout)
    inputs = x.clone(memory_format=layout).requires_grad_()

    def once() -> None:
        inputs.grad = None
        F.cross_entropy(frozen(inputs), y).backward()

    return once


def generating(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """One iteration with all that it takes: statistics, the optimizer's step, the clamp, and keeping the best."""
    bounds = torch.full((len(x[0]), 1, 1), -0.5), torch.full((len(x[0]), 1, 1), 3.0)
    batch = Inversion(model, ZeroShotParams(), x, y, bounds)
    return lambda: batch.advance(1)


def seconds(work: dict[str, Callable[[], None]]) -> dict[str, float]:
    """CPU seconds of each, one after the other again and again, so that a busy machine slows all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(PASSES):
        for name, once in work.items():
            started = time.thread_time()
            once()
            taken[name].append(time.thread_time() - started)
    return {name: median(values[2:]) for name, values in taken.items()}


@pytest.mark.parametrize("per_class", [16, 64])
@pytest.mark.parametrize(("name", "shape"), [("zda-mnist", (1, 28, 28)), ("zda-cifar", (3, 32, 32))])
def test_generation_is_nearly_as_fast_as_a_plain_pass(name: str, shape: tuple[int, ...], per_class: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, y = models.build(name, shape, NUM_CLASSES), build_balanced_labels(NUM_CLASSES, per_class)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((len(y), *shape), np.float32))
    found = seconds(
        {
            "generation": generating(model, x, y),
            "plain, same layout": plain(model, x, y, torch.channels_last),
            "plain, torch's layout": plain(model, x, y, torch.contiguous_format),
        }
    )
    ratios = {key: found[key] / found["generation"] for key in found}
    rows = {
        key: f"{1000 * value:.0f} ms, {len(y) / value:,.0f} images/s an iteration, generation {ratios[key]:.0%} as fast"
        for key, value in found.items()
    }
    show(f"{name}, {per_class} a class, 1 thread (make bench ARGS='-k zero_shot')", rows)
    assert ratios["plain, same layout"] >= LEAST
