"""Shares this machine's GPUs among a run's processes: how many fit, how many work at a time, how much each may take.

Only a child looks at the GPUs: a process that has asked CUDA anything can no longer fork clients that use it.
"""

from __future__ import annotations

import json
import math
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrpc.config import RunConfig
from fedrpc.errors import ConfigError
from fedrpc.launch.processes import fork, preload, wait_or_kill

if TYPE_CHECKING:
    from fedrpc.training.loop import TrainReport

_GIB = 1 << 30
# What a process takes of a GPU before its first tensor: a context, and the kernels that are loaded into it. It was not
# measured here: others report 300 to 500 MB for recent PyTorch.
CONTEXT_BYTES = 400_000_000
_LEAST_NEED = 256 << 20
_MARGIN = 2  # a method may hold a second network, and more of each batch, than the step that was measured
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # of Linux, and of Windows' subsystem for it
_LOOK_S = 300.0


@dataclass(frozen=True)
class Gpu:
    """A GPU as it is before the run, in bytes."""

    name: str
    free: int
    total: int


@dataclass(frozen=True)
class Sharing:
    """How the processes of a run share the GPUs.

    Args:
        parallel: How many clients work at a time.
        share: Of a GPU's memory that each process may take while it works.
    """

    parallel: int
    share: float


def share_gpus(config: RunConfig, data_dir: Path | None, num_processes: int, num_runs: int = 1) -> Sharing:
    """Plans who takes how much; without a GPU, one client works at a time for each core.

    Args:
        num_processes: Of this run's clients.
        num_runs: That are under way at a time, and share cores and GPUs.
    """
    cores = max(1, (os.cpu_count() or 1) // num_runs)
    if config.device == "cpu" or not any(Path(path).exists() for path in _DRIVERS):
        return Sharing(config.parallel or cores, 1.0)
    preload(config)
    gpus, need = look_at_gpus(config, data_dir)
    if not gpus:
        return Sharing(config.parallel or cores, 1.0)
    return plan_sharing(gpus, need, num_processes, config.parallel, cores, num_runs)


def plan_sharing(
    gpus: Sequence[Gpu], need: int, num_processes: int, parallel: int, cores: int, num_runs: int = 1
) -> Sharing:
    """Plans who takes how much, by what is free and what a client was seen to need.

    Args:
        need: Of one client that works, in bytes.
        parallel: How many clients are to work at a time; 0 for as many as there are cores and memory for.
        cores: Of this run: each client at work keeps one busy, also with a GPU.
        num_runs: Each of which may take its part of what is free.

    Raises:
        ConfigError: Not even one client could work beside the contexts of all processes.
    """
    at_one = math.ceil(num_processes / len(gpus))
    free = min(gpu.free for gpu in gpus) // num_runs
    left = free - (at_one + 1) * CONTEXT_BYTES  # the server has one, too
    if left < need:
        hosts = len(gpus)
        raise ConfigError(
            f"{num_processes} client processes on {len(gpus)} GPUs need about "
            f"{(free - left + need) / _GIB:.1f} GiB of each, most of it for their CUDA contexts, and "
            f"{free / _GIB:.1f} GiB are free; --hosts {hosts} runs all clients in {hosts} processes, which share one "
            "context each, with the same results; or choose --device cpu"
        )
    parallel = parallel or max(1, min(cores, len(gpus) * (left // need)))
    if at_one == num_runs == 1:
        return Sharing(parallel, 1.0)
    at_work = math.ceil(min(parallel, num_processes) / len(gpus))
    return Sharing(parallel, min(left / at_work / gpu.total for gpu in gpus))


def look_at_gpus(config: RunConfig, data_dir: Path | None) -> tuple[list[Gpu], int]:
    """Finds, in a child, the GPUs of a run and what a client needs of one: two steps on it are measured."""
    reader, writer = os.pipe()

    def look() -> int:
        os.close(reader)
        with os.fdopen(writer, "w") as file:
            json.dump(_look(config, data_dir), file)
        return 0

    pid = fork(look)
    os.close(writer)
    try:
        found = json.loads(_read_all(reader) or b'{"gpus": [], "need": 0}')
    finally:
        os.close(reader)
        wait_or_kill([pid], 1.0)
    return [Gpu(**gpu) for gpu in found["gpus"]], max(_LEAST_NEED, _MARGIN * found["need"])


def _read_all(reader: int) -> bytes:
    """What the child says until it ends; nothing when it does not end in time, as when a driver hangs."""
    data = b""
    while select.select([reader], [], [], _LOOK_S)[0]:
        part = os.read(reader, 65536)
        if not part:
            return data
        data += part
    return b""


def _look(config: RunConfig, data_dir: Path | None) -> dict[str, Any]:
    import torch  # here, as all below: loaded before the fork, and by nobody who has no GPU

    from fedrpc.device import choose

    first = choose(config.device)
    if first.type != "cuda":
        return {"gpus": [], "need": 0}
    numbers = [first.index] if ":" in config.device else range(torch.cuda.device_count())
    gpus = []
    for number in numbers:
        free, total = torch.cuda.mem_get_info(number)
        gpus.append({"name": torch.cuda.get_device_name(number), "free": free, "total": total})
    return {"gpus": gpus, "need": _measure_need(config, data_dir, first)}


def _measure_need(config: RunConfig, data_dir: Path | None, device: Any) -> int:
    """The most memory that two steps of a client's training take."""
    import numpy as np
    import torch

    from fedrpc.device import set_up
    from fedrpc.problem import Problem
    from fedrpc.training.loop import train
    from fedrpc.training.losses import cross_entropy

    set_up(device, deterministic=config.train.deterministic, tf32=config.train.tf32)
    problem = Problem(config, data_dir)
    largest = int(np.argmax(problem.num_examples))
    data, settings = problem.load_client_data(largest).train, problem.config.train
    network, order = problem.copy_network().to(device), np.random.default_rng(0)
    if len(data) and settings.epochs:
        step: Callable[..., TrainReport] = train
        if config.privacy.dp_sgd:  # which holds the gradients of every example of a batch
            from fedrpc.training.dpsgd import rehearse

            step = rehearse(config.privacy, config.rounds, device)
        draw = 2 * settings.batch_size
        step(network, cross_entropy, data, settings, lr=settings.lr, order=order, device=device, epochs=1, draw=draw)
    return int(torch.cuda.max_memory_reserved(device))
