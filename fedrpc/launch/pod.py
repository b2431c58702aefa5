"""The program fedrpc-client: one client, or the clients of one pod, forked from one process and restarted there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fedrpc import log
from fedrpc.client.app import ClientOptions
from fedrpc.client.app import run as run_client_app
from fedrpc.errors import ConfigError, FedrpcError
from fedrpc.launch.processes import (
    MANY_CLIENTS,
    collapse_memory,
    decode_status,
    fork,
    preload,
    terminate,
    wait_or_kill,
)
from fedrpc.launch.supervisor import NO_RESTART, Supervisor
from fedrpc.process import end_at_once, exit_code_of, freeze_memory, raise_stopped, run_async

GRACE_S = 20.0  # between SIGTERM and SIGKILL; less than a pod has


class PodFailed(FedrpcError):
    """Some clients of a pod were given up; the others finished."""

    def __init__(self, codes: dict[int, int]) -> None:
        failed = ", ".join(f"client {client} with code {code}" for client, code in sorted(codes.items()))
        super().__init__(f"{len(codes)} of this pod's clients failed: {failed}; see the last log line of each")
        # Only if no restart helps any of them is the whole pod not worth restarting.
        others = [code for code in codes.values() if code not in NO_RESTART]
        self.exit_code = others[0] if others else ConfigError.exit_code


class Pod:
    """The clients of one pod: starts them, restarts those that fail, and ends them all at a signal.

    Args:
        clients: The options of each client.
        log_level: The lowest level that is logged.
    """

    def __init__(self, clients: Iterable[ClientOptions], log_level: str) -> None:
        self._options = {options.client_ids[0]: options for options in clients}
        self._log_level = log_level
        self._running: dict[int, int] = {}  # clients by process id
        self._supervisor = Supervisor(self._options, self._start, _log_restart)

    def run(self) -> None:
        """Blocks until every client has ended; raises PodFailed when some were given up."""
        preload()
        freeze_memory()
        if len(self._options) >= MANY_CLIENTS:
            collapse_memory()
        signal.signal(signal.SIGTERM, raise_stopped)
        try:
            self._supervisor.start_all()
            while not self._supervisor.is_done:
                self._handle_exits()
                self._supervisor.start_due()
                time.sleep(0.2)
        finally:
            for pid in self._running:
                terminate(pid)
            wait_or_kill(self._running, GRACE_S)
        if self._supervisor.given_up:
            raise PodFailed(self._supervisor.given_up)

    def _start(self, client: int) -> None:
        self._running[fork(lambda: self._run_client(self._options[client]))] = client

    def _run_client(self, options: ClientOptions) -> int:
        signal.signal(signal.SIGTERM, end_at_once)
        log.set_up(self._log_level, role="client", client=options.client_ids[0])
        return exit_code_of(lambda: run_async(run_client_app(options)))

    def _handle_exits(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._supervisor.handle_exit(self._running.pop(pid), decode_status(status))


def _log_restart(name: str, values: dict[str, Any]) -> None:
    logger = log.get("pod")
    (logger.error if name == "client_given_up" else logger.warning)(name, **values)


def run_client(options: ClientOptions, log_level: str) -> None:
    """Takes part in a run as one client, until the server says that it is over."""
    log.set_up(log_level, role="client", client=options.client_ids[0])
    reason = run_async(run_client_app(options))
    log.get("client").info("finished", reason=reason)


def run_pod(options: ClientOptions, clients_per_pod: int, num_clients: int | None, log_level: str) -> None:
    """Takes part in a run as all clients of one pod.

    Args:
        options: As for one client, with the pod's number as its id.
    """
    log.set_up(log_level, role="pod", pod=options.client_ids[0])
    clients = list_clients_of_pod(options.client_ids[0], clients_per_pod, num_clients)
    Pod([replace(options, client_ids=(client,)) for client in clients], log_level).run()


def list_clients_of_pod(pod: int, clients_per_pod: int, num_clients: int | None) -> range:
    """The ids of a pod's clients: consecutive ones, and fewer in the last pod."""
    if num_clients is None:
        raise ConfigError(
            "--clients-per-pod needs --clients, the number of clients in the run: the last pod may have fewer"
        )
    first = pod * clients_per_pod
    if first >= num_clients:
        raise ConfigError(
            f"pod {pod} has no client: {num_clients} clients, {clients_per_pod} in each pod, are pods 0 to "
            f"{(num_clients - 1) // clients_per_pod}"
        )
    return range(first, min(first + clients_per_pod, num_clients))
