"""Reads the kernel's byte counters of this process's TCP connections, without privileges.

gRPC does not expose its sockets, but they are open files of this process: each is duplicated for the length of one
read (a duplicate held longer could suppress the FIN).
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

# Offsets of u64 counters in struct tcp_info of linux/tcp.h.
_ACKED, _RECEIVED, _SENT, _RETRANS = 120, 128, 200, 208


@dataclass(frozen=True)
class Connection:
    """One TCP connection's counters: every payload byte once, without retransmissions."""

    inode: int
    local_port: int
    peer_port: int
    sent: int
    received: int


def list_connections() -> Iterator[Connection]:
    """Lists the established TCP connections of this process; none where the kernel is not Linux."""
    if not sys.platform.startswith("linux"):
        return
    for name in os.listdir("/proc/self/fd"):
        try:
            info = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(info.st_mode) and (found := _read(int(name), info.st_ino)):
                yield found
        except OSError:
            continue  # closed in the meantime, not TCP, or not connected


def _read(fd: int, inode: int) -> Connection | None:
    with socket.socket(fileno=os.dup(fd)) as dup:
        if dup.family not in (socket.AF_INET, socket.AF_INET6) or dup.type != socket.SOCK_STREAM:
            return None
        peer = dup.getpeername()
        raw = dup.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        local = dup.getsockname()
    (received,) = struct.unpack_from("<Q", raw, _RECEIVED)
    if len(raw) >= _RETRANS + 8:
        (sent,) = struct.unpack_from("<Q", raw, _SENT)
        (again,) = struct.unpack_from("<Q", raw, _RETRANS)
    else:  # before Linux 4.19; bytes_acked counts the SYN as one byte
        (acked,) = struct.unpack_from("<Q", raw, _ACKED)
        sent, again = max(acked - 1, 0), 0
    return Connection(inode, local[1], peer[1], sent - again, received)


class Meter:
    """Adds up all connections seen on one port, including those that have closed.

    A connection's last bytes are lost when it closes between two reads, so `read` is called every second; connections
    that are open at the final snapshot are exact.

    Args:
        port: The server's port.
        local: True on the server (its own port), False on a client (the peer's port).
    """

    def __init__(self, port: int, *, local: bool) -> None:
        self._port, self._local = port, local
        self._seen: dict[int, Connection] = {}
        self.note = ""  # not empty when the counters are not exact

    def read(self) -> tuple[int, int]:
        """Reads the bytes (sent, received) so far."""
        open_now = set()
        for found in list_connections():
            if (found.local_port if self._local else found.peer_port) == self._port:
                self._seen[found.inode] = found
                open_now.add(found.inode)
        closed = len(self._seen.keys() - open_now)
        if closed:
            self.note = f"{closed} connections closed before the end; bytes after their last reading are not counted"
        return sum(c.sent for c in self._seen.values()), sum(c.received for c in self._seen.values())
