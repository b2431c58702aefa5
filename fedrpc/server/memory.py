"""The server's end of a connection within one process: gRPC's calls without gRPC, sockets or threads.

It stands where gRPC stands: the same handlers get the same bytes, in the same order, and a client's transport has the
same calls. So everything above it is what runs over a network, too.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio

from fedrpc.server.app import Servicer

ADDRESS = "this-process:0"
_ROOM = 8  # frames of a MiB at most that wait for their reader, as flow control has it


@dataclass(frozen=True)
class _Details:
    """What gRPC gives to find a handler."""

    method: str
    invocation_metadata: tuple[()] = ()


class _Aborted(Exception):
    """A handler ended its call with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        empty = grpc.aio.Metadata()
        self.status = grpc.aio.AioRpcError(code, empty, empty, details)


class _Pipe:
    """Frames on their way in one direction, from one writer to one reader."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._filled, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self.closed = False

    async def put(self, frame: bytes) -> None:
        """Hands a frame over; waits while the reader is behind."""
        await self._has_room.wait()
        self._frames.append(frame)
        self._filled.set()
        if len(self._frames) >= _ROOM and not self.closed:
            self._has_room.clear()

    async def get(self) -> bytes | None:
        """Takes the next frame; None after the last one."""
        await self._filled.wait()
        frame = self._frames.popleft() if self._frames else None
        self._has_room.set()
        if not self._frames and not self.closed:
            self._filled.clear()
        return frame

    def close(self) -> None:
        """Has no more frames come."""
        self.closed = True
        self._filled.set()
        self._has_room.set()


class _Context:
    """What a handler is given: gRPC's `ServicerContext`, as far as the server uses it."""

    def __init__(self, peer: str, up: _Pipe | None = None, down: _Pipe | None = None) -> None:
        self._peer, self._up, self._down = peer, up, down

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> Mapping[str, Any]:
        return {}

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise _Aborted(code, details)

    async def send_initial_metadata(self, _: Any) -> None:
        """There is none."""

    async def read(self) -> Any:
        assert self._up is not None, "a stream's"
        frame = await self._up.get()
        return grpc.aio.EOF if frame is None else frame

    async def write(self, frame: bytes) -> None:
        assert self._down is not None, "a stream's"
        await self._down.put(frame)


class _Call:
    """A client's end of a stream."""

    def __init__(self, handler: Callable[[Any, Any], Any], peer: str) -> None:
        self._up, self._down = _Pipe(), _Pipe()
        self._error: Exception | None = None
        self._serving = asyncio.ensure_future(self._serve(handler, _Context(peer, self._up, self._down)))

    async def _serve(self, handler: Callable[[Any, Any], Any], context: _Context) -> None:
        try:
            await handler(None, context)
        except _Aborted as aborted:
            self._error = aborted.status
        except Exception as error:  # the server has logged it
            self._error = _Aborted(grpc.StatusCode.UNKNOWN, str(error)).status
        finally:
            self._up.close()
            self._down.close()

    async def read(self) -> Any:
        frame = await self._down.get()
        if frame is None and self._error:
            raise self._error
        return grpc.aio.EOF if frame is None else frame

    async def write(self, frame: bytes) -> None:
        if self._up.closed:
            raise self._error or asyncio.InvalidStateError("the stream has ended")
        await self._up.put(frame)

    def cancel(self) -> None:
        self._serving.cancel()


class MemoryChannel:
    """What a client's transport calls: gRPC's channel, as far as it uses it."""

    def __init__(self, handlers: grpc.GenericRpcHandler, peer: str) -> None:
        self._handlers, self._peer = handlers, peer

    def _find(self, path: str) -> Any:
        return self._handlers.service(_Details(path))  # type: ignore[arg-type]

    def unary_unary(self, path: str) -> Callable[..., Any]:
        """A call with one message each way."""

        async def call(data: bytes, timeout: float | None = None) -> bytes:
            try:
                answer: bytes = await self._find(path).unary_unary(data, _Context(self._peer))
            except _Aborted as aborted:
                raise aborted.status from None
            return answer

        return call

    def stream_stream(self, path: str) -> Callable[[], _Call]:
        """A stream in both directions."""
        return lambda: _Call(self._find(path).stream_stream, self._peer)

    async def close(self) -> None:
        """Nothing is open."""


class MemoryServer:
    """Stands in for `GrpcServer` where the clients are in the server's own process."""

    port, address = 0, ADDRESS

    def __init__(self) -> None:
        self._handlers: asyncio.Future[grpc.GenericRpcHandler] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count(1)

    async def start(self, servicer: Servicer) -> None:
        """Starts serving."""
        self._handlers.set_result(servicer.build_handlers())

    async def stop(self, grace_s: float) -> None:
        """Nothing is open: streams end with their connections."""

    async def wait_until_started(self) -> None:
        """Waits until clients can come in."""
        await asyncio.shield(self._handlers)

    def open_channel(self) -> MemoryChannel:
        """Opens a connection from a client in this process; after `start`."""
        return MemoryChannel(self._handlers.result(), f"memory:this-process:{next(self._numbers)}")
