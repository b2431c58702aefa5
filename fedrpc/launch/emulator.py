"""A process that emulates the links of a local run's clients, and hands out this machine's cores to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedrpc.config import RunConfig
from fedrpc.emulation.conditions import Conditions
from fedrpc.emulation.link import Link
from fedrpc.emulation.shaper import Shaper
from fedrpc.errors import ConfigError, Unavailable
from fedrpc.launch.processes import fork
from fedrpc.process import allow_open_files

_START_S = 30.0  # how long the process may take to open its ports
_FILES_A_LINK = 9  # its port, and some connections with two sockets each


@dataclass(frozen=True)
class Ways:
    """Where the clients of a run connect.

    Args:
        cores: Who hands out cores.
        server: By client: its own way to the server; whoever is not there connects to the server itself.
    """

    cores: str
    server: Mapping[int, str]


class Emulator:
    """The process, seen from the launcher.

    Args:
        links: By client, of those whose links are shaped.
        num_cores: How many clients may compute at a time.
        seed: The run's.
    """

    def __init__(self, links: Mapping[int, Link], num_cores: int, seed: int) -> None:
        self._links, self._num_cores, self._seed = links, num_cores, seed
        self.control, self._theirs = socket.socketpair()
        self.pid = 0

    def start(self) -> None:
        """Forks the process, which must happen before this one has threads."""
        self.pid = fork(self._run)
        self._theirs.close()

    def close_in_child(self) -> None:
        """Closes what another child of the launcher has inherited."""
        self.control.close()
        self._theirs.close()

    def open(self, server: str) -> Ways:
        """Has it open a way to the server for each client."""
        self.control.settimeout(_START_S)
        self.control.sendall(server.encode() + b"\n")
        with self.control.makefile() as lines:
            line = lines.readline()
        if not line:
            raise Unavailable("the process that emulates links ended; run the same command again to resume")
        found = json.loads(line)
        return Ways(found["cores"], {int(client): address for client, address in found["server"].items()})

    # In the process of its own

    def _run(self) -> int:
        self.control.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        allow_open_files(len(self._links) * _FILES_A_LINK)
        with contextlib.suppress(ConnectionError):  # the launcher is gone
            asyncio.run(self._emulate())
        return 0

    async def _emulate(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._theirs)
        server = (await reader.readline()).decode().strip()
        if not server:
            return
        shapers = {client: Shaper(link, self._seed, client) for client, link in self._links.items()}
        ways = {client: shaper.open(server) for client, shaper in shapers.items()}
        lender = await lend_cores(self._num_cores)
        cores = "{}:{}".format(*lender.sockets[0].getsockname())
        writer.write(json.dumps({"cores": cores, "server": ways}).encode() + b"\n")
        await reader.read()  # until the launcher closes its end
        os._exit(0)


def make_emulator(config: RunConfig, conditions: Sequence[Conditions], num_hosts: int | None) -> Emulator | None:
    """The emulator that a run needs, if any; raises ConfigError when its clients have no processes of their own."""
    if num_hosts is not None and (config.link or config.speed):
        name = "--link" if config.link else "--speed"
        raise ConfigError(
            f"{name} needs a process for each client, whose connection and time are its own; "
            f"leave --hosts {num_hosts} out"
        )
    if num_hosts is not None or not config.is_emulated:
        return None
    links = {client: each.link for client, each in enumerate(conditions) if each.link}
    return Emulator(links, config.parallel, config.seed)


async def lend_cores(number: int) -> asyncio.Server:
    """Hands out cores on a port of loopback, in the order in which clients ask.

    A client that gets a byte has a core until it closes the connection, which it also does by dying.
    """
    free = asyncio.Semaphore(number)

    async def lend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with free:
            with contextlib.suppress(ConnectionError):
                writer.write(b"\n")
                await reader.read()
        writer.close()

    return await asyncio.start_server(lend, "127.0.0.1", 0, backlog=1024)
