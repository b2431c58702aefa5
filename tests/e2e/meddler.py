"""A gRPC proxy between client and server that forwards messages, and changes those that it is told to change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio

from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.e2e.rawclient import SERVICE

# Takes a call's name, such as "Join", "up" or "down", and a message's bytes; gives the bytes that are forwarded.
Change = Callable[[str, str, bytes], bytes]
_WAIT_S = 30.0


class Meddler:
    """Listens on a port of its own.

    Args:
        server: HOST:PORT.
        change: What becomes of each message.
    """

    def __init__(self, server: str, change: Change) -> None:
        self._change = change
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meddler", daemon=True)
        self._thread.start()
        self.address = self._call(self._open(server))

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_WAIT_S)

    async def _open(self, server: str) -> str:
        self._channel = grpc.aio.insecure_channel(server, [("grpc.use_local_subchannel_pool", 1)])
        self._server = grpc.aio.server()
        handlers = {
            method.name: grpc.stream_stream_rpc_method_handler(partial(self._connect, method.name))
            if method.client_streaming
            else grpc.unary_unary_rpc_method_handler(partial(self._ask, method.name))
            for method in pb.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]].methods
        }
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def _ask(self, name: str, data: bytes, context: Any) -> bytes:
        try:
            answer = await self._channel.unary_unary(f"/{SERVICE}/{name}")(self._change(name, "up", data))
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        return self._change(name, "down", answer)

    async def _connect(self, name: str, _: Any, context: Any) -> None:
        call: Any = self._channel.stream_stream(f"/{SERVICE}/{name}")()
        up = asyncio.ensure_future(self._forward(name, context.read, call.write, "up"))
        try:
            await self._forward(name, call.read, context.write, "down")
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        finally:
            up.cancel()
            call.cancel()
            await asyncio.gather(up, return_exceptions=True)

    async def _forward(self, name: str, read: Any, write: Any, direction: str) -> None:
        while (data := await read()) is not grpc.aio.EOF:
            await write(self._change(name, direction, data))

    def close(self) -> None:
        """Stops listening and ends all calls."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_S)
        self._loop.close()

    async def _close(self) -> None:
        await self._server.stop(0)
        await self._channel.close()


@contextmanager
def meddle(server: str, change: Change) -> Iterator[str]:
    """Gives the address of a proxy that is there for a while."""
    meddler = Meddler(server, change)
    try:
        yield meddler.address
    finally:
        meddler.close()
