"""Peers that belong to no run: each kind does what it can to a server until it is told to stop."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

import grpc

from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.e2e.crowd import PREFACE, Crowd
from tests.e2e.rawclient import RawClient

EVERY_S = 0.5
NUM_CONNECTIONS = 50
Kind = Callable[[str, random.Random], Iterator[None]]


def hold_connections(address: str, rng: random.Random) -> Iterator[None]:
    """Holds connections, silent ones and half-greeted ones, and opens new ones for those that were closed."""
    crowd = Crowd(address)
    try:
        while True:
            crowd.drop_closed()
            crowd.add(NUM_CONNECTIONS - len(crowd.sockets), PREFACE[: rng.randrange(len(PREFACE) + 1)])
            yield
    finally:
        crowd.close()


def drip(address: str, rng: random.Random) -> Iterator[None]:
    """Holds connections over which a byte comes now and then."""
    crowd = Crowd(address)
    try:
        while True:
            crowd.drop_closed()
            crowd.add(NUM_CONNECTIONS - len(crowd.sockets), PREFACE)
            crowd.drip(rng.randbytes(1))
            yield
    finally:
        crowd.close()


def join_with_garbage(address: str, rng: random.Random) -> Iterator[None]:
    """Sends bytes that are no Join, and Joins of clients that the run does not have."""
    while True:
        with RawClient(address) as raw:
            for _ in range(10):
                with contextlib.suppress(grpc.RpcError):
                    raw.join_bytes(rng.randbytes(rng.randrange(200)))
                with contextlib.suppress(grpc.RpcError):
                    raw.join(rng.randrange(1000, 2**31))
        yield


def open_streams(address: str, rng: random.Random) -> Iterator[None]:
    """Opens streams over which come garbage, frames of no session, or nothing."""
    while True:
        with RawClient(address) as raw:
            for _ in range(10):
                raw.connect(rng.randbytes(rng.randrange(200)))
                raw.connect(pb.Frame(session=rng.getrandbits(32), attach=pb.Attach(token=rng.randbytes(16))))
                raw.connect()
            yield


def join_as_others(address: str, rng: random.Random) -> Iterator[None]:
    """Joins under the ids of clients, with keys of its own; not in KINDS, since who comes first is that client."""
    while True:
        with RawClient(address) as raw, contextlib.suppress(grpc.RpcError):
            raw.join(rng.randrange(4))
        yield


KINDS: tuple[Kind, ...] = (
    hold_connections,
    drip,
    join_with_garbage,
    open_streams,
)


@contextlib.contextmanager
def beside(address: str, seed: int, kind: Kind | None = None) -> Iterator[str]:
    """Strangers are there during the block, whether or not somebody listens; the seed chooses when no kind is named."""
    rng, over = random.Random(f"strangers/{seed}"), threading.Event()
    kind = kind or rng.choice(KINDS)

    def visit() -> None:
        with contextlib.closing(kind(address, rng)) as visits:
            while not over.wait(EVERY_S):
                next(visits)

    thread = threading.Thread(target=visit, name="strangers", daemon=True)
    thread.start()
    try:
        yield kind.__name__
    finally:
        over.set()
        thread.join(60)
    assert not thread.is_alive(), "strangers still wait for an answer"
