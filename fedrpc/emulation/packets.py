"""Forwards the packets between clients and server over each client's link: delayed, queued at its rate, and lost.

Each side has a network namespace of its own, whose only way out is a TUN device (`tun.py`). What one side's kernel
sends is read from its device here, waits, and is written to the other side's. TCP is the kernels': it notices losses
and full queues, and answers as it does on a real link.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
from collections import deque
from collections.abc import Mapping

import numpy as np

from fedrpc.emulation.link import Link
from fedrpc.emulation.shaper import Blackouts
from fedrpc.emulation.tun import MTU_BYTES, SERVER, get_place
from fedrpc.seeds import derive

QUEUE_S = 0.2  # how long a packet may wait for its turn, as in a router
_LEAST_QUEUE, _MOST_QUEUE = 20, 10_000  # packets that may wait on the slowest link, and on one without a rate
_BATCH = 64  # packets read from a device before the others have their turn
_IPV4 = 4


class PacketQueue:
    """One direction of a client's link, as packets meet it.

    Args:
        rng: Draws jitter and losses: the n-th packet has the n-th draw.
        blackouts: Of its own, though they are at the same times as the other direction's.
    """

    def __init__(self, link: Link, direction: str, rng: np.random.Generator, blackouts: Blackouts) -> None:
        self._link, self._rng, self._blackouts = link, rng, blackouts
        self._rate = (link.down if direction == "down" else link.up) / 8  # bytes a second
        # As long as a round trip at least: a shorter queue runs dry whenever TCP halves its window.
        room = self._rate * max(QUEUE_S, link.rtt) / MTU_BYTES
        self._most_waiting = _MOST_QUEUE if math.isinf(room) else max(_LEAST_QUEUE, int(room))
        self._leave_at: deque[float] = deque()  # of the packets that wait for their turn
        self._free_at = self._arrived = 0.0  # when all that was taken is sent, and has arrived

    def send(self, size: int, now: float) -> float | None:
        """When a packet arrives that is sent now; None if it is lost, by chance or because too many wait already."""
        link = self._link
        is_lost = bool(link.loss) and self._rng.random() < link.loss
        travel = (link.rtt + (link.jitter * float(self._rng.uniform(-1, 1)) if link.jitter else 0.0)) / 2
        while self._leave_at and self._leave_at[0] <= now:
            self._leave_at.popleft()
        if len(self._leave_at) >= self._most_waiting:
            return None
        # A packet that is lost on its way takes its time at the link, too.
        self._free_at = self._blackouts.delay(max(self._free_at, now)) + size / self._rate
        self._leave_at.append(self._free_at)
        if is_lost:
            return None
        self._arrived = max(self._arrived, self._free_at + travel)  # order is kept
        return self._arrived


class _Lane:
    """The packets on their way to one device in one direction of a link."""

    def __init__(self, queue: PacketQueue) -> None:
        self._queue = queue
        self._travelling: deque[tuple[float, bytes]] = deque()
        self.device = -1  # the one that they go to; a packet for a device that is not there yet, or gone, is lost

    def send(self, packet: bytes, now: float) -> None:
        arrives = self._queue.send(len(packet), now)
        if arrives is None:
            return
        self._travelling.append((arrives, packet))
        if len(self._travelling) == 1:
            self._wait()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._travelling[0][0] - time.monotonic(), self._deliver)

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._travelling and self._travelling[0][0] <= now:
            with contextlib.suppress(OSError):  # the device, or its owner, is gone
                os.write(self.device, self._travelling.popleft()[1])
        if self._travelling:
            self._wait()


class Forwarder:
    """Forwards between the server's device and those of all clients.

    Args:
        links: By client.
        seed: The run's.
        door: Where the devices come in, as `tun.enter_network` sends them.
    """

    def __init__(self, links: Mapping[int, Link], seed: int, door: socket.socket) -> None:
        self._door, self._devices = door, dict[int, int]()  # by place
        began = time.monotonic()
        self._down, self._up = (
            {
                get_place(client): _Lane(
                    PacketQueue(
                        link,
                        direction,
                        derive(seed, "packets", direction, client),
                        Blackouts(link, derive(seed, "packets", "blackouts", client), began),
                    )
                )
                for client, link in links.items()
            }
            for direction in ("down", "up")
        )
        door.setblocking(False)

    def open(self) -> None:
        """Begins to take in devices and to forward."""
        asyncio.get_running_loop().add_reader(self._door, self._take_in)

    def close(self) -> None:
        """Closes all devices, which ends them."""
        asyncio.get_running_loop().remove_reader(self._door)
        for place in list(self._devices):
            self._drop(place)

    def _take_in(self) -> None:
        """Takes in a device; one whose process was restarted replaces the one before."""
        data, (device, *_), *_ = socket.recv_fds(self._door, 64, 1)
        place = int(data)
        self._drop(place)
        self._devices[place] = device
        if place == SERVER:
            for lane in self._up.values():
                lane.device = device
        else:
            self._down[place].device = device
        asyncio.get_running_loop().add_reader(device, self._read, place, device)

    def _drop(self, place: int) -> None:
        device = self._devices.pop(place, None)
        if device is not None:
            asyncio.get_running_loop().remove_reader(device)
            os.close(device)

    def _read(self, place: int, device: int) -> None:
        now = time.monotonic()
        for _ in range(_BATCH):
            try:
                packet = os.read(device, MTU_BYTES)
            except BlockingIOError:
                return
            # Others are the kernel's own, such as IPv6's search for routers.
            if packet[0] >> 4 == _IPV4:
                target = int.from_bytes(packet[16:20]) & 0xFFFFFF
                lane = self._down.get(target) if place == SERVER else self._up[place] if target == SERVER else None
                if lane:
                    lane.send(packet, now)
