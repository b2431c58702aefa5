"""Measures how networks train on a device: how far from the CPU, and how fast in each way.

Each network is measured in a process of its own. One that crashes, or that has not compiled a network in time, is
ended, and a new one goes on with the next way.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedrpc.config import TrainConfig, build
from fedrpc.data.examples import Examples
from fedrpc.device import set_up
from fedrpc.errors import ConfigError
from fedrpc.problem import Problem
from fedrpc.training.loop import train
from fedrpc.training.losses import cross_entropy

DATASET = "fmnist-mini"  # comes with the package
_CPU = torch.device("cpu")
_BATCH_SIZES = (10, 256)
_COMPARED = 256  # examples of the training that is held against the CPU's, where a large network takes long
_START_S = 300.0  # for a process to load PyTorch and to find the device
COMPILED = "bf16, compiled"
REFERENCE = "cpu"  # fp32, there and on the device
WAYS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "fp32": {},
    "tf32": {"tf32": True},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    COMPILED: {"precision": "bf16", "compile": "on"},
    "fp32, any bits": {"deterministic": False},
}
# On a CPU the first and the last are fp32, and fp16 takes minutes for a batch.
_GPU_ONLY = {"tf32", "fp16", "fp32, any bits"}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_WORKER = "from fedrpc.launch.gpu_speed import work; work()"

Say = Callable[[str], None]


@dataclass(frozen=True)
class NetworkResult:
    """How one network trains.

    Args:
        difference: From training on the CPU, as a share of how far that moved the weights.
        speed: Examples a second by way of training; the CPU's is `REFERENCE`.
        failed: Why a way was not taken, by way.
        unfinished: The ways that took too long.
    """

    network: str
    batch_size: int
    difference: float | None
    speed: Mapping[str, float]
    failed: Mapping[str, str] = field(default_factory=dict)
    unfinished: Sequence[str] = ()


@dataclass(frozen=True)
class Order:
    """What to measure.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        networks: Their names; they take the embedded images.
        compiled: The networks that are compiled, too.
        num_examples: That each timed training sees.
        limit_s: How long one way may take.
        log: Takes what the processes say.
    """

    device: str
    networks: Sequence[str]
    compiled: Sequence[str]
    num_examples: int
    limit_s: float
    log: Path


def choose_compiled(wanted: str, device: str, networks: Sequence[str]) -> Sequence[str]:
    """The networks that are compiled: a small one and a large one on a GPU, on a CPU the small one, if none is named.

    Raises:
        ConfigError: There is no such network among those that are measured.
    """
    if wanted in ("all", "none"):
        return networks if wanted == "all" else ()
    if not wanted:
        return ("zda-mnist",) if device == "cpu" else ("zda-mnist", "resnet18")
    names = wanted.split(",")
    if unknown := [name for name in names if name not in networks]:
        raise ConfigError(f"cannot compile '{unknown[0]}'; expected all, none or some of {', '.join(networks)}")
    return names


def has_compiler() -> bool:
    """Whether this machine has a C++ compiler, without which `torch.compile` compiles nothing."""
    return any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)


def measure_networks(order: Order, say: Say = lambda _: None) -> list[NetworkResult]:
    """Measures every network, and tells of each way when it is done."""
    results = []
    for place, name in enumerate(order.networks, start=1):
        ways = [way for way in WAYS if order.device != "cpu" or way not in _GPU_ONLY]
        ways = [way for way in ways if way != COMPILED or name in order.compiled]
        tasks = [(batch_size, way) for batch_size in _BATCH_SIZES for way in ways]
        found: dict[tuple[int, str], dict[str, Any]] = {}
        for (batch_size, way), outcome in _measure_all(name, tasks, order):
            found[batch_size, way] = outcome
            told = _describe(outcome, order.limit_s)
            say(f"{place}/{len(order.networks)} {name}, batch {batch_size}, {way}: {told}")
        results += [_collect(name, batch_size, ways, found) for batch_size in _BATCH_SIZES]
    return results


def _describe(outcome: Mapping[str, Any], limit_s: float) -> str:
    if "failed" in outcome:
        return f"failed: {outcome['failed']}"
    return f"{outcome['speed']:,.0f} examples a second" if outcome else f"not finished in {limit_s:g} s"


def _collect(
    name: str, batch_size: int, ways: Sequence[str], found: Mapping[tuple[int, str], Mapping[str, Any]]
) -> NetworkResult:
    of_batch = {way: found[batch_size, way] for way in ways}
    return NetworkResult(
        name,
        batch_size,
        difference=of_batch[REFERENCE].get("difference"),
        speed={way: outcome["speed"] for way, outcome in of_batch.items() if "speed" in outcome},
        failed={way: outcome["failed"] for way, outcome in of_batch.items() if "failed" in outcome},
        unfinished=[way for way, outcome in of_batch.items() if not outcome],
    )


# Processes

_Task = tuple[int, str]  # a batch size and a way


def _measure_all(name: str, tasks: Sequence[_Task], order: Order) -> Iterator[tuple[_Task, dict[str, Any]]]:
    """What became of each task in turn; nothing is known of one that did not finish."""
    while tasks:
        with _Worker(name, tasks, order) as worker:
            if "failed" in (start := worker.read(_START_S) or {"failed": f"it did not start in {_START_S:g} s"}):
                yield from ((task, start) for task in tasks)
                return
            while tasks and not worker.is_lost:
                task, *tasks = tasks
                yield task, worker.read(order.limit_s)


class _Worker:
    """A process that does tasks one after the other, and writes a line about each."""

    def __init__(self, name: str, tasks: Sequence[_Task], order: Order) -> None:
        said = json.dumps([name, order.device, order.num_examples, tasks])
        with order.log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WORKER, said],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that the compilers it starts end with it
            )
        self._log, self.is_lost = order.log, False
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(b"")

    def read(self, limit_s: float) -> dict[str, Any]:
        """The next line; empty when it does not come in time."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            self.is_lost = True
            return {}
        if not line:
            self.is_lost = True
            return {"failed": f"its process ended with {self._process.wait()}; {self._log} has the reason"}
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join()


def work() -> None:
    """Does the tasks of the command line in turn: the whole life of a process that measures one network."""
    name, device, num_examples, tasks = json.loads(sys.argv[1])
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no result
    problem = Problem(build({"dataset": DATASET, "model": name, "clients": 1, "train_size": num_examples}))
    torch.set_num_threads(problem.config.train.threads)  # as a client does
    print(json.dumps({"started": True}), file=results)
    for batch_size, way in tasks:
        print(json.dumps(_measure(problem, torch.device(device), batch_size, way)), file=results)


# Measurements


def _measure(problem: Problem, device: torch.device, batch_size: int, way: str) -> dict[str, Any]:
    try:
        return measure(problem, device, batch_size, way)
    except Exception as error:  # one way less, and the others are told all the same
        return {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def measure(problem: Problem, device: torch.device, batch_size: int, way: str) -> dict[str, float]:
    """How fast a network trains in one way; on the CPU also how far the device comes from there."""
    config = TrainConfig(epochs=1, batch_size=batch_size, **WAYS[way])
    data = problem.load_client_data(0).train
    if way != REFERENCE:
        return {"speed": _time_training(problem, data, config, device)[0]}
    few = data.subset(np.arange(min(len(data), _COMPARED)))
    speed, expected = _time_training(problem, few, config, _CPU, dropout=False)
    _, found = _time_training(problem, few, config, device, dropout=False)
    return {"speed": speed, "difference": compute_difference(problem.copy_network().state_dict(), found, expected)}


def _time_training(
    problem: Problem, data: Examples, config: TrainConfig, device: torch.device, *, dropout: bool = True
) -> tuple[float, dict[str, Tensor]]:
    """Trains twice, since what the first time sets up is not to be timed; returns examples a second and the weights.

    Args:
        dropout: Whether units are dropped; each device draws others.
    """
    set_up(device, deterministic=config.deterministic, tf32=config.tf32)
    if config.compile != "off":
        torch.compiler.reset()  # or what was compiled for other batches counts towards PyTorch's limit, and it gives up
    for _ in range(2):
        network = problem.copy_network().to(device)
        for layer in network.modules():
            if isinstance(layer, _DROPOUTS) and not dropout:
                layer.p = 0.0
        torch.manual_seed(0)
        started = time.perf_counter()
        report = train(network, cross_entropy, data, config, lr=0.01, order=np.random.default_rng(0), device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the last step may be under way: losses are known before it
        seconds = time.perf_counter() - started
    return report.num_examples / seconds, {name: value.cpu() for name, value in network.state_dict().items()}


def compute_difference(
    start: Mapping[str, Tensor], found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> float:
    """How far two sets of weights are apart, over how far the second is from the start; counters are left out."""
    names = [name for name, value in expected.items() if value.is_floating_point() and name in start]

    def measure(values: Mapping[str, Tensor]) -> float:
        apart = (values[name].cpu().double() - expected[name].cpu().double() for name in names)
        return math.sqrt(sum(float(each.square().sum()) for each in apart))

    moved = measure(start)
    return measure(found) / moved if moved else measure(found)
