"""A TCP proxy that records every byte, and can stop in the middle of an upload.

A byte up counts when it was written to the server's socket, a byte down when it was read from there: the proxy counts
what the server's kernel counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from fedrpc.wire.v2 import coordinator_pb2 as pb

_PREFACE_BYTES = 24  # how an HTTP/2 client begins
_DATA = 0x0


@dataclass
class Connection:
    """One connection that reached the server."""

    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)
    marks: list[tuple[int, int]] = field(default_factory=list)  # (down, up) so far, before each piece that came down

    def farewell(self) -> tuple[int, int]:
        """Bytes (down, up) before the server announced the end of the run; raises when it never did.

        All later bytes follow from that: the frame that says so, the trailers, GOAWAY, the end.
        """
        down = next(offset for offset, frame in _frames(bytes(self.down)) if frame.HasField("finished"))
        return down, next(up for before, up in reversed(self.marks) if before <= down)


def http2_frames(stream: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yields the complete frames of one direction, as (offset, type, stream number, payload)."""
    offset = _PREFACE_BYTES if stream.startswith(b"PRI * HTTP/2") else 0
    while offset + 9 <= len(stream):
        size = int.from_bytes(stream[offset : offset + 3], "big")
        number = int.from_bytes(stream[offset + 5 : offset + 9], "big")
        if offset + 9 + size > len(stream):
            return
        yield offset, stream[offset + 3], number, stream[offset + 9 : offset + 9 + size]
        offset += 9 + size


def _frames(stream: bytes) -> Iterator[tuple[int, pb.Frame]]:
    """Yields what the server said on Connect: each frame, and the offset of the HTTP/2 frame that it begins in."""
    calls: dict[int, bytearray] = {}
    began: dict[int, int] = {}
    for offset, kind, number, payload in http2_frames(stream):
        if kind != _DATA:
            continue
        data = calls.setdefault(number, bytearray())
        if not data:
            began[number] = offset
        data += payload
        while len(data) >= 5 and len(data) >= (end := 5 + int.from_bytes(data[1:5], "big")):
            with contextlib.suppress(DecodeError):  # the answer to Join is another message
                yield began[number], pb.Frame.FromString(bytes(data[5:end]))
            del data[:end]
            began[number] = offset


class Proxy:
    """Listens on a port of its own and forwards everything to the server.

    Args:
        server: HOST:PORT; nobody need listen there yet.
        hold_after: Stop forwarding, in each connection, after this many bytes up.
    """

    def __init__(self, server: str, hold_after: int | None = None) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._hold_after = hold_after
        self.connections: list[Connection] = []
        self.held = threading.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._listener = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def _call(self, work: object) -> object:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)  # type: ignore[arg-type]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            from_server, to_server = await asyncio.open_connection(*self._server)
        except OSError:
            self._drop(writer)
            return
        self._writers.add(to_server)
        connection = Connection()
        self.connections.append(connection)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._up(connection, reader, to_server))
                group.create_task(self._down(connection, from_server, writer))
        except* OSError:
            pass
        finally:
            self._drop(writer)
            self._drop(to_server)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.close()

    async def _up(self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self._hold_after is not None and len(connection.up) + len(data) > self._hold_after:
                data = data[: self._hold_after - len(connection.up)]
                connection.up += data
                writer.write(data)
                await writer.drain()
                self.held.set()
                await asyncio.Event().wait()  # until the connection is cut
            connection.up += data
            writer.write(data)
            await writer.drain()
        writer.close()  # forwards the end: the other direction ends when the other side has seen it

    async def _down(self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            connection.marks.append((len(connection.down), len(connection.up)))
            connection.down += data
            writer.write(data)
            await writer.drain()
        writer.close()

    def hold(self, after: int) -> None:
        """Stops forwarding, in each connection from now on, after this many bytes up."""
        self._hold_after = after
        self.held.clear()

    def pass_on(self) -> None:
        """Stops holding bytes back and cuts the held connections, as if the sender's machine had lost its power."""
        self._hold_after = None
        self._call(self._cut())

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def close(self) -> None:
        """Cuts everything and stops listening."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _close(self) -> None:
        self._listener.close()
        await self._cut()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
