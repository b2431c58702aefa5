"""The calls as gRPC makes them: a mistake in the server's own code is in its log, a client that is gone is not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import grpc
import pytest
from structlog.testing import capture_logs

from fedrpc.errors import Altered
from fedrpc.server import app
from fedrpc.wire.frames import SERVICE
from tests.fakes import asynchronous, problem_of
from tests.unit.client.test_app import PEER, Hub


@pytest.mark.parametrize(
    ("error", "logged"),
    [(TypeError("a mistake"), ["stream_failed"]), (grpc.aio.InternalError("it is gone"), [])],
)
@asynchronous
async def test_a_stream_that_fails_by_a_mistake_is_in_the_log(
    tmp_path: Path, error: Exception, logged: list[str]
) -> None:
    async def read() -> Any:
        raise error

    hub = Hub(tmp_path, problem_of("fedavg", clients=1))
    context = SimpleNamespace(
        read=read, write=None, peer=lambda: PEER, auth_context=dict, send_initial_metadata=AsyncMock()
    )
    with capture_logs() as lines, pytest.raises(type(error)):
        await hub._servicer.connect(None, context)
    await hub.close()
    assert [line["event"] for line in lines] == logged


class BreaksInItsFirstWrite:
    """Stands in for a Connection that reads a changed message while its first frame is on the way."""

    num_sessions = 1

    def __init__(self, _: object, read: object, write: Callable[[bytes], Awaitable[None]], *__: object) -> None:
        self._write = write

    async def run(self) -> None:
        writing = asyncio.ensure_future(self._write(b"a task"))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        raise Altered("a frame was changed on its way")


@asynchronous
async def test_a_client_whose_stream_breaks_in_the_first_write_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "Connection", BreaksInItsFirstWrite)
    hub = Hub(tmp_path, problem_of("fedavg", clients=1))
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([hub._servicer.build_handlers()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(f"/{SERVICE}/Connect")()
        try:
            assert await call.read() == b"a task"
            code = await asyncio.wait_for(call.code(), 10)
        finally:
            await server.stop(0)
            await hub.close()
    assert code == grpc.StatusCode.DATA_LOSS


class SlowToEnd(grpc.GenericRpcHandler):
    """Serves a call that is slow to clean up after itself."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    def build_handlers(self) -> grpc.GenericRpcHandler:
        return self

    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._wait)

    async def _wait(self, _: bytes, __: object) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)


@asynchronous
async def test_nothing_is_left_of_a_call_when_the_server_has_stopped() -> None:
    """The loop's end would cancel it, and grpc prints a traceback if that comes just after its handler's end."""
    handlers = SlowToEnd()
    server = app.GrpcServer(
        "127.0.0.1:0", None, False, app.Health(), num_clients=1, max_connections=4, reflection=False
    )
    await server.start(cast(Any, handlers))
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/any/method")(b"")
        await handlers.begun.wait()
        await server.stop(0)
        assert not [task for task in asyncio.all_tasks() if "_cygrpc/aio/server" in repr(task)]
        with pytest.raises(grpc.aio.AioRpcError):
            await call
