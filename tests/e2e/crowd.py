"""Connections of peers that are no clients."""

from __future__ import annotations

import contextlib
import socket

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # how HTTP/2 begins, with empty settings


class Crowd:
    """Raw connections to a server."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))
        self.sockets: list[socket.socket] = []

    def add(self, number: int, said: bytes = b"") -> None:
        """Opens so many connections that begin with the same bytes."""
        for _ in range(number):
            with contextlib.suppress(OSError):  # one that is over the limit is closed at once
                peer = socket.create_connection(self._address, timeout=10)
                self.sockets.append(peer)
                peer.sendall(said)
                peer.setblocking(False)

    def drip(self, data: bytes = b"\0") -> None:
        """Sends a byte over each."""
        for peer in self.sockets:
            with contextlib.suppress(OSError):
                peer.send(data)

    def drop_closed(self) -> None:
        """Forgets those that the server has closed."""
        before, self.sockets = self.sockets, []
        for peer in before:
            if _is_open(peer):
                self.sockets.append(peer)
            else:
                peer.close()

    def close(self) -> None:
        """Closes all."""
        for peer in self.sockets:
            peer.close()
        self.sockets.clear()

    def count_open(self) -> int:
        """Counts those that the server has not closed."""
        return sum(_is_open(peer) for peer in self.sockets)


def _is_open(peer: socket.socket) -> bool:
    """Reads what has come; a connection is closed when its end has come."""
    try:
        while peer.recv(65536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
