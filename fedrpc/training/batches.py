"""Batches of an epoch on the device that trains: from its own memory when the data fits there, or copied ahead of use.

They are the same on every device: which examples make a batch is decided on the CPU, and inputs are normalised there.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from fedrpc import device as devices
from fedrpc.data.examples import Examples

Batch = tuple[Tensor, Tensor]
_BLOCK_BYTES = 8 << 20  # of examples that are gathered at a time
_IDLE_BYTES = 64 << 20  # that a process may keep while others compute
_RESIDENT_SHARE = 0.5  # of the memory that a process can have; the rest is for the network and its activations


def slice_batches(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Consecutive slices; a last one of a single example joins its neighbour, because BatchNorm fails on it."""
    starts = list(range(0, len(order), size))
    if len(starts) > 1 and len(order) - starts[-1] == 1:
        starts.pop()
    for number, start in enumerate(starts):
        yield order[start : starts[number + 1]] if number + 1 < len(starts) else order[start:]


def load_batches(data: Examples, order: np.ndarray, batch_size: int, device: torch.device) -> Iterator[Batch]:
    """Loads the batches of an epoch onto a device."""
    batches = list(slice_batches(order, batch_size))
    if device.type == "cpu":
        return _split_blocks(_gather_blocks(data, batches))
    if (resident := RESIDENT.find(data, device)) is not None:
        return _select_batches(resident, order, batches)
    return _split_blocks(_copy_ahead(_gather_blocks(data, batches), device))


def load_batch(data: Examples, index: np.ndarray, device: torch.device) -> Batch:
    """Loads the examples at some positions onto a device."""
    if device.type != "cpu" and (resident := RESIDENT.find(data, device)) is not None:
        where = upload(torch.from_numpy(index), device)
        return resident[0].index_select(0, where), resident[1].index_select(0, where)
    x, y = data.batch(index)
    return x.to(device), y.to(device)


class ResidentData:
    """The examples that a process keeps on its GPU, from one training to the next; those used longest ago go first.

    Of each set there is one copy for as long as the set itself is there: a host has many clients' data at a time.
    """

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Examples, Batch] = WeakKeyDictionary()
        self._share = _RESIDENT_SHARE

    def find(self, data: Examples, device: torch.device) -> Batch | None:
        """A set's inputs and labels on the device, moved there if need be; None when they do not fit."""
        kept = self._kept.pop(data, None)
        if kept is None and len(data):
            x, _ = data.batch(np.zeros(1, dtype=np.int64))
            if self._make_room(len(data) * (x.nbytes + data.y[:1].nbytes), device):
                x, y = data.all()
                kept = x.to(device), y.to(device)
        if kept is not None:
            self._kept[data] = kept  # as the one used last
        return kept

    def _make_room(self, needed: int, device: torch.device) -> bool:
        held = sum(_count_bytes(batch) for batch in self._kept.values())
        limit = int(self._share * (devices.measure_room(device) + held))
        if needed > limit:
            return False
        for data in list(self._kept):
            if held + needed <= limit:
                break
            held -= _count_bytes(self._kept.pop(data))
        return True

    def trim(self, device: torch.device) -> None:
        """Drops all but a little where other processes take turns at the device, and need room for their own."""
        limit = _IDLE_BYTES if devices.is_shared(device) else None
        held = sum(_count_bytes(batch) for batch in self._kept.values())
        for data in list(self._kept):
            if limit is None or held <= limit:
                break
            held -= _count_bytes(self._kept.pop(data))

    def give_up(self) -> None:
        """Drops everything and keeps nothing from now on: memory was too small for it once."""
        self._kept.clear()
        self._share = 0.0


RESIDENT = ResidentData()


def _count_bytes(batch: Batch) -> int:
    return sum(values.nbytes for values in batch)


def _select_batches(resident: Batch, order: np.ndarray, batches: list[np.ndarray]) -> Iterator[Batch]:
    """Gathers each batch on the device, which the whole epoch's order is sent to once."""
    (x, y), start = resident, 0
    where = upload(torch.from_numpy(order), x.device)
    for batch in batches:
        part = where[start : start + len(batch)]
        yield x.index_select(0, part), y.index_select(0, part)
        start += len(batch)


def _gather_blocks(data: Examples, batches: list[np.ndarray]) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Gathers many batches at a time, since every call has a cost; with the sizes of a block's batches."""
    first, at_a_time = 0, 1
    while first < len(batches):
        block = batches[first : first + at_a_time]
        x, y = data.batch(np.concatenate(block))
        first += len(block)
        at_a_time = max(1, len(block) * _BLOCK_BYTES // max(1, x.nbytes))
        yield x, y, [len(index) for index in block]


def _split_blocks(blocks: Iterator[tuple[Tensor, Tensor, list[int]]]) -> Iterator[Batch]:
    for x, y, sizes in blocks:
        start = 0
        for size in sizes:
            yield x[start : start + size], y[start : start + size]
            start += size


def _copy_ahead(
    blocks: Iterator[tuple[Tensor, Tensor, list[int]]], device: torch.device
) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Copies each block in a stream of its own while the device computes on the one before it."""
    copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    computing = torch.cuda.current_stream(device)

    def copy(block: tuple[Tensor, Tensor, list[int]]) -> tuple[Tensor, Tensor, list[int], torch.cuda.Event]:
        with torch.cuda.stream(copying):
            x, y = (upload(values, device) for values in block[:2])
            return x, y, block[2], copying.record_event()

    ahead = next(blocks, None)
    waiting = None if ahead is None else copy(ahead)
    while waiting is not None:
        x, y, sizes, arrived = waiting
        following = next(blocks, None)
        waiting = None if following is None else copy(following)
        computing.wait_event(arrived)
        for values in (x, y):
            values.record_stream(computing)  # its memory may be used again only when that is done with it
        yield x, y, sizes


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Sends values without waiting for them to arrive, which takes memory that the system does not move."""
    return values.pin_memory().to(device, non_blocking=True)
