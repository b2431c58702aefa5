"""Several clients of one pod: forked from one process that has everything loaded, and restarted there when they die."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fedrpc import log
from fedrpc.client.app import ClientOptions
from fedrpc.client.app import run as run_client_app
from fedrpc.errors import ConfigError, FedrpcError
from fedrpc.launch.launcher import fork, gone_within, raise_stopped
from fedrpc.launch.nursery import preload
from fedrpc.process import end_at_once, exit_code_of, run_async

_MAX_RESTARTS = 5  # of one client in a row
_IN_A_ROW_S = 600.0  # a client that has lived for so long starts anew
_USELESS = {ConfigError.exit_code, 2}  # what no restart helps
_GRACE_S = 20.0  # between SIGTERM and SIGKILL; less than a pod has


class CrewFailed(FedrpcError):
    """Some clients were given up; the others came to their end."""

    def __init__(self, codes: dict[int, int]) -> None:
        told = ", ".join(f"client {client} with code {code}" for client, code in sorted(codes.items()))
        super().__init__(f"{len(codes)} of this pod's clients failed: {told}; their own last lines say why")
        # What no restart helps is told only when it holds for all: another pod may do better with the rest.
        useless = set(codes.values()) <= _USELESS
        self.exit_code = ConfigError.exit_code if useless else next(c for c in codes.values() if c not in _USELESS)


@dataclass
class _Member:
    options: ClientOptions
    restarts: int = 0
    started: float = field(default_factory=time.monotonic)


class Crew:
    """Starts clients, restarts those that die, and ends them all at a signal.

    Args:
        members: What each client knows.
        log_level: The lowest level that is logged.
    """

    def __init__(self, members: Iterable[ClientOptions], log_level: str) -> None:
        self._members = [_Member(options) for options in members]
        self._level = log_level
        self._running: dict[int, _Member] = {}  # by process id
        self._due: list[tuple[float, _Member]] = []  # when to start again
        self._failed: dict[int, int] = {}
        self._log = log.get("crew")

    def run(self) -> None:
        """Blocks until every client has come to its end; raises CrewFailed when some were given up."""
        preload()
        gc.collect()
        gc.freeze()  # keeps the collector from touching, and so copying, shared pages
        signal.signal(signal.SIGTERM, raise_stopped)
        try:
            for member in self._members:
                self._start(member)
            while self._running or self._due:
                self._reap()
                self._start_those_due()
                time.sleep(0.2)
        finally:
            self._end()
        if self._failed:
            raise CrewFailed(self._failed)

    def _start(self, member: _Member) -> None:
        member.started = time.monotonic()
        self._running[fork(lambda: self._live(member.options))] = member

    def _live(self, options: ClientOptions) -> int:
        signal.signal(signal.SIGTERM, end_at_once)
        log.set_up(self._level, role="client", client=options.client_id)
        return exit_code_of(lambda: run_async(run_client_app(options)))

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._ended(self._running.pop(pid), os.waitstatus_to_exitcode(status))

    def _ended(self, member: _Member, code: int) -> None:
        if not code:
            return
        code = code if code > 0 else 128 - code
        client, now = member.options.client_id, time.monotonic()
        if now - member.started > _IN_A_ROW_S:
            member.restarts = 0
        if code in _USELESS or member.restarts == _MAX_RESTARTS:
            self._failed[client] = code
            self._log.error("client_given_up", client=client, code=code)
            return
        # Longer each time: a server takes some seconds to see that an earlier pod's client is gone.
        self._due.append((now + 2.0**member.restarts, member))
        member.restarts += 1
        self._log.warning("client_restarted", client=client, code=code)

    def _start_those_due(self) -> None:
        now = time.monotonic()
        ready = [member for due, member in self._due if due <= now]
        self._due = [(due, member) for due, member in self._due if due > now]
        for member in ready:
            self._start(member)

    def _end(self) -> None:
        """Ends whatever still runs: asks first, then insists."""
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        give_up = time.monotonic() + _GRACE_S
        for pid in self._running:
            if not gone_within(pid, give_up - time.monotonic()):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def run_client(options: ClientOptions, log_level: str) -> None:
    """Takes part in a run as one client, until the server says that it is over."""
    log.set_up(log_level, role="client", client=options.client_id)
    reason = run_async(run_client_app(options))
    log.get("client").info("finished", reason=reason)


def run_pod(options: ClientOptions, clients_per_pod: int, num_clients: int | None, log_level: str) -> None:
    """Takes part in a run as all clients of one pod.

    Args:
        options: As for one client; its id is the pod's number.
    """
    log.set_up(log_level, role="pod", pod=options.client_id)
    clients = clients_of_pod(options.client_id, clients_per_pod, num_clients)
    Crew([replace(options, client_id=client) for client in clients], log_level).run()


def clients_of_pod(pod: int, clients_per_pod: int, num_clients: int | None) -> range:
    """The clients that a pod has: pods are dealt consecutive ids, and the last one may have fewer."""
    if num_clients is None:
        raise ConfigError("--clients-per-pod needs --clients, how many the run has: the last pod may have fewer")
    first = pod * clients_per_pod
    if first >= num_clients:
        raise ConfigError(
            f"pod {pod} has no client: {num_clients} clients, {clients_per_pod} a pod, are pods 0 to "
            f"{(num_clients - 1) // clients_per_pod}"
        )
    return range(first, min(first + clients_per_pod, num_clients))
