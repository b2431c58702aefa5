"""What it costs to check and to add one 44.7 MB update at the server, against the plain way, in one run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedrpc.aggregation.mean import WeightedMean
from fedrpc.models import build, read_tensors
from fedrpc.process import return_freed_memory
from fedrpc.wire.codec import check_finite
from tests.bench.measures import show

RESULTS = Path(__file__).parent / "results" / "aggregation.json"
REPEATS = 9


def _best_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1000 * min(times)


@pytest.mark.aside
def test_adding_and_checking_a_large_update() -> None:
    torch.set_num_threads(1)
    return_freed_memory()  # as a server does: every large temporary is fresh pages
    update = read_tensors(build("resnet18", (3, 32, 32), 10))
    mean, sums = WeightedMean(), {name: tensor.double() for name, tensor in update.items()}
    mean.add(update, 1)

    def add_whole() -> None:
        for name, tensor in update.items():
            sums[name].add_(tensor.double(), alpha=3)

    def check_whole() -> bool:
        return all(bool(torch.isfinite(tensor).all()) for tensor in update.values() if _floats(tensor))

    found = {
        "size_bytes": sum(tensor.nbytes for tensor in update.values()),
        "add_ms": {"whole float64 copies": _best_ms(add_whole), "blocks": _best_ms(lambda: mean.add(update, 3))},
        "check_ms": {
            "isfinite of all": _best_ms(check_whole),
            "isfinite of sums": _best_ms(lambda: check_finite("weights", update)),
        },
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    rows = {f"{what}, {how}": f"{ms:.1f} ms" for what in ("add_ms", "check_ms") for how, ms in found[what].items()}
    show("one update of resnet18 at the server (make bench ARGS='-k aggregation')", rows)


def _floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point()
