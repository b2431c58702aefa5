"""Divides a run's clients among processes: one process for each client, or hosts of many clients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedrpc.errors import ConfigError

_GIB = 1 << 30
# Measured with 1,000 of them, with a margin; what clients at work need on top does not depend on their number.
_PROCESS_BYTES = 20 << 20
_BASE_BYTES = _GIB  # the server, and what all clients share


@dataclass(frozen=True)
class Part:
    """The clients of one process.

    Args:
        is_host: Whether the process is one of several that run all clients between them.
    """

    number: int
    clients: range
    is_host: bool

    @property
    def name(self) -> str:
        """What messages call the process."""
        if not self.is_host:
            return f"client {self.number}"
        return f"host {self.number} (clients {self.clients.start} to {self.clients.stop - 1})"

    def log_file(self, state_dir: Path) -> Path:
        """Where the process's output goes, in a local run."""
        return state_dir / f"host-{self.number}.log" if self.is_host else state_dir / str(self.number) / "client.log"


def divide(num_clients: int, num_hosts: int | None) -> list[Part]:
    """Divides clients among hosts, consecutive ids together; a process for each client when `num_hosts` is None."""
    if num_hosts is None:
        return [Part(client, range(client, client + 1), is_host=False) for client in range(num_clients)]
    if num_hosts > num_clients:
        raise ConfigError(f"--hosts {num_hosts} is more than the {num_clients} clients; each host needs one")
    ends = [number * num_clients // num_hosts for number in range(num_hosts + 1)]
    return [Part(number, range(*ends[number : number + 2]), is_host=True) for number in range(num_hosts)]


def check_memory(num_processes: int, available: int | None = None) -> None:
    """Raises ConfigError when so many client processes do not fit into memory, with the number of hosts to use.

    Args:
        available: In bytes; read from the system when None, and unlimited where it does not tell.
    """
    available = _read_available() if available is None else available
    needed = _BASE_BYTES + num_processes * _PROCESS_BYTES
    if available is not None and needed > available:
        hosts = os.cpu_count() or 1
        raise ConfigError(
            f"{num_processes} client processes need about {needed / _GIB:.1f} GiB of memory, and "
            f"{available / _GIB:.1f} GiB are available; --hosts {hosts} runs all clients in "
            f"{hosts} processes, with the same results"
        )


def _read_available() -> int | None:
    """The memory that processes started now can use: what the system has, within the limit of this control group."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        return min(free, limit)
    except (OSError, ValueError):  # no such group, or "max": no limit
        return free


def parse_client_ids(text: str) -> list[int]:
    """Parses ids and ranges of ids, such as "0-999" or "3,7,10-19"."""
    found: list[int] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(f'--client-ids takes ids and ranges such as "0-999" or "3,7,10-19", got "{text}"')
        found += range(int(first), int(last if dash else first) + 1)
    return _check_distinct(found)


def _check_distinct(clients: Sequence[int]) -> list[int]:
    seen: set[int] = set()
    for client in clients:
        if client in seen:
            raise ConfigError(f"--client-ids names client {client} twice")
        seen.add(client)
    return list(clients)
