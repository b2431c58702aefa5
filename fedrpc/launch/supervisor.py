"""Decides whether and when a client process that ended is started again: one policy for local runs and pods.

A client that fails is restarted after a back-off of 1, 2, 4, ... seconds, at most five times in a row. The count starts
again when the client has run for long or when a round is finished. Exit codes that no restart helps end it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fedrpc.errors import ConfigError, DiskFull

MAX_RESTARTS = 5  # in a row
LONG_LIFE_S = 600.0  # a client that has run for this long may fail five times again
USAGE_ERROR = 2  # the exit code for options that do not exist
NO_RESTART = frozenset({ConfigError.exit_code, DiskFull.code_of_child, USAGE_ERROR})  # the same client would fail again

Notify = Callable[[str, dict[str, Any]], None]


@dataclass
class _Client:
    restarts: int = 0  # in a row
    started_at: float = 0.0


class Supervisor:
    """Starts clients and restarts those that fail; whoever owns the processes reports their exits.

    Args:
        clients: Numbers of the client processes, each of one client or of many.
        start: Starts such a process.
        notify: Called with "client_restarted" or "client_given_up", and the process's number and exit code.
        now: The clock, in seconds.
    """

    def __init__(
        self,
        clients: Iterable[int],
        start: Callable[[int], None],
        notify: Notify,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = {client: _Client() for client in clients}
        self._start_process, self._notify, self._now = start, notify, now
        self._num_running = 0
        self._due: dict[int, float] = {}  # when each client in back-off starts again
        self.given_up: dict[int, int] = {}  # exit codes by client

    @property
    def is_done(self) -> bool:
        """Whether no client runs or waits to be restarted."""
        return not self._num_running and not self._due

    def start_all(self) -> None:
        """Starts every client."""
        for client in self._clients:
            self._start(client)

    def start_due(self) -> None:
        """Starts the clients whose back-off is over; to be called several times a second."""
        for client in [client for client, due in self._due.items() if due <= self._now()]:
            del self._due[client]
            self._start(client)

    def reset_counts(self) -> None:
        """Lets every client fail five times again: a round is finished, so what went wrong is over."""
        for client in self._clients.values():
            client.restarts = 0

    def handle_exit(self, client: int, code: int) -> None:
        """Restarts a client that ended, unless it is finished or has to be given up."""
        self._num_running -= 1
        if code == 0:
            return
        state, now = self._clients[client], self._now()
        if now - state.started_at > LONG_LIFE_S:
            state.restarts = 0
        if code in NO_RESTART or state.restarts == MAX_RESTARTS:
            self.given_up[client] = code
            self._notify("client_given_up", {"number": client, "code": code})
            return
        # Longer each time: a server takes some seconds to notice that the client's old session is lost.
        self._due[client] = now + 2.0**state.restarts
        state.restarts += 1
        self._notify("client_restarted", {"number": client, "code": code})

    def _start(self, client: int) -> None:
        self._clients[client].started_at = self._now()
        self._num_running += 1
        self._start_process(client)
