"""Runs a server process and the processes of its clients on this machine until the run is over."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedrpc import log
from fedrpc.config import RunConfig
from fedrpc.emulation.conditions import assign_conditions
from fedrpc.emulation.tun import SERVER, SERVER_HOST, enter_network
from fedrpc.errors import ConfigError, DiskFull, FedrpcError, MethodFailed, Unavailable
from fedrpc.launch.division import check_memory, divide
from fedrpc.launch.emulator import Ways, make_emulator
from fedrpc.launch.fork_server import ForkServer
from fedrpc.launch.gpus import share_gpus
from fedrpc.launch.processes import decode_status, fork, preload, terminate, wait_or_kill
from fedrpc.launch.supervisor import NO_RESTART, Supervisor
from fedrpc.process import exit_code_of, freeze_memory, raise_stopped, run_async

_GRACE_S = 10.0  # between SIGTERM and SIGKILL
_TICK_S = 0.2  # how often the supervisor is asked whose back-off is over


class RunFailed(FedrpcError):
    """The server ended before the run did; it has already said why."""

    def __init__(self, code: int) -> None:
        super().__init__("")
        self.exit_code = code


class Watcher:
    """Hears what happens in a run; displays implement it."""

    def open(self) -> None:
        """All processes are forked: from here on there may be threads, such as one that draws."""

    def event(self, name: str, values: dict[str, Any]) -> None:
        """Something happened in the run."""

    def close(self) -> None:
        """The run is over."""


@dataclass(frozen=True)
class LocalRun:
    """A run on this machine.

    Args:
        out: The run directory.
        data_dir: The folder of data sets.
        log_level: Of all processes.
        num_hosts: The processes among which the clients are divided; None for a process for each client.
        allows_changed_code: Whether it goes on although the user's own code was changed since it began.
        metrics_listen: Where the server serves metrics for Prometheus; nowhere when None.
        num_runs: That are under way at a time, and share this machine's cores and GPUs.
    """

    config: RunConfig
    out: Path
    data_dir: Path | None
    log_level: str
    num_hosts: int | None = None
    allows_changed_code: bool = False
    metrics_listen: str | None = None
    num_runs: int = 1

    @property
    def state_dir(self) -> Path:
        """Where the clients keep their stores and logs."""
        return self.out / "clients"


class Launcher:
    """Starts the server and the clients, and ends everything when the run is over.

    Args:
        run: What to run.
        watcher: Hears the server's events and those of the supervisor.
    """

    def __init__(self, run: LocalRun, watcher: Watcher) -> None:
        self._parts = divide(run.config.clients, run.num_hosts)
        check_memory(len(self._parts))
        sharing = share_gpus(run.config, run.data_dir, len(self._parts), run.num_runs)
        run = replace(run, config=run.config.model_copy(update={"parallel": sharing.parallel}))
        self._run, self._watcher, self._gpu_share = run, watcher, sharing.share
        self._conditions = assign_conditions(run.config.link, run.config.speed, run.config.clients, run.config.seed)
        self._emulator = make_emulator(run.config, self._conditions, run.num_hosts)
        self._ways: Ways | None = None
        self._supervisor = Supervisor(range(len(self._parts)), self._start_client, self._handle_restart)
        self._address = ""
        self._server_pid = self._fork_server_pid = 0

    def run(self) -> None:
        """Blocks until the run is over; raises what ended it early."""
        preload(self._run.config)
        freeze_memory()
        if self._emulator:
            self._emulator.start()  # first, so that it inherits no end of the others' pipes
        self._control, theirs = socket.socketpair()
        reader, writer = os.pipe()
        self._fork_server_pid = fork(lambda: self._serve_forks(theirs, reader, writer))
        self._server_pid = fork(lambda: self._serve(writer, reader, theirs))
        theirs.close()
        os.close(writer)
        self._watcher.open()
        previous = signal.signal(signal.SIGTERM, raise_stopped)
        try:
            self._watch(reader)
        finally:
            signal.signal(signal.SIGTERM, previous)
            self._end()
            self._watcher.close()

    # The two children

    def _serve_forks(self, control: socket.socket, *pipes: int) -> int:
        self._control.close()
        if self._emulator:
            self._emulator.close_in_child()
        for fd in pipes:
            os.close(fd)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ForkServer(control, len(self._parts)).run()
        return 0

    def _serve(self, writer: int, reader: int, theirs: socket.socket) -> int:
        from fedrpc.server.run import ServerOptions, serve

        os.close(reader)
        for other in (self._control, theirs):
            other.close()
        if self._emulator:
            self._emulator.close_in_child()
        events = os.fdopen(writer, "w", buffering=1)

        def progress(name: str, values: dict[str, Any]) -> None:
            events.write(json.dumps({"event": name} | values) + "\n")

        packets = self._emulator.packets if self._emulator else None
        options = ServerOptions(
            f"{SERVER_HOST}:0" if packets else "127.0.0.1:0",
            self._run.out,
            self._run.data_dir,
            insecure=bool(packets),  # nobody but the run's clients is in that network
            allows_changed_code=self._run.allows_changed_code,
            metrics_listen=self._run.metrics_listen,
            outlived=False,
            conditions=self._conditions,
        )
        # Clients that wait for a core are asked all at once: each one's messages travel over its own link.
        config = self._run.config.model_copy(update={"parallel": 0}) if self._emulator else self._run.config
        log.set_up(self._run.log_level, stream=sys.stderr, role="server")

        def work() -> None:
            if packets:
                enter_network(packets, SERVER)
            self._name_log(lambda: run_async(serve(config, options, progress)))

        return exit_code_of(work)

    def _name_log(self, work: Callable[[], Any]) -> None:
        """Runs `work`; an error that points to a client's log gets the log's path."""
        try:
            work()
        except MethodFailed as error:
            for part in self._parts:
                if error.clients and error.clients[0] in part.clients:
                    raise type(error)(f"{error}: {part.log_file(self._run.state_dir)}") from None
            raise

    # Watching

    def _watch(self, reader: int) -> None:
        helpers = {self._control.fileno(): "forks clients"}
        if self._emulator:
            helpers[self._emulator.control.fileno()] = "emulates links"
        buffers = dict.fromkeys([reader, *helpers], b"")
        with selectors.DefaultSelector() as selector:
            for fd in buffers:
                selector.register(fd, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(timeout=_TICK_S):
                    data = _read(key.fd)
                    *lines, buffers[key.fd] = (buffers[key.fd] + data).split(b"\n")
                    for line in lines:
                        self._handle_message(json.loads(line))
                    if not data and key.fd == reader:
                        return self._reap_server()
                    if not data:
                        what = helpers[key.fd]
                        raise Unavailable(f"the process that {what} ended; run the same command again to resume")
                self._supervisor.start_due()

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "exited" in message:
            return self._supervisor.handle_exit(message["exited"], message["code"])
        name = message.pop("event")
        if name == "listening":
            self._address = message["address"]
            self._ways = self._emulator.open(self._address) if self._emulator else None
            self._supervisor.start_all()
        elif name == "round_finished":
            self._supervisor.reset_counts()
        self._watcher.event(name, message)

    def _start_client(self, number: int) -> None:
        part, ways = self._parts[number], self._ways
        first = part.clients.start
        options = {
            "server": ways.server.get(first, self._address) if ways else self._address,
            "speed": self._conditions[first].speed,
            "cores": ways.door if ways else None,
            "link": ways.links.get(first) if ways else None,
            "packets": ways.packets if ways else None,
            "clients": [part.clients.start, part.clients.stop],
            "gpu_share": self._gpu_share,
            "state_dir": str(self._run.state_dir),
            "data_dir": str(self._run.data_dir) if self._run.data_dir else None,
            "log_file": str(part.log_file(self._run.state_dir)),
            "log_level": self._run.log_level,
        }
        with contextlib.suppress(ConnectionError):  # the fork server ended: `_watch` sees that next
            self._control.sendall(json.dumps({"start": number, "options": options}).encode() + b"\n")

    def _handle_restart(self, name: str, values: dict[str, Any]) -> None:
        """Passes on that a process is restarted or given up; ends the run if the same would happen to every one.

        Otherwise the server decides by its quorum whether the run can continue without its clients.
        """
        part, code = self._parts[values["number"]], values["code"]
        path = part.log_file(self._run.state_dir)
        if code == DiskFull.code_of_child:
            raise DiskFull(
                f"{part.name} cannot write its state in {self._run.state_dir}: the disk is full, or fails; "
                f"free space there, then run the same command again to go on (its log: {path})"
            )
        if code in NO_RESTART:
            last = path.read_text().splitlines()[-1:] if path.exists() else []
            raise ConfigError(f"{part.name} ended with code {code}: {' '.join(last)} (its log: {path})")
        shown = {"process": part.name, "code": code}
        self._watcher.event(name, shown | ({"log": str(path)} if name == "client_given_up" else {}))

    def _reap_server(self) -> None:
        _, status = os.waitpid(self._server_pid, 0)
        self._server_pid = 0
        if code := decode_status(status):
            raise RunFailed(code)

    def _end(self) -> None:
        """Ends whatever still runs: asks first, then kills."""
        self._control.close()  # the fork server ends its clients and then itself
        if self._server_pid:
            terminate(self._server_pid)
            wait_or_kill([self._server_pid], _GRACE_S)
        wait_or_kill([self._fork_server_pid], _GRACE_S)
        if self._emulator:
            self._emulator.close()
            wait_or_kill([self._emulator.pid], _GRACE_S)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except ConnectionError:  # the other end died with our lines unread
        return b""
