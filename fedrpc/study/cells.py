"""The cells of a comparison: one run for each method, seed and point of a grid, and what such a run is called."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASELINE = "fedavg"
OWN = "params."  # settings of this table belong to a method; all others are shared
_MAX_NAME = 120  # characters of a run directory's name


@dataclass(frozen=True)
class Cell:
    """One run of a comparison.

    Attributes:
        run: Its run directory.
        point: The settings of the grid that apply to the method, by name.
        model: The network, where it is not that of the whole comparison.
        note: What else tells it from another run of the same settings.
    """

    method: str
    seed: int
    run: Path
    point: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    note: str = ""

    @property
    def labels(self) -> list[str]:
        """The name of the cell's row in pieces: the method, and then what tells it from the method's other rows."""
        network = [f"on {self.model}"] if self.model else []
        return [self.method, *network, *map(format_setting, self.point.items()), *([self.note] if self.note else [])]

    @property
    def row(self) -> str:
        """The name of the row in which runs that differ only in their seed stand together."""
        method, *others = self.labels
        network = [others.pop(0)] if self.model else []
        return ", ".join([" ".join([method, *network]), *others])

    @property
    def shared(self) -> str:
        """Seed and shared settings: runs that agree in these have the same partition and the same cohorts."""
        return json.dumps([self.seed, sorted((k, v) for k, v in self.point.items() if not k.startswith(OWN))])

    def is_baseline_of(self, other: Cell) -> bool:
        """Whether this is FedAvg's run of the same network, seed and shared settings."""
        return (self.method, self.model, self.shared) == (BASELINE, other.model, other.shared)


@dataclass(frozen=True)
class Failure:
    """A cell that has no finished run, and why, in one line.

    Attributes:
        refused: Whether the data, the network or another setting does not suit the method, so that it was not started.
    """

    cell: Cell
    reason: str
    exit_code: int = 1
    refused: bool = False


def format_setting(item: tuple[str, Any]) -> str:
    """A setting and its value, as on the command line."""
    name, value = item
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def make_folder_name(method: str, model: str, point: Mapping[str, Any], seed: int | None) -> str:
    """The name of a cell's run directory, which depends on nothing but the cell: a grid can grow.

    Args:
        model: The network, if the method has runs on several.
        seed: None when the comparison has only one.
    """
    pieces = [f"{method}-on-{model}" if model else method, *map(format_setting, point.items())]
    whole = ",".join([*pieces, *([] if seed is None else [f"seed={seed}"])])
    plain = re.sub(r"[^A-Za-z0-9._=+,-]+", "-", whole)
    if plain == whole.replace(":", "-") and len(plain) <= _MAX_NAME:
        return plain
    digest = hashlib.sha256(whole.encode()).hexdigest()[:8]  # two names may have become the same
    return f"{plain[: _MAX_NAME - len(digest) - 1]}-{digest}"
