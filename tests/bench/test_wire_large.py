"""A tensor of 2.5 GB over real gRPC in chunks of 1 MiB, from file to file: exact, and never in memory as a whole."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import torch
from torch import Tensor

from fedrpc.wire.codec import Payload, decode, encode
from fedrpc.wire.frames import Assembler, read_chunk, read_file, serialise_chunks
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import part
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.bench.measures import MIB, sampled, show, status, timed

pytestmark = [pytest.mark.timeout(900), pytest.mark.aside]

NUM_FLOATS = 625_000_000  # 2.5 GB: more than the 2 GiB that a protobuf message can have
NUM_SMALL = 62_500_000
BLOCK = 1 << 22
MAX_BYTES = 4 << 30


@dataclass(frozen=True)
class Large:
    """One tensor."""

    weights: Tensor = part(Kind.WEIGHTS)


def _fill(path: Path, num_floats: int) -> Tensor:
    """A file of noise, mapped as a tensor."""
    values = np.memmap(path, dtype=np.float32, mode="w+", shape=(num_floats,))
    rng = np.random.default_rng(0)
    for start in range(0, num_floats, BLOCK):
        values[start : start + BLOCK] = rng.standard_normal(min(BLOCK, num_floats - start), dtype=np.float32)
    values.flush()
    return torch.from_file(str(path), shared=True, size=num_floats, dtype=torch.float32)


async def _send(payload: Payload, path: Path) -> None:
    """Streams a payload to a server on loopback, which writes what it takes to a file."""

    async def take(frames: AsyncIterator[bytes], _: Any) -> bytes:
        with path.open("wb") as file:
            assembler: Assembler | None = None
            async for data in frames:
                if assembler is None:
                    assembler = Assembler(pb.Frame.FromString(data).envelope, MAX_BYTES, file)
                else:
                    chunk = read_chunk(data)
                    assert chunk is not None
                    assembler.add(*chunk)
            assert assembler is not None
            assembler.finish()
        return b"taken"

    async def frames() -> AsyncIterator[bytes]:
        yield pb.Frame(envelope=pb.Envelope(parts=payload.parts, digest=payload.digest)).SerializeToString()
        for _, _, data in serialise_chunks(payload):
            yield data

    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler("bench", {"Take": grpc.stream_unary_rpc_method_handler(take)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await channel.stream_unary("/bench/Take")(frames()) == b"taken"
    finally:
        await server.stop(1)


def test_a_tensor_beyond_two_gibibytes_goes_through(tmp_path: Path, small: bool) -> None:
    sent, taken, num_floats = tmp_path / "sent", tmp_path / "taken", NUM_SMALL if small else NUM_FLOATS
    message = Large(_fill(sent, num_floats))
    base = status(os.getpid(), "RssAnon")
    with sampled(lambda: status(os.getpid(), "RssAnon"), 0.02) as values, timed() as seconds:
        payload = encode(message)
        asyncio.run(_send(payload, taken))
    envelope, buffers = read_file(taken)
    got = decode(Large, envelope.parts, buffers)
    assert got.weights.shape == message.weights.shape
    for start in range(0, num_floats, BLOCK):
        assert torch.equal(got.weights[start : start + BLOCK], message.weights[start : start + BLOCK])
    size, peak = 4 * num_floats, max(values) - base
    show(
        f"a tensor of {size / 1e9:g} GB from file to file (make bench ARGS='-k wire_large')",
        {
            "bytes": f"{size:,}",
            "seconds": f"{seconds[0]:.1f} ({size / seconds[0] / 1e9:.2f} GB/s; digest, CRC and SHA-256 on both sides)",
            "peak anonymous memory above base": f"{peak / MIB:.0f} MiB, sender and receiver together",
        },
    )
    assert peak < size / 4
    for path in (sent, taken):
        path.unlink()
