"""Predicts how long a finished run takes over other links: its bytes and its measured computing on a virtual clock.

Each question is played anew. Its messages travel over the clients' links, its answers are computed as long as they
were measured, and what the server itself did takes the time that it took. The slowest client ends a question.
"""

from __future__ import annotations

import heapq
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedrpc.emulation.conditions import Conditions, assign_conditions
from fedrpc.emulation.link import UNLIMITED, Link, parse_link
from fedrpc.errors import ConfigError
from fedrpc.files import explain_damage
from fedrpc.metrics.timing import TIMING_FILE, Part, PhaseRow, TaskRow
from fedrpc.study.reading import Run
from fedrpc.wire.frames import SMALL_BYTES
from fedrpc.wire.ledger import SESSION

CONDITIONS_FILE = "conditions.json"
_SERVER_PARTS: tuple[Part, ...] = ("encode", "read", "aggregate", "evaluate", "checkpoint")
PARTS = ("queue", "download", "compute", "upload", "server")


@dataclass(frozen=True)
class Task:
    """What one client was asked, and what that took.

    Attributes:
        compute_s: On a machine as fast as the one that it was measured on.
        down, up: Bytes of the question and of the answer.
    """

    client: int
    compute_s: float
    down: float
    up: float


@dataclass(frozen=True)
class Spans:
    """When the parts of a task end, counted from the question."""

    received: float
    begun: float
    computed: float
    ended: float

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return {
            "download": self.received,
            "queue": max(0.0, self.begun - self.received),  # not by a rounding error
            "compute": self.computed - self.begun,
            "upload": self.ended - self.computed,
        }


@dataclass
class RoundTime:
    """One round on the virtual clock: every part on the path of its slowest clients."""

    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, **parts: float) -> None:
        """Adds parts that follow."""
        for part, seconds in parts.items():
            self.parts[part] += seconds
            self.seconds += seconds


@dataclass(frozen=True)
class Prediction:
    """A run's rounds, by index; -1 is set-up, and the number of rounds is what follows the last one."""

    rounds: Mapping[int, RoundTime]

    @property
    def seconds(self) -> float:
        """The whole run."""
        return math.fsum(found.seconds for found in self.rounds.values())

    def until(self, index: int) -> float:
        """Seconds to the end of a round."""
        return math.fsum(found.seconds for number, found in self.rounds.items() if number <= index)

    @property
    def mean_round(self) -> RoundTime:
        """A round on average, without set-up and what follows the last one."""
        played = [found for index, found in self.rounds.items() if 0 <= index < max(self.rounds)] or [RoundTime()]
        mean = RoundTime()
        mean.add(**{part: math.fsum(found.parts[part] for found in played) / len(played) for part in PARTS})
        return mean


# One question


def play(
    tasks: Sequence[Task], conditions: Mapping[int, Conditions], *, cores: int | None, permits: int
) -> list[Spans]:
    """Plays one question to some clients at the same time.

    Args:
        cores: How many clients can compute at a time; None when each has a machine of its own.
        permits: How many large messages the server has under way at a time, in each direction.
    """
    links = [conditions[task.client].link or UNLIMITED for task in tasks]
    down = [link.predict_seconds(task.down, "down") for task, link in zip(tasks, links, strict=True)]
    received = _queue([0.0] * len(tasks), down, [permits if _is_large(task.down) else None for task in tasks])
    compute = [task.compute_s / conditions[task.client].speed for task in tasks]
    # A slower machine takes longer, but gives this machine's core back when it would be done here.
    held = [task.compute_s for task in tasks]
    freed = _queue(received, held, [cores] * len(tasks))
    begun = [end - seconds for end, seconds in zip(freed, held, strict=True)]
    computed = [start + seconds for start, seconds in zip(begun, compute, strict=True)]
    # The headers of a large answer are followed by the bytes a round trip later, when they were granted.
    asked = [
        at + (link.rtt if _is_large(task.up) else 0.0) for at, task, link in zip(computed, tasks, links, strict=True)
    ]
    up = [link.predict_seconds(task.up, "up") for task, link in zip(tasks, links, strict=True)]
    ended = _queue(asked, up, [permits if _is_large(task.up) else None for task in tasks])
    return [Spans(*moments) for moments in zip(received, begun, computed, ended, strict=True)]


def _is_large(size: float) -> bool:
    return size > SMALL_BYTES


def _queue(ready: Sequence[float], seconds: Sequence[float], capacities: Sequence[int | None]) -> list[float]:
    """When each one ends, if so many of those with a capacity are served at a time, first come, first served."""
    ends = [0.0] * len(ready)
    free: list[float] = []
    for place in sorted(range(len(ready)), key=lambda each: ready[each]):
        capacity, start = capacities[place], ready[place]
        if capacity is not None and len(free) >= capacity:
            start = max(start, heapq.heappop(free))
        ends[place] = start + seconds[place]
        if capacity is not None:
            heapq.heappush(free, ends[place])
    return ends


# A run


def predict(run: Run, conditions: Sequence[Conditions], *, cores: int | None) -> Prediction:
    """Predicts a run's rounds under other conditions.

    Args:
        conditions: Of each client.
        cores: As in `play`.

    Raises:
        ConfigError: The run has no timing.jsonl, or had no wire.
    """
    by_client, permits = dict(enumerate(conditions)), int(run.config.get("limits", {}).get("transfers", 4))
    rounds: dict[int, RoundTime] = defaultdict(RoundTime)
    for row in _require_timing(run):
        if isinstance(row, PhaseRow):
            rounds[row.round].add(server=math.fsum(row.parts[part] for part in _SERVER_PARTS))
    for (index, *_), tasks in sorted(_list_questions(run).items()):
        spans = play(tasks, by_client, cores=cores, permits=permits)
        rounds[index].add(**max(spans, key=lambda each: each.ended).parts)
    return Prediction(dict(sorted(rounds.items())))


def predict_over(run: Run, link: str | None) -> tuple[str, Prediction] | None:
    """Predicts a run over a link, or over its own if it was emulated, for clients with machines of their own.

    Returns:
        The link's name and the prediction; None when there is no link, or the run measured no time, or not on a wire.
    """
    own = run.summary.get("emulated", {})
    name = link or own.get("link")
    if not name or run.summary.get("in_process") or next(iter(run.timing()), None) is None:
        return None
    num_clients, seed = int(run.summary["num_clients"]), int(run.summary["seed"])
    conditions = assign_conditions(link, own.get("speed"), num_clients, seed) if link else read_conditions(run)
    return name, predict(run, conditions, cores=None)


def measure(run: Run) -> Prediction:
    """The run's rounds as they were measured, in the form of a prediction."""
    rounds: dict[int, RoundTime] = defaultdict(RoundTime)
    for row in _require_timing(run):
        if isinstance(row, PhaseRow):
            own = {part: seconds for part, seconds in row.parts.items() if part in PARTS}
            rounds[row.round].add(server=math.fsum(row.parts[part] for part in _SERVER_PARTS), **own)
    return Prediction(dict(sorted(rounds.items())))


def _require_timing(run: Run) -> Iterable[TaskRow | PhaseRow]:
    if run.summary.get("in_process"):
        raise ConfigError(
            f"{run.folder} is of a run within one process, in which clients took turns and no wire was measured: run "
            "it with processes, without in_process=True and with another folder"
        )
    rows = list(run.timing())
    if not rows:
        raise ConfigError(
            f"{run.folder} has no timing.jsonl, which tells how long clients computed: an earlier version made it; "
            "run it again, with another --out"
        )
    return rows


def _list_questions(run: Run) -> dict[tuple[int, str, int], list[Task]]:
    """The tasks that were answered, by round, phase and step."""
    rows = [row for row in _require_timing(run) if isinstance(row, TaskRow) and row.outcome == "answered"]
    # A client that was asked again answered once; its last attempt counts.
    last = {(row.round, row.phase, row.step, row.client): row for row in rows}
    steps = Counter((row.round, row.phase, row.client) for row in last.values())
    stages = Counter((row.round, row.client) for row in last.values())
    sizes = _sum_bytes(run)
    speeds = {client: each.speed for client, each in enumerate(read_conditions(run))}
    found: dict[tuple[int, str, int], list[Task]] = defaultdict(list)
    for row in last.values():
        with explain_damage(run.folder / TIMING_FILE):
            if row.client not in speeds:
                raise ValueError(f"it has client {row.client!s:.20}, of {len(speeds)}")
        down, up = (
            sizes[row.round, row.phase, row.client, direction] / steps[row.round, row.phase, row.client]
            # Privacy rows and receipts travel with answers and questions.
            + sizes[row.round, SESSION, row.client, direction] / stages[row.round, row.client]
            for direction in ("down", "up")
        )
        task = Task(row.client, row.compute_s * speeds[row.client], down, up)
        found[row.round, row.phase, row.step].append(task)
    return found


def _sum_bytes(run: Run) -> Counter[tuple[int, str, int, str]]:
    """Message bytes by round, phase, client and direction, without what had to be sent again."""
    sums: Counter[tuple[int, str, int, str]] = Counter()
    for key, row in run.ledger():
        if not key.aborted and not key.repeated:
            sums[key.round, key.phase, key.client, key.direction] += row.message_bytes
    return sums


def read_conditions(run: Run) -> list[Conditions]:
    """The links and speeds that a run's clients had: those of an emulated run, else this machine's."""
    path, num_clients = run.folder / CONDITIONS_FILE, int(run.summary["num_clients"])
    if not path.exists():
        return [Conditions()] * num_clients
    with explain_damage(path):
        rows = json.loads(path.read_bytes())["clients"]
        if len(rows) != num_clients:
            raise ValueError(f"expected {num_clients} clients, got {len(rows)}")
        return [Conditions(_read_link(row), _read_speed(row)) for row in rows]


def _read_link(row: Mapping[str, str]) -> Link | None:
    return parse_link(row["link"]) if "link" in row else None


def _read_speed(row: Mapping[str, str]) -> float:
    speed = float(row.get("speed", 1.0))
    if not 0 < speed <= 1:
        raise ValueError(f"expected a speed above 0 and up to 1, got {speed:g}")
    return speed


def count_cores(run: Run) -> int:
    """How many of the run's clients worked at a time: its `parallel`, or this machine's cores."""
    return int(run.config.get("parallel") or os.cpu_count() or 1)
