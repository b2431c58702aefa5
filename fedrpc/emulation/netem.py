"""Shapes a client's link in the kernel: a network namespace for the client's process, and tc's queues at both ends.

The namespace belongs to the process alone, and goes with it. A link that has only rates needs the queue `tbf`, any
other `netem`; packets are lost, delayed and reordered as that does it.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedrpc.emulation.link import Link
from fedrpc.errors import ConfigError, Unavailable

_CLONE_NEWNET = 0x40000000
_PACKET_BYTES = 1514  # on the link
_QUEUE_S = 0.2  # how long a packet may wait for its turn, as in a router
_INSIDE = "eth0"  # a device in the client's namespace
_REMEDY = "or leave --shaper out for a shaper without privileges"
Command = Sequence[str]


def build_queue(link: Link, direction: str) -> list[str]:
    """What tc is told of one direction."""
    rate = link.down if direction == "down" else link.up
    pace = [] if math.isinf(rate) else ["rate", f"{rate:.0f}bit"]
    if pace and not link.rtt:
        burst = max(2 * _PACKET_BYTES, int(rate / 8 * 0.01))
        return ["tbf", *pace, "burst", f"{burst}b", "latency", f"{_QUEUE_S * 1000:.0f}ms"]
    delay = ["delay", f"{link.rtt / 2 * 1e6:.0f}us", f"{link.jitter / 2 * 1e6:.0f}us"]
    loss = ["loss", f"{link.loss * 100:.6g}%"] if link.loss else []
    waiting = 10_000 if math.isinf(rate) else max(100, int(rate / 8 * (link.rtt + _QUEUE_S) / _PACKET_BYTES))
    return ["netem", *delay, *loss, *pace, "limit", str(waiting)]


@dataclass(frozen=True)
class Wire:
    """The two ends of one client's link.

    Args:
        pid: The client's process, whose network namespace has the other end.
        run: A number that tells this run from others on this machine.
    """

    link: Link
    client: int
    pid: int
    run: int

    @property
    def device(self) -> str:
        """The end on the server's side."""
        return f"fedrpc{self.pid}"

    def get_address(self, end: int) -> str:
        """The address of an end: 1 on the server's side, 2 on the client's."""
        return f"10.{128 + self.run % 128}.{self.client // 64}.{4 * (self.client % 64) + end}"

    def list_outside(self) -> list[Command]:
        """What makes the link, on the server's side."""
        peer = ["peer", "name", _INSIDE, "gso_max_segs", "1", "netns", str(self.pid)]
        return [
            # One packet at a time: otherwise a lost one would be up to 64 KB.
            ["ip", "link", "add", self.device, "gso_max_segs", "1", "type", "veth", *peer],
            *_list_end(self.device, self.get_address(1), build_queue(self.link, "down")),
        ]

    def list_inside(self) -> list[Command]:
        """What is left to do in the client's namespace."""
        return [
            ["ip", "link", "set", "lo", "up"],
            *_list_end(_INSIDE, self.get_address(2), build_queue(self.link, "up")),
        ]


def _list_end(device: str, address: str, queue: Sequence[str]) -> list[Command]:
    return [
        ["ip", "address", "add", f"{address}/30", "dev", device],
        ["tc", "qdisc", "add", "dev", device, "root", *queue],
        ["ip", "link", "set", device, "up"],
    ]


def run_commands(commands: Iterable[Command]) -> None:
    """Runs commands one after the other; raises Unavailable when one fails."""
    for command in commands:
        if why := _try(command):
            raise Unavailable(f"the link could not be set up: `{' '.join(command)}` said: {why}")


def _try(command: Command) -> str:
    """Runs a command; returns the first line of its complaint, "" when it worked."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (done.stderr or done.stdout).strip().splitlines()
    if done.returncode == 0:
        return ""
    return said[0].removeprefix("Error: ").rstrip(".") if said else f"code {done.returncode}"


def check_netem(links: Iterable[Link]) -> None:
    """Raises ConfigError, with what is missing, when this machine cannot shape these links in its kernel."""
    if os.geteuid() != 0:
        raise ConfigError(f"--shaper netem needs root: run it as root, {_REMEDY}")
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            raise ConfigError(f"--shaper netem needs the program {program}: install iproute2 and util-linux, {_REMEDY}")
    if why := _try(["unshare", "--net", "ip", "link", "add", "one", "type", "veth", "peer", "name", "two"]):
        raise ConfigError(f"--shaper netem needs network namespaces and veth devices: {why}; allow them, {_REMEDY}")
    for link in dict.fromkeys(links):
        if link.blackout:
            raise ConfigError(f"--shaper netem has no blackouts, got link {link}; leave --shaper or the blackouts out")
        for direction in ("down", "up"):
            queue = build_queue(link, direction)
            if why := _try(["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *queue]):
                kind = queue[0]
                raise ConfigError(
                    f"--shaper netem: the kernel cannot shape {link} by {kind}: {why}; "
                    f"load its module (modprobe sch_{kind}), use --shaper tun, {_REMEDY}"
                )


def enter_namespace(door: str, client: int, link: Link) -> str:
    """Moves this process into a namespace of its own, linked to the server; returns where to connect to.

    To be called before the process has threads.

    Args:
        door: The socket at which the other end is asked for.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise Unavailable(f"no network namespace for client {client}: {os.strerror(ctypes.get_errno())}")
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(door)
        asking.sendall(f"link {client} {os.getpid()}\n".encode())
        with asking.makefile() as lines:
            answer = json.loads(lines.readline() or '{"error": "the process that emulates links ended"}')
    if "error" in answer:
        raise Unavailable(answer["error"])
    run_commands(Wire(link, client, os.getpid(), answer["run"]).list_inside())
    return str(answer["server"])
