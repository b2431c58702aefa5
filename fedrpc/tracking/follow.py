"""Follows a run directory while a server writes it, and gives each finished round to a tracker, once.

A tracker reads what is on disk, in a process of its own: it can neither slow a run down nor stop it. What it has
logged is kept in `trackers/<name>.json` of the run directory, so that a resumed run goes on there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedrpc.errors import ConfigError, FedrpcError
from fedrpc.files import write_atomically
from fedrpc.tail import Tail
from fedrpc.tracking.rows import RoundBytes, RoundPrivacy, describe_bytes, read_records
from fedrpc.tracking.tracker import RunFacts, Tracker, Value, make_tracker

STATE_FOLDER = "trackers"
ARTIFACTS = ("report.html", "model.safetensors", "config.toml", "summary.json")
# Tables of the summary with an entry for each client, class, phase or part: they stay in the run directory.
_LONG = frozenset({"per_client", "per_class", "by_phase", "releases", "tasks", "parts", "ledger_check", "reported"})
_NOT_MEASURED = frozenset({"round", "planned_rounds"})


@dataclass
class State:
    """What a tracker has been given so far.

    Args:
        kept: What its `open` returned.
        num_rounds: Rounds that it has logged.
        has_setup: Whether it has logged the set-up.
        given: The ledger's sums that it has logged so far; None when that was not noted, by an earlier version.
        summary: The hash of the summary that it has logged; "" for none.
    """

    kept: str = ""
    num_rounds: int = 0
    has_setup: bool = False
    given: dict[str, int] | None = None
    summary: str = ""

    @property
    def next_step(self) -> int:
        """The first step that was not logged yet: the set-up is 0."""
        return self.num_rounds + 1 if self.num_rounds or self.has_setup else 0

    def lacks(self, record: Mapping[str, Any]) -> bool:
        """Whether a record is to be logged as a step."""
        if record["event"] == "setup_finished":
            return self.next_step == 0
        return bool(record["event"] == "round_finished" and record["round"] >= self.num_rounds)


class Follower:
    """Follows one run for one tracker.

    Args:
        name: The tracker's name, by which its state is kept.
    """

    def __init__(self, folder: Path, name: str, tracker: Tracker) -> None:
        self._folder, self._tracker = folder, tracker
        self._state_path = folder / STATE_FOLDER / f"{name}.json"
        self._ledger_path = folder / "ledger.jsonl"
        self._records, self._bytes = Tail(folder / "records.jsonl"), RoundBytes(self._ledger_path)
        self._privacy = RoundPrivacy(folder / "privacy.jsonl")
        self._state: State | None = None
        self._is_open = False
        self._delta = 0.0

    def follow(self) -> None:
        """Logs the set-up and the rounds that are new."""
        records = list(read_records(self._records))
        if not records:
            return
        state = self._state = self._state or self._load()
        self._bytes.refresh()
        self._privacy.refresh()
        for record in records:
            if state.lacks(record):
                self._log(state, record["round"], pick_numbers(record))
                self._save()

    def _log(self, state: State, index: int, values: Mapping[str, float]) -> None:
        """Logs a step, with the bytes since the step before: an answer that came late is booked after its round."""
        tracker, before, now = self._open(), self._find_given(state), self._bytes.sum_until(index)
        spent = self._privacy.describe(index, self._delta)
        tracker.log(index + 1, {**values, **describe_bytes(now, before), **spent})
        state.num_rounds, state.has_setup, state.given = index + 1, True, now

    def _find_given(self, state: State) -> dict[str, int]:
        if state.given is not None:
            return state.given
        return self._bytes.sum_until(state.num_rounds - 1) if state.num_rounds else {}

    def end(self) -> None:
        """Logs the rest, the summary if the run is finished, and closes the tracker."""
        self._bytes = RoundBytes(self._ledger_path)  # from the start: of two files in its place one may go unnoticed
        self.follow()
        path = self._folder / "summary.json"
        if path.is_file() and self._folder.joinpath("run_id").is_file():
            text = path.read_bytes()
            self._state = self._state or self._load()
            if self._state.summary != (found := hashlib.sha256(text).hexdigest()):
                artifacts = [self._folder / name for name in ARTIFACTS if (self._folder / name).is_file()]
                summary = flatten(json.loads(text), leave_out=_LONG) | self._list_rest(self._state)
                self._open().finish(summary, artifacts)
                self._state.summary = found
                self._save()
        if self._is_open:
            self._tracker.close()

    def _list_rest(self, state: State) -> dict[str, Value]:
        """The bytes after the last round: with them, those of all steps are those of the summary."""
        self._bytes.refresh()
        before = self._find_given(state)
        rest = {name: size - before.get(name, 0) for name, size in self._bytes.sum_until(math.inf).items()}
        return {f"after_last_round/{name}": size for name, size in rest.items() if size}

    @property
    def num_rounds(self) -> int:
        """The rounds that the tracker has logged."""
        return self._state.num_rounds if self._state else 0

    def _open(self) -> Tracker:
        state = self._state or self._load()
        if not self._is_open:
            run_id = (self._folder / "run_id").read_text(encoding="utf-8").strip()
            config = tomllib.loads((self._folder / "config.toml").read_text(encoding="utf-8"))
            self._delta, settings = float(config["privacy"]["delta"]), flatten(config)
            facts = RunFacts(self._folder, run_id, settings, state.kept, state.next_step)
            state.kept = self._tracker.open(facts)
            self._is_open = True
            self._save()
        return self._tracker

    def _load(self) -> State:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return State(**json.loads(self._state_path.read_bytes()))
        return State()

    def _save(self) -> None:
        self._state_path.parent.mkdir(exist_ok=True)
        write_atomically(self._state_path, json.dumps(asdict(self._state or State())) + "\n")


def track_run(folder: Path, spec: str) -> int:
    """Logs what a tracker has not got yet of a run directory; returns the rounds that it has now.

    Raises:
        ConfigError: There is no run, or no such tracker, or the tool failed.
    """
    if not (folder / "run_id").is_file():
        raise ConfigError(f"no run at {folder}: it has no run_id; give the directory of a run")
    tracker = make_tracker(spec)
    follower = Follower(folder, spec.partition(":")[0], tracker)
    try:
        follower.end()
    except FedrpcError:
        raise
    except Exception as error:  # whatever a tool raises
        raise ConfigError(f"--tracker {spec} failed: {describe_failure(error)}") from None
    return follower.num_rounds


def describe_failure(error: Exception) -> str:
    """What a tool raised, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300] or 'no reason given'}"


def pick_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The plain numbers of a record: accuracy, loss, seconds, and what the method records."""
    found = {name: value for name, value in row.items() if name not in _NOT_MEASURED}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and value is not True}


def flatten(table: Mapping[str, Any], prefix: str = "", leave_out: Collection[str] = ()) -> dict[str, Value]:
    """A table of tables with one level: "train.lr"; lists become text, and what is None is left out."""
    flat: dict[str, Value] = {}
    for name, value in table.items():
        if name in leave_out:
            continue
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.", leave_out)
        elif isinstance(value, float | int | str | bool):
            flat[prefix + name] = value
        elif value is not None:
            flat[prefix + name] = json.dumps(value)
    return flat
