"""The TCP connections of the server's port: what each has moved, and the end of those that no client uses.

gRPC's own limits (handshakes, the number of connections) let a peer stay that does anything at all: a Join of which a
byte comes every second, or a health check that never ends. So what counts here is whether a client has joined over a
connection. Without the kernel's table (only Linux has it) nothing is ended.
"""

from __future__ import annotations

import resource
from collections.abc import Collection
from urllib.parse import unquote

from fedrpc import log
from fedrpc.process import allow_open_files
from fedrpc.wire.tcpinfo import Connection, Meter, shut_connections

Peer = tuple[str, int]

STRANGER_S = 20.0  # how long a connection may be there over which nobody has joined
_CROWDED_S = 3.0  # the same when more than half of all connections that are allowed are there
_RESERVED_FILES = 128  # of this process: for the run directory, uploads, libraries and threads
_SPARE_CONNECTIONS = 100  # for probes, and for clients that come again before the server has noticed that they went


def parse_peer(text: str) -> Peer:
    """The address and port in gRPC's name of a peer, such as `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    host, _, port = unquote(text.partition(":")[2]).rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), int(port) if port.isdigit() else 0


def reserve_files(num_clients: int) -> int:
    """Raises the limit of open files, as far as the system permits, so that all clients and others have room.

    Returns:
        How many connections to allow: so many that some files are always left for the server itself.
    """
    wanted = 2 * num_clients + _SPARE_CONNECTIONS
    allow_open_files(wanted)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return wanted
    room = limit - min(_RESERVED_FILES, limit // 2)
    if room < wanted:
        log.get("server").warning("few_open_files", limit=limit, connections=room, remedy="raise `ulimit -n`")
    return min(wanted, room)


class Sockets:
    """Ends the connections of strangers.

    Args:
        meter: Has the open connections since its last reading.
        max_connections: How many gRPC accepts.
    """

    def __init__(self, meter: Meter, max_connections: int) -> None:
        self._meter, self._max_connections = meter, max_connections
        self._by_peer: dict[Peer, Connection] = {}
        self._strange_since: dict[int, float] = {}
        self._given_up: set[Peer] = set()

    def find(self, peer: Peer) -> Connection | None:
        """A connection's counters at the last reading; None when the kernel has not told."""
        return self._by_peer.get(peer)

    def give_up(self, peer: Peer) -> None:
        """Has a connection ended whose client is not there any more, or keeps others waiting."""
        self._given_up.add(peer)

    def check(self, now: float, used: Collection[Peer]) -> None:
        """Ends connections that nobody has used for too long; called after each reading of the meter.

        Args:
            used: The peers over whose connections clients have joined.
        """
        found = self._by_peer = {(each.peer_host, each.peer_port): each for each in self._meter.open.values()}
        strange = {each.inode for peer, each in found.items() if peer not in used}
        self._strange_since = {inode: self._strange_since.get(inode, now) for inode in strange}
        limit_s = _CROWDED_S if len(found) > self._max_connections // 2 else STRANGER_S
        ended = {inode for inode, since in self._strange_since.items() if now - since > limit_s}
        ended |= {each.inode for peer, each in found.items() if peer in self._given_up}
        self._given_up.clear()
        if ended:
            log.get("server").info("connections_ended", number=len(ended), of=len(found))
            shut_connections(ended)
