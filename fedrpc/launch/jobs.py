"""Runs the cells of a comparison, each in a child process of its own, so many at a time as there are to be."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedrpc import config as settings
from fedrpc.errors import ConfigError, FedrpcError
from fedrpc.launch.launcher import Launcher, LocalRun, Watcher
from fedrpc.launch.plan import Planned
from fedrpc.launch.processes import decode_status, fork, preload, terminate, wait_or_kill
from fedrpc.launch.trackers import tracking
from fedrpc.launch.usage import note_usage
from fedrpc.process import Stopped, exit_code_of, raise_stopped
from fedrpc.report.page import write_page
from fedrpc.server.checkpoint import count_durable_rounds
from fedrpc.server.run import check_config, is_complete
from fedrpc.study.cells import Failure

_TICK_S = 0.1
_GRACE_S = 30.0  # for a run that was asked to end: its server has ten seconds, and so have its clients


class Display(Protocol):
    """Hears what happens in a comparison."""

    def announce(self, run: Planned, event: str, **values: Any) -> None:
        """A run starts, resumes, was finished already, is refused, or fails."""

    def event(self, run: Planned, name: str, values: dict[str, Any]) -> None:
        """Something happened in a run that is under way."""

    def end(self, run: Planned) -> None:
        """A run is over."""

    def refresh(self) -> None:
        """Called several times a second."""


@dataclass(frozen=True)
class Workshop:
    """Where and how the cells of a comparison are run.

    Args:
        folder: Holds their run directories.
        data_dir: The folder of data sets.
        log_level: Of all processes.
        num_hosts: The processes among which the clients of a run are divided; None for a process for each client.
        jobs: How many runs are under way at a time.
        allows_changed_code: Whether runs go on although the user's own code was changed.
        trackers: What else is told of every run.
    """

    folder: Path
    data_dir: Path | None
    log_level: str
    num_hosts: int | None = None
    jobs: int = 1
    allows_changed_code: bool = False
    trackers: Sequence[str] = ()

    def open_run(self, planned: Planned) -> LocalRun:
        """A cell as a run on this machine; the runs that are under way share the cores."""
        out = self.folder / planned.cell.run
        changed = self.allows_changed_code
        return LocalRun(planned.config, out, self.data_dir, self.log_level, self.num_hosts, changed, num_runs=self.jobs)


def choose_jobs(num_cells: int, cores: int | None = None) -> int:
    """How many runs to have under way when nobody says: each has clients for four cores."""
    return max(1, min(num_cells, (cores or os.cpu_count() or 1) // 4))


class Interrupted(FedrpcError):
    """A signal stopped the comparison; it is no error, so it has no message.

    Attributes:
        place: Where, and how to go on.
    """

    def __init__(self, place: str, code: int) -> None:
        super().__init__("")
        self.place, self.exit_code = place, code


@dataclass
class _Job:
    """A run that is under way."""

    planned: Planned
    pid: int
    reader: int
    log_path: Path
    log_start: int
    buffer: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> None:
        """Takes the events that have come."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.reader, 65536):
                self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        self.events = [json.loads(line) for line in lines]


def run_cells(runs: Sequence[Planned], workshop: Workshop, display: Display) -> list[Failure]:
    """Runs every cell that is not finished yet; one that fails stops no other.

    Raises:
        Interrupted: By a signal; every process has ended then.
    """
    left = []
    for planned in runs:
        if is_finished(workshop.open_run(planned)):
            display.announce(planned, "finished_already")
        else:
            left.append(planned)
    if not left:
        return []
    crew = _Crew(left, workshop, display)
    with _stopping_on_signals():
        try:
            for planned in left:
                preload(planned.config)
            crew.refuse(find_refused(left, workshop))
            crew.run()
        except (KeyboardInterrupt, Stopped) as stopped:
            code = stopped.exit_code if isinstance(stopped, Stopped) else 128 + signal.SIGINT
            raise Interrupted(crew.describe_stop(len(runs)), code) from None
    return crew.failures


@contextlib.contextmanager
def _stopping_on_signals() -> Iterator[None]:
    previous = signal.signal(signal.SIGTERM, raise_stopped)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class _Crew:
    """The child processes of a comparison."""

    def __init__(self, waiting: Sequence[Planned], workshop: Workshop, display: Display) -> None:
        self._waiting, self._workshop, self._display = list(waiting), workshop, display
        self._busy: list[_Job] = []
        self.failures: list[Failure] = []

    def refuse(self, reasons: Mapping[Path, str]) -> None:
        """Gives up runs that need not be started, by run directory."""
        for planned in [planned for planned in self._waiting if planned.cell.run in reasons]:
            reason = reasons[planned.cell.run]
            self._waiting.remove(planned)
            self._display.announce(planned, "refused", reason=reason)
            self.failures.append(Failure(planned.cell, reason, ConfigError.exit_code, refused=True))

    def run(self) -> None:
        """Blocks until every run is over."""
        try:
            while self._waiting or self._busy:
                while len(self._busy) < self._workshop.jobs and (planned := self._take_next()):
                    if lacks := [failure for failure in self.failures if failure.cell.run == planned.after]:
                        self._give_up(planned, f"it needs {lacks[0].cell.note or lacks[0].cell.run}, which failed")
                    else:
                        self._start(planned)
                assert self._busy or not self._waiting, "runs wait for each other"
                self._watch()
        except BaseException:
            for job in self._busy:
                terminate(job.pid)
            wait_or_kill([job.pid for job in self._busy], _GRACE_S)
            raise

    def _take_next(self) -> Planned | None:
        """The first waiting run that needs none of those that are not over yet."""
        to_come = {planned.cell.run for planned in [*self._waiting, *(job.planned for job in self._busy)]}
        for planned in self._waiting:
            if planned.after not in to_come:
                self._waiting.remove(planned)
                return planned
        return None

    def _give_up(self, planned: Planned, reason: str) -> None:
        self._display.announce(planned, "failed", reason=reason)
        self.failures.append(Failure(planned.cell, reason, ConfigError.exit_code))

    def describe_stop(self, total: int) -> str:
        """Where a signal stopped the comparison, once its processes have ended, and how to go on."""
        where = [self._describe_place(job.planned) for job in self._busy]
        left = len(self._busy) + len(self._waiting)
        under_way = f" in {', '.join(where)}" if where else ""
        return f"stopped{under_way}; {left} of {total} runs are left: the same command again goes on from there"

    def _describe_place(self, planned: Planned) -> str:
        # By the checkpoint, not by events: that of a round comes later, when it is evaluated beside the next one.
        done = count_durable_rounds(self._workshop.open_run(planned).out / "checkpoints")
        return f"{planned.label} after {min(done, planned.config.rounds)} of {planned.config.rounds} rounds"

    def _start(self, planned: Planned) -> None:
        run = self._workshop.open_run(planned)
        log_path = run.out.with_name(f"{run.out.name}.log")
        size = log_path.stat().st_size if log_path.exists() else 0
        self._display.announce(planned, "resumes" if (run.out / "config.toml").exists() else "starts")
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the child would write what they hold a second time
        pid = fork(lambda: _work(run, log_path, writer, self._workshop.trackers))
        os.close(writer)
        self._busy.append(_Job(planned, pid, reader, log_path, size))

    def _watch(self) -> None:
        select.select([job.reader for job in self._busy], [], [], _TICK_S)
        for job in list(self._busy):
            ended, status = os.waitpid(job.pid, os.WNOHANG)  # before reading: what it wrote is all there then
            job.read()
            for event in job.events:
                name = event.pop("event")
                self._display.event(job.planned, name, event)
            if ended:
                self._busy.remove(job)
                self._end(job, decode_status(status))
        self._display.refresh()

    def _end(self, job: _Job, code: int) -> None:
        os.close(job.reader)
        self._display.end(job.planned)
        if code:
            reason = find_last_error(job.log_path, job.log_start) or f"its process ended with code {code}"
            self._display.announce(job.planned, "failed", reason=reason)
            self.failures.append(Failure(job.planned.cell, reason, code))
        with contextlib.suppress(FileNotFoundError):
            if not job.log_path.stat().st_size:
                job.log_path.unlink()


def _work(run: LocalRun, log_path: Path, writer: int, trackers: Sequence[str]) -> int:
    """What a child does: one run, with standard error in a log, so that the reason of a failure can be read there."""
    with log_path.open("ab") as file:
        os.dup2(file.fileno(), 2)

    def play() -> None:
        with tracking(trackers, run.out):
            Launcher(run, PipeWatcher(writer)).run()
            write_page(run.out)

    code = exit_code_of(play)
    note_usage(run.out)
    return code


class PipeWatcher(Watcher):
    """Passes the plain values of events on."""

    def __init__(self, writer: int) -> None:
        self._writer = writer

    def event(self, name: str, values: dict[str, Any]) -> None:
        """Writes one line."""
        plain = {key: value for key, value in values.items() if isinstance(value, str | int | float | None)}
        os.write(self._writer, json.dumps(plain | {"event": name}).encode() + b"\n")


# Before and after


def find_refused(runs: Sequence[Planned], workshop: Workshop) -> dict[Path, str]:
    """Finds the runs that their servers would refuse, at once instead of in their turn: reasons by run directory.

    In a child process, since the processes that fork clients must not have used torch. Of runs that differ only in
    their seed, one is tried.
    """
    reader, writer = os.pipe()
    first = {planned.cell.row: planned.config for planned in reversed(runs)}

    def check() -> int:
        os.close(reader)
        found: dict[str, str] = {}
        for row, config in first.items():
            try:
                check_config(config, workshop.data_dir)
            except ConfigError as error:
                found[row] = str(error)
        with os.fdopen(writer, "w") as file:
            file.write(json.dumps(found))
        return 0

    pid = fork(check)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read()
    os.waitpid(pid, 0)
    reasons = json.loads(text) if text else {}  # a child that broke down: each server finds out by itself
    return {planned.cell.run: reasons[planned.cell.row] for planned in runs if planned.cell.row in reasons}


def is_finished(run: LocalRun) -> bool:
    """Whether the run directory holds this run with all its rounds; the launcher handles everything else."""
    try:
        stored = settings.read_stored(run.out / "config.toml")
        summary = json.loads((run.out / "summary.json").read_text())
        # The stored configuration has the name that "auto" stood for, which follows from data set and method.
        wanted = run.config.model_copy(update={"model": stored.model} if run.config.model == "auto" else {})
        return stored.hash == wanted.hash and is_complete(summary, stored) and is_complete(summary, wanted)
    except (ConfigError, OSError, ValueError, KeyError):
        return False


def find_last_error(log_path: Path, start: int) -> str:
    """The last error line of a log, or else its last line, from byte `start` on; "" when there is none."""
    if not log_path.exists():
        return ""
    with log_path.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]
