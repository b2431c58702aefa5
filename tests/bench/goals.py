"""What fedrpc wants to reach: one line for each figure of the table in README.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LEGACY = "Flower's legacy gRPC stream"
DEPLOYED = "Flower's deployment mode (SuperLink and SuperNodes)"


@dataclass(frozen=True)
class Goal:
    """One figure and its goal.

    Attributes:
        bench: The bench that measures it, as `-k` picks it; its file of results has the same name.
        key: The figure's name in that file.
        what: What is measured.
        limit: The goal.
        unit: Of the figure; empty for a ratio.
        best: Whether the figure shall be at most or at least the limit.
    """

    bench: str
    key: str
    what: str
    limit: float
    unit: str = ""
    best: Literal["at most", "at least"] = "at most"

    def is_reached(self, value: float) -> bool:
        """Whether a figure reaches the goal."""
        return value <= self.limit if self.best == "at most" else value >= self.limit


_SMALL = f"echo round, 32 clients x 120 KB, against {LEGACY}"
_LARGE = f"echo round, 8 clients x 44.7 MB, against {LEGACY}"
_GOODPUT = "goodput of one 44.7 MB transfer, from one half of a method to the other, against raw TCP"
_GROWTH = "server's CPU a client and round, all of N taking part: growth from the smallest to the largest N"

GOALS = (
    Goal("echo_small", "wall", f"{_SMALL}: wall", 0.8),
    Goal("echo_small", "cpu", f"{_SMALL}: CPU of all processes", 0.8),
    Goal("echo_large", "wall", f"{_LARGE}: wall", 0.25),
    Goal("echo_large", "cpu", f"{_LARGE}: CPU of all processes", 0.25),
    Goal("echo_large", "memory", f"{_LARGE}: server's peak memory (VmHWM: libraries and mapped files too)", 0.25),
    Goal("echo_large", "memory_above_base", f"{_LARGE}: server's peak of anonymous memory above its base", 0.25),
    Goal("echo_deployed", "wall", f"echo round, 8 clients x 44.7 MB, against {DEPLOYED}: wall", 0.063),
    Goal("goodput", "down", f"{_GOODPUT}: down", 0.35, best="at least"),
    Goal("goodput", "up", f"{_GOODPUT}: up", 0.35, best="at least"),
    Goal("gan_by_hand", "task_cpu", "CPU of a small task, server and client, the answer itself included", 2.0, "ms"),
    Goal("gan_by_hand", "steps", "GAN steps a second, 10 clients, toy network: by hand", 80, "/s", "at least"),
    Goal("gan_with_autograd", "steps", "GAN steps a second, the same: with autograd", 60, "/s", "at least"),
    Goal("many_processes", "growth", f"{_GROWTH}, clients in processes (100, 300)", 1.3),
    Goal("many_in_hosts", "growth", f"{_GROWTH}, clients in hosts (100, 300, 1,000)", 1.3),
    Goal("many_processes", "exit", "from the last round to the exit, 300 clients in processes", 5, "s"),
    Goal("many_in_hosts", "exit", "from the last round to the exit, 1,000 clients in hosts", 5, "s"),
    Goal("hosts_memory", "pss", "memory (PSS of all processes) of 10,000 clients in hosts", 16, "GiB"),
    Goal(
        "training",
        "speed",
        "training on MNIST-like data, K = 100, 10 a round: rounds a second against a bare loop on two cores",
        0.95,
        best="at least",
    ),
    Goal("listings", "methods", "`fedrpc list methods`", 0.5, "s"),
    Goal("listings", "settings", "`fedrpc list settings`", 0.5, "s"),
    Goal("first_task", "wall", "`fedrpc run` to the first task, 10 clients", 3, "s"),
)
