"""A process that emulates the links of a local run's clients, and hands out this machine's cores to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from fedrpc.config import RunConfig
from fedrpc.emulation.conditions import Conditions
from fedrpc.emulation.link import UNLIMITED, Link
from fedrpc.emulation.netem import Wire, check_netem, run_commands
from fedrpc.emulation.packets import Forwarder
from fedrpc.emulation.shaper import Shaper
from fedrpc.emulation.tun import check_tun
from fedrpc.errors import ConfigError, Unavailable
from fedrpc.launch.processes import fork
from fedrpc.process import allow_open_files

_START_S = 30.0  # how long the process may take to open its ports
_FILES_A_LINK = 9  # its port, and some connections with two sockets each
_ENDED = "the process that emulates links ended; run the same command again to resume"


@dataclass(frozen=True)
class Ways:
    """How the clients of a run connect.

    Args:
        door: The socket at which they ask for a core, or for the other end of a link in the kernel.
        server: By client: its own way to the server; whoever is not there connects to the server itself.
        links: By client: a link that it is to make in the kernel, in words.
        packets: The socket that takes in the devices of their networks, where packets are forwarded.
    """

    door: str
    server: Mapping[int, str] = field(default_factory=dict)
    links: Mapping[int, str] = field(default_factory=dict)
    packets: str | None = None


class Emulator:
    """The process, seen from the launcher.

    Args:
        links: By client, of those whose links are shaped.
        num_cores: How many clients may compute at a time.
        seed: The run's.
        shaper: What shapes the links: `proxy`, `tun` or `netem`.
    """

    def __init__(self, links: Mapping[int, Link], num_cores: int, seed: int, shaper: str = "proxy") -> None:
        self._links, self._num_cores, self._seed, self._shaper = links, num_cores, seed, shaper
        self.control, self._theirs = socket.socketpair()
        self._folder: Path | None = None  # of the door, whose path must be short
        self._devices: socket.socket | None = None  # at which the devices of networks come in
        self.pid = 0

    def start(self) -> None:
        """Forks the process, which must happen before this one has threads."""
        self._folder = Path(tempfile.mkdtemp(prefix="fedrpc-"))
        if self.packets:
            self._devices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._devices.bind(self.packets)  # already here, so that the server finds it
        self.pid = fork(self._run)
        self._theirs.close()
        if self._devices:
            self._devices.close()

    def open(self, server: str) -> Ways:
        """Has it open a way to the server for each client."""
        self.control.settimeout(_START_S)
        self.control.sendall(server.encode() + b"\n")
        with self.control.makefile() as lines:
            line = lines.readline()
        if not line:
            raise Unavailable(_ENDED)
        ways = {int(client): address for client, address in json.loads(line).items()}
        made = {client: str(link) for client, link in self._links.items()} if self._shaper == "netem" else {}
        return Ways(self._door, ways, made, self.packets)

    def close_in_child(self) -> None:
        """Closes what another child of the launcher has inherited."""
        self.control.close()
        self._theirs.close()

    def close(self) -> None:
        """Has the process end by itself."""
        self.control.close()

    @property
    def packets(self) -> str | None:
        """The socket that takes in the devices of networks, the server's too; None unless packets are forwarded."""
        return self._find("packets") if self._shaper == "tun" else None

    @property
    def _door(self) -> str:
        return self._find("door")

    def _find(self, name: str) -> str:
        assert self._folder is not None, "started before"
        return str(self._folder / name)

    # In the process of its own

    def _run(self) -> int:
        self.control.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._leave())  # also when the launcher was killed
        allow_open_files(len(self._links) * _FILES_A_LINK)
        with contextlib.suppress(ConnectionError):  # the launcher is gone
            asyncio.run(self._emulate())
        return 0

    async def _emulate(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._theirs)
        if self._devices:
            Forwarder(self._links, self._seed, self._devices).open()
        server = (await reader.readline()).decode().strip()
        if not server:
            self._leave()
        links = self._links if self._shaper == "proxy" else {}
        shapers = {client: Shaper(link, self._seed, client) for client, link in links.items()}
        door = Door(self._num_cores, self._links, server)
        await door.open(self._door)
        ways = {client: shaper.open(server) for client, shaper in shapers.items()}
        writer.write(json.dumps(ways).encode() + b"\n")
        await reader.read()  # until the launcher closes its end
        self._leave()

    def _leave(self) -> NoReturn:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


class Door:
    """Answers what clients ask for.

    A client that asks for a core has one from the byte that it gets until it closes the connection, which it also does
    by dying. One that asks for a link is told where its own end leads.

    Args:
        num_cores: How many clients may compute at a time.
        links: By client.
        server: HOST:PORT.
    """

    def __init__(self, num_cores: int, links: Mapping[int, Link], server: str) -> None:
        self._free, self._links, self._server = asyncio.Semaphore(num_cores), links, server

    async def open(self, path: str) -> asyncio.Server:
        """Begins to answer at a path."""
        return await asyncio.start_unix_server(self._answer, path, backlog=1024)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            what, *rest = (await reader.readline()).decode().split() or [""]
            if what == "core":
                async with self._free:
                    writer.write(b"\n")
                    await reader.read()
            elif what == "link":
                writer.write(json.dumps(self._make_link(*map(int, rest))).encode() + b"\n")
                await writer.drain()
        writer.close()

    def _make_link(self, client: int, pid: int) -> dict[str, str | int]:
        wire = Wire(self._links[client], client, pid, run=os.getpid())
        try:
            run_commands(wire.list_outside())
        except Unavailable as error:
            return {"error": str(error)}
        return {"server": Shaper(UNLIMITED).open(self._server, at=wire.get_address(1)), "run": wire.run}


def make_emulator(config: RunConfig, conditions: Sequence[Conditions], num_hosts: int | None) -> Emulator | None:
    """The emulator that a run needs, if any; raises ConfigError when its clients cannot be emulated."""
    if num_hosts is not None and (config.link or config.speed):
        name = "--link" if config.link else "--speed"
        raise ConfigError(
            f"{name} needs a process for each client, whose connection and time are its own; "
            f"leave --hosts {num_hosts} out"
        )
    if config.shaper and not config.link:
        raise ConfigError(f"--shaper {config.shaper} has nothing to shape; give --link, too")
    if num_hosts is not None or not config.is_emulated:
        return None
    links = {client: each.link for client, each in enumerate(conditions) if each.link}
    if config.shaper == "netem":
        check_netem(links.values())
    elif config.shaper == "tun":
        check_tun()
    return Emulator(links, config.parallel, config.seed, config.shaper or "proxy")
