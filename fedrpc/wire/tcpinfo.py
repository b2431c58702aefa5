"""Reads the kernel's byte counters of this process's TCP connections, without privileges.

gRPC does not expose its sockets, but they are open files of this process: each is duplicated for the length of one
read (a duplicate held longer could suppress the FIN).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass

from fedrpc import log

# Offsets in struct tcp_info of linux/tcp.h: of u32 values, the round trip in microseconds and segments sent again; and
# of u64 counters of bytes.
_RTT, _SEGMENTS_RESENT = 68, 100
_ACKED, _RECEIVED, _SENT, _RETRANS = 120, 128, 200, 208


# Out of open files, of the process's or of the system's.
_NO_FILES = (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True)
class Connection:
    """One TCP connection's counters: every payload byte once, without retransmissions.

    Attributes:
        rtt_s: The round trip's time, smoothed, as the kernel measures it.
        resent: Segments that this side has sent again.
    """

    inode: int
    local_port: int
    peer_host: str
    peer_port: int
    sent: int
    received: int
    rtt_s: float = 0.0
    resent: int = 0


def list_connections() -> Iterator[Connection]:
    """Lists the established TCP connections of this process; none where the kernel is not Linux.

    Raises:
        OSError: This process has no file left to look at them.
    """
    for dup in _duplicate_sockets():
        with contextlib.suppress(OSError):  # not connected
            yield _read(dup)


def shut_connections(inodes: Container[int]) -> None:
    """Ends connections as if their peers had closed them, whoever in this process reads from them."""
    for dup in _duplicate_sockets():
        if os.fstat(dup.fileno()).st_ino in inodes:
            with contextlib.suppress(OSError):  # its peer was faster
                dup.shutdown(socket.SHUT_RDWR)


def _duplicate_sockets() -> Iterator[socket.socket]:
    """Yields a duplicate of each TCP socket of this process, open until the next one is asked for."""
    for name in os.listdir("/proc/self/fd") if sys.platform.startswith("linux") else ():
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as dup:
                if dup.family in (socket.AF_INET, socket.AF_INET6) and dup.type == socket.SOCK_STREAM:
                    yield dup
        except OSError as error:
            if error.errno in _NO_FILES:
                raise  # else it was closed in the meantime


def _read(dup: socket.socket) -> Connection:
    inode, peer = os.fstat(dup.fileno()).st_ino, dup.getpeername()
    raw = dup.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    local = dup.getsockname()
    (received,) = struct.unpack_from("<Q", raw, _RECEIVED)
    if len(raw) >= _RETRANS + 8:
        (sent,) = struct.unpack_from("<Q", raw, _SENT)
        (again,) = struct.unpack_from("<Q", raw, _RETRANS)
    else:  # before Linux 4.19; bytes_acked counts the SYN as one byte
        (acked,) = struct.unpack_from("<Q", raw, _ACKED)
        sent, again = max(acked - 1, 0), 0
    rtt_us, segments = (struct.unpack_from("<I", raw, at)[0] for at in (_RTT, _SEGMENTS_RESENT))
    host = peer[0].removeprefix("::ffff:")  # an IPv4 address at a socket for both
    return Connection(inode, local[1], host, peer[1], sent - again, received, rtt_us / 1e6, segments)


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
        self.open: dict[int, Connection] = {}  # by inode, at the last reading
        self._num_closed = self._sent = self._received = 0  # of those that have closed
        self._warned = False
        self.note = ""  # not empty when the counters are not exact

    def read(self) -> tuple[int, int]:
        """Reads the bytes (sent, received) so far; the ones before when this process is out of open files."""
        try:
            found = {each.inode: each for each in list_connections() if self._is_counted(each)}
        except OSError as error:
            if not self._warned:
                log.get("tcpinfo").warning("cannot_read_counters", error=error.strerror, remedy="raise `ulimit -n`")
            self._warned = True
        else:
            for gone in self.open.keys() - found.keys():
                self._num_closed += 1
                self._sent += self.open[gone].sent
                self._received += self.open[gone].received
            self.open = found
        if n := self._num_closed:
            self.note = f"{n} connections closed before the end; bytes after their last reading are not counted"
        here = self.open.values()
        return self._sent + sum(c.sent for c in here), self._received + sum(c.received for c in here)

    def _is_counted(self, connection: Connection) -> bool:
        return self._port == (connection.local_port if self._local else connection.peer_port)
