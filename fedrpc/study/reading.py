"""Reads the directory of a finished run: the one place in this room that knows its files."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedrpc.errors import ConfigError, Damaged
from fedrpc.files import explain_damage, find_changed
from fedrpc.metrics import records as records_file
from fedrpc.metrics.timing import TIMING_FILE, Row, read_timing
from fedrpc.privacy.mechanisms import Coverage
from fedrpc.wire import ledger as wire_ledger
from fedrpc.wire.kinds import DIRECTIONS
from fedrpc.wire.ledger import Key, Sums

FILES = ("config.toml", "summary.json", "partition.json", "records.jsonl", "ledger.jsonl")
_REMEDY = "give the directory of a finished run"


@dataclass
class Flow:
    """Message bytes by direction: the method's own, and the rest (session, evaluation, retries)."""

    own: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0))
    rest: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0))

    def add(self, key: Key, sums: Sums, *, outside: bool) -> None:
        """Adds one row of the ledger."""
        (self.rest if outside else self.own)[key.direction] += sums.message_bytes

    @property
    def total(self) -> int:
        """All message bytes."""
        return sum(self.own.values()) + sum(self.rest.values())


@dataclass(frozen=True)
class Traffic:
    """The ledger, summed by round, by client, and by phase, kind and direction."""

    by_round: Mapping[int, Flow]
    by_client: Mapping[int, Flow]
    by_part: Mapping[tuple[str, str, str], Sums]  # (phase, kind, direction)


@dataclass(frozen=True)
class Releases:
    """Releases of the same parts in the same phase under the same mechanism."""

    phase: str
    kind: str
    parts: tuple[str, ...]
    mechanism: str | None
    parameters: str
    covers: str
    coverage: Coverage
    count: int
    num_clients: int


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        config: config.toml as written, unchecked: the method may not be installed here.
        summary: summary.json.
        records: The lines of records.jsonl.
        partition: The partition's summary, from partition.json.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    partition: Mapping[str, Any]

    @property
    def title(self) -> str:
        """What was run, in a few words."""
        layers = [name for name in self.summary.get("aggregators", []) if name != "mean"]
        return f"{' + '.join([self.summary['method'], *layers])} on {self.summary['dataset']}"

    def ledger(self) -> Iterator[tuple[Key, Sums]]:
        """The rows of ledger.jsonl, one at a time: a long run has millions."""
        return wire_ledger.read_rows(self.folder / "ledger.jsonl")

    def timing(self) -> Iterator[Row]:
        """The rows of timing.jsonl, one at a time; none in a run from before there was such a file."""
        return read_timing(self.folder / TIMING_FILE)

    @cached_property
    def traffic(self) -> Traffic:
        """The ledger, summed in one pass."""
        rounds: dict[int, Flow] = {}
        clients: dict[int, Flow] = {client: Flow() for client in range(self.summary["num_clients"])}
        parts: dict[tuple[str, str, str], Sums] = {}
        rows: wire_ledger.Rows = {}
        for key, sums in self.ledger():
            wire_ledger.merge(rows, {key: sums})
        outside = wire_ledger.find_other_rows(rows)  # the rule of `bytes.method` in summary.json
        for key, sums in rows.items():
            rounds.setdefault(key.round, Flow()).add(key, sums, outside=key in outside)
            clients.setdefault(key.client, Flow()).add(key, sums, outside=key in outside)
            parts.setdefault((key.phase, key.kind, key.direction), Sums()).add(sums)
        return Traffic(dict(sorted(rounds.items())), clients, dict(sorted(parts.items())))

    @cached_property
    def rounds(self) -> list[Mapping[str, Any]]:
        """The round_finished lines, in order."""
        return [row for row in self.records if row["event"] == "round_finished"]

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(round, value) of "accuracy" or "loss", where it was measured, also after finalising."""
        rows = [row for row in self.records if row["event"] == "round_finished" or row.get("final")]
        return [(row["round"], float(row[name])) for row in rows if row.get(name) is not None]

    @cached_property
    def client_accuracies(self) -> list[tuple[int, dict[int, float]]]:
        """(round, percent by client) for each evaluation on the clients' local test sets, if they have one."""
        found = []
        for row in self.records:
            values = {
                int(client): 100.0 * counts["correct"] / counts["of"]
                for client, counts in (row.get("per_client") or {}).items()
                if counts["of"]
            }
            if values:
                found.append((row["round"], dict(sorted(values.items()))))
        return found

    @cached_property
    def local_losses(self) -> dict[int, list[tuple[int, list[float]]]]:
        """By client, (round, loss of each local epoch) for each round it took part in."""
        found: dict[int, list[tuple[int, list[float]]]] = {}
        for row in self.rounds:
            for client, losses in (row.get("local_losses") or {}).items():
                if None not in losses:  # recorded, and finite
                    found.setdefault(int(client), []).append((row["round"], list(losses)))
        return dict(sorted(found.items()))

    @property
    def classes(self) -> list[str]:
        """Names of the classes where partition.json has them, else their numbers."""
        count = int(self.partition["num_classes"])
        names = self.partition.get("classes") or range(count)
        return [str(name) for name in names]

    @cached_property
    def releases(self) -> list[Releases]:
        """privacy.jsonl, with equal releases counted together; different parameters of a mechanism are kept apart."""
        path = self.folder / "privacy.jsonl"
        with explain_damage(path):
            return _group_releases(records_file.read_records(path))


def _group_releases(rows: Iterable[Mapping[str, Any]]) -> list[Releases]:
    seen: dict[tuple[str, str, tuple[str, ...], str | None, str, str, Coverage], list[int]] = {}
    for row in rows:
        parameters = ", ".join(f"{name} {value}" for name, value in row["parameters"].items())
        covers = (row["covers"], Coverage(row["coverage"]))
        key = (row["phase"], row["kind"], tuple(row["parts"]), row["mechanism"], parameters, *covers)
        seen.setdefault(key, []).append(row["client"])
    return [
        Releases(*key, len(clients), len(set(clients)))
        for key, clients in sorted(seen.items(), key=lambda item: str(item[0]))
    ]


def read_run(folder: Path) -> Run:
    """Reads the finished run in `folder`.

    Raises:
        ConfigError: There is none, it is not finished, or a file cannot be read.
    """
    check_finished(folder)
    for fault in find_changed(folder, (*FILES, TIMING_FILE)):
        raise Damaged(fault)
    run = Run(
        folder=folder,
        config=_parse(folder / "config.toml", lambda path: tomllib.loads(path.read_text(encoding="utf-8"))),
        summary=_parse(folder / "summary.json", _read_json),
        records=_parse(folder / "records.jsonl", lambda path: list(records_file.read_records(path))),
        partition=_parse(folder / "partition.json", _read_json),
    )
    asked, played = run.config.get("rounds"), run.summary.get("num_rounds")
    if asked != played and not run.summary.get("stopped"):  # it was started again, and summary.json is older
        raise ConfigError(
            f"the run in {folder} is not finished: config.toml asks for {asked} rounds, summary.json has {played}; "
            f"resume it with `fedrpc run --config {folder}/config.toml --out {folder}`"
        )
    return run


def check_finished(folder: Path, files: Sequence[str] = FILES) -> None:
    """Raises ConfigError, with the remedy, unless `folder` has these files of a finished run."""
    if not folder.is_dir():
        raise ConfigError(f"no run at {folder}: there is no such folder; {_REMEDY}")
    if (folder / "compare.json").is_file():
        runs = sorted(path.parent for path in folder.glob("*/summary.json"))
        raise ConfigError(f"{folder} holds a comparison; give one of its runs{f', such as {runs[0]}' if runs else ''}")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing and not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} holds no run: it has no {missing[0]}; {_REMEDY}")
    if "summary.json" in missing:
        raise ConfigError(
            f"the run in {folder} is not finished: it has no summary.json; "
            f"resume it with `fedrpc run --config {folder}/config.toml --out {folder}`"
        )
    if missing:
        raise ConfigError(
            f"the run in {folder} is incomplete: it has no {', no '.join(missing)}; run it again, with another --out"
        )


def _read_json(path: Path) -> Any:
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got {str(found)[:40]}")
    return found


def _parse(path: Path, parse: Callable[[Path], Any]) -> Any:
    try:
        with explain_damage(path):
            return parse(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
