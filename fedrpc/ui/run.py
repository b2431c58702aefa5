"""Follows one run by the files of its run directory, reading only what is new."""

from __future__ import annotations

import json
import tomllib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrpc.errors import Damaged
from fedrpc.metrics.progress import Snapshot, read_snapshot
from fedrpc.tail import Tail
from fedrpc.ui.privacy import Spending
from fedrpc.ui.status import Status, is_held

_MOMENTS = 8  # over which a rate is taken: messages are booked when they are whole, so bytes come in lumps
Locks = set[tuple[str, int, int]]


@dataclass(frozen=True)
class Round:
    """A round that is over; rounds count from 0."""

    index: int
    accuracy: float | None
    loss: float | None
    seconds: float
    num_clients: int
    absent: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # late, gone, missing, abstained


@dataclass(frozen=True)
class Rate:
    """How fast bytes flow at the moment, by direction, in bytes a second."""

    down: float = 0.0
    up: float = 0.0


class LiveRun:
    """What is known of a run so far.

    Args:
        folder: The run directory.
        name: Its path below the folder that is watched.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.config: Mapping[str, Any] = {}
        self.summary: Mapping[str, Any] = {}
        self.snapshot: Snapshot | None = None
        self.status: Status = "starting"
        self.rounds: dict[int, Round] = {}
        self.final: tuple[float | None, float | None] = (None, None)  # accuracy and loss after finalising
        self.bytes_by_round: dict[int, dict[tuple[str, str], int]] = {}  # by direction and kind
        self.rate = Rate()
        self.spending = Spending(folder / "privacy.jsonl")
        self.damage: dict[str, str] = {}  # by file, one line each
        self.version = 0  # changes with whatever the list shows
        self.num_lines = {"records.jsonl": 0, "ledger.jsonl": 0}  # read so far, also those that were read again
        self._records, self._ledger = Tail(folder / "records.jsonl"), Tail(folder / "ledger.jsonl")
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._moments: deque[tuple[float, int, int]] = deque(maxlen=_MOMENTS)  # (time, bytes down, bytes up)

    # Reading

    def refresh(self, locks: Locks, *, closely: bool = False) -> None:
        """Reads what is new.

        Args:
            closely: Whether to follow the ledger and the privacy rows, too, which are large.
        """
        before = (self.status, len(self.rounds), self.snapshot, tuple(self.damage.items()))
        if self._has_changed("config.toml"):
            self.config = self._parse("config.toml", tomllib.loads) or self.config
        if self._has_changed("summary.json"):  # also from one that is disregarded
            self.summary = self._parse("summary.json", json.loads) or {}
            self._forget_ledger()  # of two files in its place one may have gone unnoticed
        self._read_snapshot()
        self.status = self._find_status(locks)
        self._read_records()
        if closely:
            self._read_ledger()
            if not self.summary:
                self.spending.refresh()
        if before != (self.status, len(self.rounds), self.snapshot, tuple(self.damage.items())):
            self.version += 1

    def _has_changed(self, name: str) -> bool:
        try:
            found = (self.folder / name).stat()
            stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
        except OSError:
            stamp = (0, 0, 0)
        changed = stamp != self._stamps.get(name)
        self._stamps[name] = stamp
        return changed

    def _parse(self, name: str, parse: Any) -> Any:
        self.damage.pop(name, None)
        try:
            found = parse((self.folder / name).read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return found
            self.damage[name] = f"{name} is damaged: expected an object"
        except OSError:
            pass
        except (ValueError, RecursionError) as error:
            self.damage[name] = f"{name} is damaged: {str(error)[:120]}"
        return None

    def disregard_summary(self, why: Exception) -> None:
        """Shows the run as if it had no summary, which is other than it should be."""
        self.summary, self.status = {}, "stopped"
        self.damage["summary.json"] = f"summary.json is damaged: {type(why).__name__}: {str(why)[:120]}"
        self.version += 1

    def _read_snapshot(self) -> None:
        if not self._has_changed("progress.json"):
            return
        self.damage.pop("progress.json", None)
        before = self.snapshot
        try:
            self.snapshot = read_snapshot(self.folder)
        except (Damaged, OSError) as error:
            self.damage["progress.json"] = str(error)[:200]
        now = self.snapshot
        if now is None or (before and before.run_id != now.run_id):
            self._moments.clear()
        if now:
            self._moments.append((now.written_at, _add_up(now, "down"), _add_up(now, "up")))
            self.rate = _measure_rate(self._moments[0], self._moments[-1])

    def _find_status(self, locks: Locks) -> Status:
        asked, played = self.config.get("rounds"), self.summary.get("num_rounds")
        if self.summary and (asked == played or self.summary.get("stopped")):
            return "finished"
        if is_held(self.folder, self.snapshot, locks):
            return "running"
        if not self.config and not self.damage:
            return "starting"
        ended = self.snapshot.ended if self.snapshot else ""
        if (self.folder / "error.log").exists() or (ended and not ended.startswith("stopped by a signal")):
            return "failed"
        return "stopped"

    def _read_records(self) -> None:
        news = self._records.read()
        if news.restarted:
            self.rounds, self.final = {}, (None, None)
        for row in self._load("records.jsonl", news.lines):
            if row.get("event") == "round_finished":
                found = _read_round(row)
                self.rounds[found.index] = found
            elif row.get("final"):
                self.final = _read_number(row.get("accuracy")), _read_number(row.get("loss"))

    def _forget_ledger(self) -> None:
        self._ledger, self.bytes_by_round = Tail(self._ledger.path), {}

    def _read_ledger(self) -> None:
        news = self._ledger.read()
        if news.restarted:
            self.bytes_by_round = {}
        for row in self._load("ledger.jsonl", news.lines):
            kinds = self.bytes_by_round.setdefault(row["round"], {})
            key = (str(row["direction"]), str(row["kind"]))
            kinds[key] = kinds.get(key, 0) + int(row["message_bytes"])

    def _load(self, name: str, lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
        """The rows of new lines; what is damaged is left out, and said once."""
        for line in lines:
            try:
                row = json.loads(line)
                row["round"] += 0  # a number, since all else hangs on it
                self.num_lines[name] += 1
                yield row
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                self.damage[name] = f"{name} has a line that cannot be read: {line[:60].decode(errors='replace')}"

    # What others ask

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.config.get("method", "?"))

    @property
    def num_rounds(self) -> int:
        """How many rounds the run is to have."""
        return _read_int(self.config.get("rounds"))

    @property
    def num_done(self) -> int:
        """How many rounds are over."""
        return max(self.rounds, default=-1) + 1

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(round from 1, value) of "accuracy" or "loss", where it was measured, also after finalising."""
        points = [(index + 1, getattr(found, name)) for index, found in sorted(self.rounds.items())]
        points.append((max(1, self.num_done), self.final[0 if name == "accuracy" else 1]))
        return list({index: float(value) for index, value in points if value is not None}.items())

    @property
    def seconds_left(self) -> float | None:
        """How long the rest may take, by the last rounds."""
        last = [found.seconds for _, found in sorted(self.rounds.items())[-5:]]
        if self.status != "running" or not last:
            return None
        return max(0, self.num_rounds - self.num_done) * sum(last) / len(last)

    @property
    def message_bytes(self) -> dict[str, dict[str, int]]:
        """Message bytes so far, by direction and kind; of a finished run by its ledger, if that is followed."""
        if self.snapshot and self.status != "finished":
            return {d: dict(self.snapshot.message_bytes.get(d, {})) for d in ("down", "up")}
        found: dict[str, dict[str, int]] = {"down": {}, "up": {}}
        for (direction, kind), size in (item for kinds in self.bytes_by_round.values() for item in kinds.items()):
            if direction in found:
                found[direction][kind] = found[direction].get(kind, 0) + size
        return found

    @property
    def total_bytes(self) -> int | None:
        """All message bytes so far, both ways; None when nothing tells."""
        if self.status == "finished":
            total = (self.summary.get("bytes") or {}).get("total") or {}
            return sum(total[d]["message"] for d in ("down", "up")) if total else None
        return _add_up(self.snapshot, "down") + _add_up(self.snapshot, "up") if self.snapshot else None

    def bytes_until(self) -> dict[int, int]:
        """Message bytes from the start to the end of each round (from 1)."""
        found, total = {}, 0
        for index, kinds in sorted(self.bytes_by_round.items()):
            total += sum(kinds.values())
            found[index + 1] = total
        return found


def _add_up(found: Snapshot, direction: str) -> int:
    return sum(found.message_bytes.get(direction, {}).values())


def _measure_rate(first: tuple[float, int, int], last: tuple[float, int, int]) -> Rate:
    seconds = last[0] - first[0]
    return Rate(max(0, last[1] - first[1]) / seconds, max(0, last[2] - first[2]) / seconds) if seconds > 0 else Rate()


def _read_round(row: Mapping[str, Any]) -> Round:
    part = row.get("participation")
    part = part if isinstance(part, dict) else {}
    absent = {
        name: tuple(part[name]) for name in ("late", "gone", "missing", "abstained") if isinstance(part.get(name), list)
    }
    return Round(
        int(row["round"]),
        _read_number(row.get("accuracy")),
        _read_number(row.get("loss")),
        _read_number(row.get("seconds")) or 0.0,
        _read_int(row.get("num_clients")),
        {name: who for name, who in absent.items() if who},
    )


def _read_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _read_int(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
