"""Runs of an echo that stop before given rounds, so that ours and theirs take turns on one machine."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from tests.bench.measures import cpu_s, status
from tests.e2e.programs import Gates, Program, Programs, settings, wait_for
from tests.e2e.rundir import RunDir

PATIENCE_S = 140.0  # less than a gate has


@dataclass(frozen=True)
class Spent:
    """What one round took: seconds by the clock, and CPU seconds of all processes."""

    wall_s: float
    cpu_s: float


class Contender(ABC):
    """A run whose server waits at gates.

    Args:
        folder: Where it keeps its files.
        stops: The rounds that it waits before, in order; the first one must be 0.
    """

    def __init__(self, folder: Path, stops: list[int]) -> None:
        self.folder, self._stops = folder, stops
        self.gates = Gates(folder / "gates")  # makes the folder, too
        self.gates.shut(*(f"server-{stop}" for stop in stops))

    @abstractmethod
    def list_processes(self) -> list[psutil.Process]:
        """All its processes. It looks through /proc, so not while a round is measured."""

    @abstractmethod
    def check(self) -> None:
        """Fails when the server has ended. It is asked all the time, and must cost nearly nothing."""

    def wait(self, index: int) -> float:
        """Waits until the server stands before the round of a stop; returns when it got there."""
        name = f"server-{self._stops[index]}"

        def reached() -> bool:
            self.check()
            return bool(self.gates.pids(name))

        wait_for(f"{type(self).__name__} comes to gate {name}", reached, PATIENCE_S)
        return (self.gates.folder / f"{name}.reached").stat().st_mtime

    def play(self, index: int) -> Spent:
        """Plays the rounds from one stop to the next; returns what one of them took."""
        rounds = self._stops[index + 1] - self._stops[index]
        before, began = cpu_s(self.list_processes()), time.time()
        self.gates.open(f"server-{self._stops[index]}")
        wall_s = self.wait(index + 1) - began
        return Spent(wall_s / rounds, (cpu_s(self.list_processes()) - before) / rounds)

    @property
    def server_pid(self) -> int:
        """The process that has the server's half of the method."""
        return self.gates.pids("server-0")[-1]

    def read_server(self, name: str) -> int:
        """A size of the server from /proc/PID/status."""
        return status(self.server_pid, name)


class Ours(Contender):
    """fedrpc-server and clients that were started by hand, with the method `echo`."""

    def __init__(
        self, folder: Path, stops: list[int], scripts: Programs, programs: Programs, num_clients: int, model: str
    ) -> None:
        super().__init__(folder, stops)
        self._num_clients = num_clients
        words = settings(
            method="echo",
            model=model,
            clients=num_clients,
            rounds=stops[-1] + 1,
            train_size=6000,
            eval_every=100_000,
            feature_eval_every=100_000,
            params__gates=str(self.gates.folder),
        )
        server = scripts.server(folder / "run", *words)  # a process of its own: its memory is measured
        self._programs: list[Program] = [
            server,
            *programs.clients(server.address(), num_clients, folder / "state"),
        ]

    def list_processes(self) -> list[psutil.Process]:
        return [process for program in self._programs for process in program.descendants()]

    def check(self) -> None:
        server = self._programs[0]
        assert server.code is None, server.err

    def check_bytes(self, model_bytes: int) -> None:
        """Checks that every client sent the whole model in every round so far."""
        sent = RunDir(self.folder / "run").sums(kind="weights", direction="up")["tensor_bytes"]
        expected = model_bytes * self._num_clients * self._stops[-1]
        assert sent == expected, f"expected {expected} bytes of weights from clients, got {sent}"


def take_turns(ours: Contender, theirs: Contender, repeats: int) -> tuple[Spent, Spent]:
    """Plays both in turns; the first turn warms up. Returns the medians."""
    for contender in (ours, theirs):
        contender.wait(0)
    turns = [(ours.play(index), theirs.play(index)) for index in range(repeats + 1)][1:]
    print(f"load {os.getloadavg()[0]:.1f}; turns: {turns}")
    return _take_median([turn[0] for turn in turns]), _take_median([turn[1] for turn in turns])


def _take_median(spent: list[Spent]) -> Spent:
    return Spent(median(each.wall_s for each in spent), median(each.cpu_s for each in spent))
