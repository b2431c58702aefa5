"""What a tracker is, and how one is chosen by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from fedrpc.errors import ConfigError
from fedrpc.registry import Registry

Value = float | int | str | bool


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run when a tracker opens it.

    Args:
        folder: The run directory.
        run_id: The run's id, which stays the same when it is resumed.
        settings: The configuration, flat: "train.lr" is a key.
        kept: What `open` returned when the run was first tracked; "" the first time.
        first_step: The first step that was not logged yet: 0 for the set-up, where a method has one, and rounds from 1.
    """

    folder: Path
    run_id: str
    settings: Mapping[str, Value]
    kept: str = ""
    first_step: int = 0

    @property
    def name(self) -> str:
        """What people call the run."""
        return self.folder.resolve().name


class Tracker:
    """Writes the values of one run to a tool. It lives in a process of its own, so it may block, and may raise.

    Args:
        target: What follows the colon in `--tracker NAME:TARGET`; "" for the tool's own default.
    """

    packages: ClassVar[Sequence[str]] = ()  # modules that must be installed
    extra: ClassVar[str] = ""  # the extra of fedrpc that installs them

    def __init__(self, target: str) -> None:
        self.target = target

    def open(self, run: RunFacts) -> str:
        """Opens the run in the tool, or opens it again; returns what is needed for that, such as the tool's id."""
        return ""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a round, and flushes them; rounds count from 1, and 0 is the set-up."""
        raise NotImplementedError

    def finish(self, summary: Mapping[str, Value], artifacts: Sequence[Path]) -> None:
        """Writes what a finished run leaves. A run that is resumed with more rounds finishes again."""

    def close(self) -> None:
        """Lets go of the run, finished or not."""


TRACKERS: Registry[type[Tracker]] = Registry("tracker", "trackers")


def make_tracker(spec: str) -> Tracker:
    """Makes a tracker of "name" or "name:target".

    Raises:
        UnknownName: There is none of this name.
        ConfigError: What it needs is not installed.
    """
    name, _, target = spec.partition(":")
    kind = TRACKERS[name]
    for package in kind.packages:
        if find_spec(package) is None:
            remedy = f"pip install 'fedrpc[{kind.extra}]'" if kind.extra else f"pip install {package}"
            raise ConfigError(f"--tracker {name} needs {package}, which is not installed; {remedy}")
    return kind(target)


def check_trackers(specs: Sequence[str]) -> None:
    """Raises, before a run starts, what making these trackers would raise."""
    names = [spec.partition(":")[0] for spec in specs]
    for spec in specs:
        make_tracker(spec)
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--tracker {min(twice)} is given twice; a run goes to one place of each kind")
