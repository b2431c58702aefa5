"""One transfer of 44.7 MB each way, against plain TCP and a bare gRPC stream, all three in turns.

Ours is timed from one half of a method to the other: encoding, digests, checks and the spool are in it.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import grpc.aio
import pytest

from tests.bench.peers import DOWN, SERVICE, UP, give_chunks, receive_all, send_all
from tests.bench.results import Figures
from tests.e2e.programs import Gates, Programs, settings, wait_for
from tests.e2e.rundir import read_rows

pytestmark = pytest.mark.timeout(300)

MODEL_BYTES = 44_740_040  # resnet18 on one channel
WARM_UP = 2


class Peer:
    """The bench's own end of the bare transfers; each returns its seconds."""

    def __init__(self, tcp_port: int, grpc_port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", tcp_port))
        self._target = f"127.0.0.1:{grpc_port}"
        self._buffer = memoryview(bytearray(MODEL_BYTES))

    def transfer_by_tcp(self, direction: str) -> float:
        """Down counts until the last byte is here, up until the peer says that it has the last one."""
        began = time.monotonic()
        if direction == "down":
            self._connection.sendall(DOWN)
            receive_all(self._connection, self._buffer)
        else:
            self._connection.sendall(UP)
            send_all(self._connection, self._buffer)
            assert self._connection.recv(1)
        return time.monotonic() - began

    async def transfer_by_grpc(self, direction: str) -> float:
        """The same over a stream of a channel that is already connected."""
        async with grpc.aio.insecure_channel(self._target) as channel:
            await channel.channel_ready()
            work: Callable[[grpc.aio.Channel], Awaitable[int]] = _take if direction == "down" else _give
            began = time.monotonic()
            assert await work(channel) == MODEL_BYTES
            return time.monotonic() - began

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


async def _take(channel: grpc.aio.Channel) -> int:
    return sum([len(chunk) async for chunk in channel.unary_stream(f"/{SERVICE}/Give")(b"")])


async def _give(channel: grpc.aio.Channel) -> int:
    return int(await channel.stream_unary(f"/{SERVICE}/Take")(give_chunks(MODEL_BYTES)))


@contextmanager
def running_peer() -> Iterator[Peer]:
    """A peer in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.peers", str(MODEL_BYTES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            peer = Peer(*map(int, process.stdout.readline().split()))
            yield peer
            peer.close()
        finally:
            process.kill()


def test_goodput(tmp_path: Path, scripts: Programs, gates: Gates, figures: Figures, small: bool) -> None:
    repeats = 2 if small else 15
    notes, rounds = gates.folder / "notes.jsonl", WARM_UP + repeats
    gates.shut(*(f"server-{number}" for number in range(rounds + 1)))
    words = {"clients": 1, "rounds": rounds + 1, "eval_every": 100_000, "feature_eval_every": 100_000}
    run = scripts.run(
        tmp_path / "run",
        *settings(method="timed-echo", model="resnet18", params__gates=str(gates.folder), **words),
    )
    seconds: dict[str, dict[str, list[float]]] = {way: {"ours": [], "tcp": [], "grpc": []} for way in ("down", "up")}

    def reached(name: str) -> bool:
        assert run.code is None, run.err
        return bool(gates.pids(name))

    with running_peer() as peer:
        for number in range(rounds):
            wait_for(f"round {number}", lambda name=f"server-{number}": reached(name))
            for way, by in seconds.items():
                by["tcp"].append(peer.transfer_by_tcp(way))
                by["grpc"].append(asyncio.run(peer.transfer_by_grpc(way)))
            gates.open(f"server-{number}")
            wait_for(f"round {number + 1}", lambda name=f"server-{number + 1}": reached(name))
            at = {row["what"]: row["monotonic"] for row in read_rows(notes) if row["round"] == number}
            seconds["down"]["ours"].append(at["question here"] - at["question asked"])
            seconds["up"]["ours"].append(at["answer here"] - at["answer given"])
    for way, by in seconds.items():
        rate = {name: MODEL_BYTES / median(values[WARM_UP:]) / 1e6 for name, values in by.items()}
        beside = {f"{name}_MB/s": rate[name] for name in ("ours", "tcp", "grpc")}
        figures.add(way, rate["ours"] / rate["tcp"], **beside, of_bare_gRPC=rate["ours"] / rate["grpc"])
