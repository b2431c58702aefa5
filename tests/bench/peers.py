"""The other end of two bare transfers on loopback, a process of its own: `python -m tests.bench.peers SIZE`.

It prints its two ports, then gives or takes SIZE bytes as often as it is asked: over plain TCP, and over a gRPC stream
of messages of 1 MiB that neither side looks into.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

CHUNK = 1 << 20
DOWN, UP = b"d", b"u"
SERVICE = "bench"


def send_all(connection: socket.socket, data: memoryview) -> None:
    """Sends in pieces of the size that gRPC's messages have."""
    for start in range(0, len(data), CHUNK):
        connection.sendall(data[start : start + CHUNK])


def receive_all(connection: socket.socket, into: memoryview) -> None:
    """Receives until the buffer is full."""
    got = 0
    while got < len(into):
        count = connection.recv_into(into[got : got + CHUNK])
        if not count:
            raise ConnectionError("the peer closed the connection")
        got += count


async def give_chunks(size: int) -> AsyncIterator[bytes]:
    """Messages of 1 MiB, `size` bytes in all."""
    chunk = bytes(CHUNK)
    for start in range(0, size, CHUNK):
        yield chunk[: size - start]


def _serve_tcp(listener: socket.socket, size: int) -> None:
    connection, _ = listener.accept()
    buffer = memoryview(bytearray(size))
    while order := connection.recv(1):
        if order == DOWN:
            send_all(connection, buffer)
        else:
            receive_all(connection, buffer)
            connection.sendall(b".")


async def _serve(size: int) -> None:
    async def give(_: bytes, context: Any) -> AsyncIterator[bytes]:
        async for chunk in give_chunks(size):
            yield chunk

    async def take(chunks: AsyncIterator[bytes], context: Any) -> bytes:
        got = 0
        async for chunk in chunks:
            got += len(chunk)
        return str(got).encode()

    server = grpc.aio.server()
    methods = {
        "Give": grpc.unary_stream_rpc_method_handler(give),
        "Take": grpc.stream_unary_rpc_method_handler(take),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_tcp, args=(listener, size), daemon=True).start()
    print(listener.getsockname()[1], port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
