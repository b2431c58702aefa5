"""`fedrpc run`: one server process and N client processes on this machine, watched until the run is over."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrpc import log
from fedrpc.config import RunConfig
from fedrpc.errors import FedrpcError, Unavailable
from fedrpc.launch.nursery import Nursery, preload
from fedrpc.process import Stopped, die_with_parent, exit_code_of, run_async

_MAX_RESTARTS = 5  # of one client, between two finished rounds
_GRACE_S = 10.0  # between SIGTERM and SIGKILL


class RunFailed(FedrpcError):
    """The server ended before the run did; it has already said why."""

    def __init__(self, code: int) -> None:
        super().__init__("")
        self.exit_code = code


class Watcher:
    """What the launcher tells about; the display implements it."""

    def open(self) -> None:
        """All processes are forked: from here on there may be threads, such as one that draws."""

    def event(self, name: str, values: dict[str, Any]) -> None:
        """Something happened in the run."""

    def close(self) -> None:
        """The run is over."""


@dataclass(frozen=True)
class LocalRun:
    """One local run."""

    config: RunConfig
    out: Path
    data_dir: Path | None
    log_level: str


def fork(work: Callable[[], int]) -> int:
    """Forks a child in a process group of its own, so that Ctrl-C reaches the launcher alone."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        code = work()
    except BaseException:
        traceback.print_exc()  # a fault of ours: os._exit would hide it
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Launcher:
    """Starts the processes, restarts clients that die, and ends everything.

    Args:
        run: What to run.
        watcher: Who is told.
    """

    def __init__(self, run: LocalRun, watcher: Watcher) -> None:
        self._run, self._watcher = run, watcher
        self._restarts: dict[int, int] = {}
        self._address = ""
        self._over = False
        self._server_pid = self._nursery_pid = 0
        self._log = log.get("launch")

    def run(self) -> None:
        """Blocks until the run is over; raises what ended it early."""
        preload()
        nursery, theirs = socket.socketpair()
        reader, writer = os.pipe()
        self._nursery_pid = fork(lambda: self._nursery(theirs, nursery, reader, writer))
        self._server_pid = fork(lambda: self._server(writer, reader, nursery, theirs))
        theirs.close()
        os.close(writer)
        self._control = nursery
        self._watcher.open()
        previous = signal.signal(signal.SIGTERM, raise_stopped)
        try:
            self._watch(reader)
        finally:
            signal.signal(signal.SIGTERM, previous)
            self._end()
            self._watcher.close()

    # The two children

    def _nursery(self, control: socket.socket, other: socket.socket, *pipes: int) -> int:
        other.close()
        for fd in pipes:
            os.close(fd)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        Nursery(control).run()
        return 0

    def _server(self, writer: int, reader: int, *sockets: socket.socket) -> int:
        from fedrpc.server.run import ServerOptions, serve

        os.close(reader)
        for other in sockets:
            other.close()
        events = os.fdopen(writer, "w", buffering=1)

        def progress(name: str, values: dict[str, Any]) -> None:
            events.write(json.dumps({"event": name} | values) + "\n")

        options = ServerOptions("127.0.0.1:0", self._run.out, self._run.data_dir)
        log.set_up(self._run.log_level, stream=sys.stderr, role="server")
        return exit_code_of(lambda: run_async(serve(self._run.config, options, progress)))

    # Watching

    def _watch(self, reader: int) -> None:
        buffers = {reader: b"", self._control.fileno(): b""}
        with selectors.DefaultSelector() as selector:
            for fd in buffers:
                selector.register(fd, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(timeout=1.0):
                    data = _read(key.fd)
                    *lines, buffers[key.fd] = (buffers[key.fd] + data).split(b"\n")
                    for line in lines:
                        self._hear(json.loads(line))
                    if not data and key.fd == reader:
                        return self._server_ended()
                    if not data:
                        raise Unavailable("the process that starts clients ended; run the same command again to go on")

    def _hear(self, message: dict[str, Any]) -> None:
        if "exited" in message:
            return self._client_ended(message["exited"], message["code"])
        name = message.pop("event")
        if name == "listening":
            self._address = message["address"]
            for client in range(self._run.config.clients):
                self._start(client)
        elif name == "round_finished":
            self._restarts.clear()
        self._watcher.event(name, message)

    def _start(self, client: int) -> None:
        options = {
            "server": self._address,
            "state_dir": str(self._run.out / "clients"),
            "data_dir": str(self._run.data_dir) if self._run.data_dir else None,
            "log_level": self._run.log_level,
        }
        with contextlib.suppress(ConnectionError):  # the nursery died: `_watch` hears so next
            self._control.sendall(json.dumps({"start": client, "options": options}).encode() + b"\n")

    def _client_ended(self, client: int, code: int) -> None:
        if code == 0 or self._over:
            return
        self._restarts[client] = self._restarts.get(client, 0) + 1
        path = self._run.out / "clients" / str(client) / "client.log"
        if code == 78:
            said = path.read_text().splitlines()[-1:] if path.exists() else []
            raise Unavailable(f"client {client} ended with code {code}: {' '.join(said)} (its log: {path})")
        if self._restarts[client] > _MAX_RESTARTS:
            # The server decides by its quorum whether the run can do without it.
            return self._watcher.event("client_given_up", {"client": client, "code": code, "log": str(path)})
        self._watcher.event("client_restarted", {"client": client, "code": code})
        self._start(client)

    def _server_ended(self) -> None:
        _, status = os.waitpid(self._server_pid, 0)
        self._server_pid = 0
        code = os.waitstatus_to_exitcode(status)
        if code:
            raise RunFailed(code if code > 0 else 128 - code)

    def _end(self) -> None:
        """Ends whatever still runs: asks first, then insists."""
        self._over = True
        self._control.close()  # the nursery ends its clients and then itself
        if self._server_pid:
            _signal(self._server_pid, signal.SIGTERM)
        for pid in (self._server_pid, self._nursery_pid):
            if pid and not gone_within(pid, _GRACE_S):
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except ConnectionError:  # the other end died with our words unread
        return b""


def raise_stopped(number: int, _: Any) -> None:
    """A signal handler that has what is under way put its things away."""
    raise Stopped(number)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def gone_within(pid: int, seconds: float) -> bool:
    """Whether a child has ended, or ends within so long."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return True
        except ChildProcessError:
            return True
        time.sleep(0.02)
    return False
