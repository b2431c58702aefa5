"""Sends bytes both ways between two networks of TUN devices, and prints what came of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fedrpc.emulation.link import parse_link
from fedrpc.emulation.packets import Forwarder
from fedrpc.emulation.tun import SERVER, SERVER_HOST, enter_network, get_place
from fedrpc.process import die_with_parent
from fedrpc.wire.tcpinfo import list_connections

PORT = 5000
_START = 0.3  # the share of the bytes after which TCP has found the link's rate


def fork(work: Callable[[], None]) -> int:
    parent, pid = os.getpid(), os.fork()
    if not pid:
        die_with_parent(parent)
        work()
        os._exit(0)
    return pid


def receive(connection: socket.socket, size: int) -> float:
    """Receives so many bytes; returns bits a second, after TCP's start."""
    got, began, began_at = 0, 0.0, 0
    while got < size:
        got += len(connection.recv(1 << 16))
        if not began and got > _START * size:
            began, began_at = time.monotonic(), got
    return 8 * (got - began_at) / (time.monotonic() - began)


def open_socket(control: str) -> socket.socket:
    """A socket whose TCP answers to losses by this congestion control; by the machine's when that is ""."""
    made = socket.socket()
    if control:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    return made


def exchange(folder: Path, text: str, size: int, control: str = "") -> None:
    link = parse_link(text)
    door, path = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), str(folder / "packets")
    door.bind(path)

    async def forward() -> None:
        Forwarder({0: link}, 0, door).open()
        await asyncio.Event().wait()

    def serve() -> None:
        enter_network(path, SERVER)
        listening = open_socket(control)
        listening.bind((SERVER_HOST, PORT))
        listening.listen()
        (folder / "listening").touch()
        connection, (host, _) = listening.accept()
        up = receive(connection, size)
        connection.sendall(json.dumps({"up": up, "host": host}).ljust(100).encode() + bytes(size))
        connection.recv(1)

    def connect() -> None:
        enter_network(path, get_place(0))
        connection, began = open_socket(control), time.monotonic()
        connection.connect((SERVER_HOST, PORT))
        opened_s = time.monotonic() - began
        connection.sendall(bytes(size))
        said = json.loads(connection.recv(100, socket.MSG_WAITALL))
        down = receive(connection, size)
        (counted,) = list_connections()
        found = {"down": down, "opened_s": opened_s, "resent": counted.resent, "sent": counted.sent}
        print(json.dumps(said | found), flush=True)

    others = [fork(lambda: asyncio.run(forward())), fork(serve)]
    while not (folder / "listening").exists():
        time.sleep(0.01)
    os.waitpid(fork(connect), 0)
    for pid in others:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        exchange(Path(made), sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
