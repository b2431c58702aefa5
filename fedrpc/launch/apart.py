"""Runs the launcher in a Python process of its own, for callers that must not fork: notebooks, threads, torch at work.

The launcher forks servers and clients from memory in which nothing has happened but imports. A process in which anybody
may have started threads or an event loop, or used torch, is no such memory. So it starts a fresh interpreter, which
does what `fedrpc run` and `fedrpc compare` do, and hears what happens there.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fedrpc import log
from fedrpc.config import build
from fedrpc.errors import ConfigError, FedrpcError, MethodFailed, Unavailable, WireError
from fedrpc.launch.plan import Planned, Request, plan_runs
from fedrpc.process import die_with_parent, end_at_once, end_process, exit_code_of

_TICK_S = 0.1
_GRACE_S = 40.0  # for a comparison that was asked to end, which gives its runs 30 seconds
_RAISED = {cls.exit_code: cls for cls in (ConfigError, Unavailable, WireError, MethodFailed)}
_ERROR = "error: "


class Listener(Protocol):
    """Hears what happens in the other process."""

    def receive(self, message: dict[str, Any]) -> None:
        """Something happened."""

    def refresh(self) -> None:
        """Called several times a second."""


def launch_apart(order: Mapping[str, Any], listener: Listener) -> None:
    """Has a process of its own carry out an order, and blocks until that is done.

    What the other process prints is printed here. When this call is interrupted, every process is ended first.

    Args:
        order: What `main` takes.

    Raises:
        FedrpcError: What ended the work early, of the class that the exit code stands for.
    """
    reader, writer = os.pipe()
    command = [sys.executable, "-P", "-m", __name__, str(writer), str(os.getpid())]
    # What can be imported here can be imported there, such as a package of methods beside the caller's script.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[writer],
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the other in order
    )
    os.close(writer)
    assert child.stdin and child.stdout and child.stderr
    try:
        child.stdin.write(json.dumps(order, default=str).encode())
        child.stdin.close()
        error = _Watch(child, reader, listener).run()
    finally:
        _end(child)
        os.close(reader)
        for stream in (child.stdout, child.stderr):
            stream.close()
    if child.returncode:
        cls = _RAISED.get(child.returncode, FedrpcError)
        raise cls(error or f"the process of the run ended with code {child.returncode}; its messages say why")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs: asks first, then kills; its children end with it."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_GRACE_S)
        finally:
            child.kill()
            child.wait()


class _Watch:
    """Passes on what another process says, until it ends."""

    def __init__(self, child: subprocess.Popen[bytes], events: int, listener: Listener) -> None:
        self._child, self._events, self._listener = child, events, listener
        assert child.stdout and child.stderr
        self._handlers = {
            events: lambda line: listener.receive(json.loads(line)),
            child.stdout.fileno(): lambda line: print(line.decode(errors="replace")),
            child.stderr.fileno(): self._handle_error,
        }
        self._buffers = dict.fromkeys(self._handlers, b"")
        self._error = ""

    def run(self) -> str:
        """Blocks until the process has ended; returns its last error line."""
        with selectors.DefaultSelector() as selector:
            for fd in self._handlers:
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ)
            while True:
                ended = self._child.poll() is not None  # before reading: what it wrote is all there then
                for key, _ in selector.select(0 if ended else _TICK_S):
                    if not self._read(key.fd):
                        selector.unregister(key.fd)
                self._listener.refresh()
                if ended:
                    for fd in self._handlers:
                        while self._read(fd):
                            pass
                    return self._error
                if not selector.get_map():
                    self._child.wait()

    def _read(self, fd: int) -> bool:
        """Handles the lines that have come; false when there is nothing more."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        *lines, self._buffers[fd] = (self._buffers[fd] + data).split(b"\n")
        for line in lines:
            self._handlers[fd](line)
        return bool(data)

    def _handle_error(self, line: bytes) -> None:
        """Keeps an error for the exception, and shows everything else."""
        text = line.decode(errors="replace")
        if text.startswith(_ERROR):
            self._error = text.removeprefix(_ERROR)
        else:
            print(text, file=sys.stderr)


# In the other process


def main() -> None:
    """Carries out one order, which comes as JSON on standard input; events go to a pipe.

    An order has either `run`, the values of a run, or `compare`, a request; and what `local.open_run` or
    `compare.open_workshop` take.
    """
    events, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    os.set_inheritable(events, False)
    signal.signal(signal.SIGTERM, end_at_once)
    order = json.load(sys.stdin)
    log.set_up(order["log_level"], role="run")
    end_process(exit_code_of(lambda: _carry_out(order, events)))


def _carry_out(order: Mapping[str, Any], events: int) -> None:
    paths = {name: Path(order[name]) if order[name] else None for name in ("out", "data_dir")}
    shared = paths | {
        "num_hosts": order["hosts"],
        **{name: order[name] for name in ("log_level", "allows_changed_code")},
    }
    if "run" in order:
        _run(order["run"], shared, events)
    else:
        _compare(order["compare"], shared | {"jobs": order["jobs"]}, events)


def _run(values: Mapping[str, Any], shared: Mapping[str, Any], events: int) -> None:
    from fedrpc.launch.jobs import PipeWatcher
    from fedrpc.launch.launcher import Launcher
    from fedrpc.launch.local import open_run

    run = open_run(build(values), **shared)
    Launcher(run, PipeWatcher(events)).run()
    from fedrpc.report.page import write_page  # here, so that the run does not wait for its imports

    write_page(run.out)


def _compare(request: Mapping[str, Any], shared: Mapping[str, Any], events: int) -> None:
    from fedrpc.launch.compare import open_workshop
    from fedrpc.launch.jobs import run_cells

    plan = plan_runs(Request(**request))
    display = _PipeDisplay(events, plan.runs)
    for failure in run_cells(plan.runs, open_workshop(plan, **shared), display):
        place = next(place for place, planned in enumerate(plan.runs) if planned.cell is failure.cell)
        found = {"reason": failure.reason, "exit_code": failure.exit_code, "refused": failure.refused}
        display.send("failure", place, found)


class _PipeDisplay:
    """Passes on what happens in a comparison; a run is named by its place in the plan."""

    def __init__(self, events: int, runs: Sequence[Planned]) -> None:
        self._events, self._places = events, {planned.label: place for place, planned in enumerate(runs)}

    def send(self, what: str, place: int, values: Mapping[str, Any]) -> None:
        """Writes one line."""
        os.write(self._events, json.dumps({"what": what, "run": place, "values": values}).encode() + b"\n")

    def announce(self, run: Planned, event: str, **values: Any) -> None:
        """Passes on what becomes of a run."""
        self.send("announce", self._places[run.label], {"event": event} | values)

    def event(self, run: Planned, name: str, values: dict[str, Any]) -> None:
        """Passes on what happens in a run."""
        self.send("event", self._places[run.label], {"name": name} | values)

    def end(self, run: Planned) -> None:
        """Passes on that a run is over."""
        self.send("end", self._places[run.label], {})

    def refresh(self) -> None:
        """Nothing: lines are written when they come."""


if __name__ == "__main__":
    main()
