"""The program fedrpc-client: the clients of one process, in a pod under a parent that starts it again."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

from fedrpc import log
from fedrpc.client.app import ClientOptions
from fedrpc.client.app import run as run_client_app
from fedrpc.errors import ConfigError, DiskFull, FedrpcError
from fedrpc.launch.fork_server import describe_process
from fedrpc.launch.processes import decode_status, fork, preload, terminate, wait_or_kill
from fedrpc.launch.supervisor import NO_RESTART, Supervisor
from fedrpc.process import end_at_once, exit_code_of, freeze_memory, raise_stopped, run_async

GRACE_S = 20.0  # between SIGTERM and SIGKILL; less than a pod has


class PodFailed(FedrpcError):
    """The process of a pod's clients was given up."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the pod's clients ended with code {code} and were given up; see the last log line")
        # A code that no restart helps says the same of the pod; but a disk that was full may have room again.
        self.exit_code = ConfigError.exit_code if code in NO_RESTART else code
        if code == DiskFull.code_of_child:
            self.exit_code = DiskFull.exit_code


class Pod:
    """Runs the clients of one pod as one process, starts it again when it fails, and ends it at a signal.

    A pod that ends is replaced by one without its clients' stores; a process that is started again in it finds them.
    """

    def __init__(self, options: ClientOptions, log_level: str) -> None:
        self._options, self._log_level = options, log_level
        self._pid = 0
        self._supervisor = Supervisor((0,), self._start, _log_restart)

    def run(self) -> None:
        """Blocks until the clients have ended; raises PodFailed when they were given up."""
        preload()
        freeze_memory()
        signal.signal(signal.SIGTERM, raise_stopped)
        try:
            self._supervisor.start_all()
            while not self._supervisor.is_done:
                self._handle_exit()
                self._supervisor.start_due()
                time.sleep(0.2)
        finally:
            if self._pid:
                terminate(self._pid)
                wait_or_kill([self._pid], GRACE_S)
        for code in self._supervisor.given_up.values():
            raise PodFailed(code)

    def _start(self, _: int) -> None:
        self._pid = fork(self._run_clients)

    def _run_clients(self) -> int:
        signal.signal(signal.SIGTERM, end_at_once)
        log.set_up(self._log_level, **describe_process(self._options.client_ids))
        return exit_code_of(lambda: run_async(run_client_app(self._options)), is_child=True)

    def _handle_exit(self) -> None:
        pid, status = os.waitpid(self._pid, os.WNOHANG) if self._pid else (0, 0)
        if pid:
            self._pid = 0
            self._supervisor.handle_exit(0, decode_status(status))


def _log_restart(name: str, values: dict[str, Any]) -> None:
    logger = log.get("pod")
    (logger.error if name == "client_given_up" else logger.warning)(name, code=values["code"])


def run_client(options: ClientOptions, log_level: str) -> None:
    """Takes part in a run with the clients of one process, until the server says that it is over."""
    log.set_up(log_level, **describe_process(options.client_ids))
    reason = run_async(run_client_app(options))
    log.get("client").info("finished", reason=reason)


def run_pod(options: ClientOptions, pod: int, clients_per_pod: int, num_clients: int | None, log_level: str) -> None:
    """Takes part in a run as all clients of one pod."""
    log.set_up(log_level, role="pod", pod=pod)
    clients = list_clients_of_pod(pod, clients_per_pod, num_clients)
    Pod(replace(options, client_ids=clients), log_level).run()


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
