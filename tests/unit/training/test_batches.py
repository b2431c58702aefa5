"""Batches on a GPU are those of a CPU, wherever they come from, and the host does not wait for the device."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from fedrpc import device as devices
from fedrpc.data.examples import Examples
from fedrpc.training import batches
from fedrpc.training.batches import ResidentData, load_batch, load_batches

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ROW = 3 * 4 + 8  # bytes of one of `make_examples`: three floats, and a label


def make_examples(count: int = 23) -> Examples:
    x = torch.arange(3 * count, dtype=torch.float32).reshape(count, 3)
    return Examples.of(x, torch.arange(count))


class Moves(Examples):
    """Examples that note how often all of them are read at once."""

    moved = 0

    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.moved += 1
        return super().all()


def make_moves(count: int) -> Moves:
    x = torch.zeros(count, 3)
    return Moves(torch.zeros(count, dtype=torch.int64), lambda index: x[torch.from_numpy(index)])


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is free of the device; data is 'moved' to the CPU in its place."""
    free = [10**9]
    monkeypatch.setattr(devices, "measure_room", lambda device: free[0])
    return free


def test_data_moves_once_and_stays_while_it_fits(room):
    resident, data = ResidentData(), make_moves(10)
    for _ in range(3):
        assert resident.find(data, CPU) is not None
    assert data.moved == 1
    room[0] = 0  # others took the rest: what is there stays
    assert resident.find(data, CPU) is not None
    assert data.moved == 1


def test_data_that_takes_more_than_half_of_what_is_free_stays_outside(room):
    resident, data = ResidentData(), make_moves(10)
    room[0] = 2 * 10 * ROW - 1
    assert resident.find(data, CPU) is None
    room[0] = 2 * 10 * ROW
    assert resident.find(data, CPU) is not None


def test_in_a_host_the_data_used_longest_ago_goes_first(room):
    resident, sets = ResidentData(), [make_moves(10) for _ in range(3)]
    room[0] = 2 * 25 * ROW  # half of it is for two and a half of them; what is held counts as room
    for data in sets[:2]:
        resident.find(data, CPU)
        room[0] -= 10 * ROW
    resident.find(sets[0], CPU)  # used again
    resident.find(sets[2], CPU)
    for data in (sets[0], sets[2]):
        resident.find(data, CPU)
    assert [data.moved for data in sets] == [1, 1, 1]
    resident.find(sets[1], CPU)
    assert sets[1].moved == 2, "it was the one to go"


def test_data_goes_with_its_client(room):
    resident, data = ResidentData(), make_moves(10)
    resident.find(data, CPU)
    assert len(resident._kept) == 1
    del data
    gc.collect()
    assert len(resident._kept) == 0


def test_after_memory_was_too_small_nothing_is_kept(room):
    resident, data = ResidentData(), make_moves(10)
    resident.find(data, CPU)
    resident.give_up()
    assert resident.find(data, CPU) is None


def test_where_processes_take_turns_an_idle_one_keeps_little(room, monkeypatch):
    resident, small, large = ResidentData(), make_moves(10), make_moves(20)
    monkeypatch.setattr(batches, "_IDLE_BYTES", 15 * ROW)
    for data in (large, small):
        resident.find(data, CPU)
    resident.trim(GPU)
    assert len(resident._kept) == 2, "nobody else needs the room"
    monkeypatch.setitem(devices._SHARES, GPU, 0.25)
    resident.trim(GPU)
    assert list(resident._kept) == [small]


def test_an_empty_set_is_nowhere(room):
    assert ResidentData().find(make_examples(0), CPU) is None
    assert list(load_batches(make_examples(0), np.arange(0), 4, CPU)) == []


@pytest.mark.parametrize("share", [0.5, 0.0], ids=["resident", "copied ahead"])
@pytest.mark.cuda
def test_batches_on_a_gpu_are_those_of_the_cpu(share, monkeypatch):
    monkeypatch.setattr(batches.RESIDENT, "_share", share)
    order = np.random.default_rng(0).permutation(23)
    expected, found = (list(load_batches(make_examples(), order, 4, device)) for device in (CPU, GPU))
    assert len(expected) == len(found)
    for one, two in zip(expected, found, strict=True):
        assert all(torch.equal(values, moved.cpu()) for values, moved in zip(one, two, strict=True))
    x, y = load_batch(make_examples(), np.array([3, 1]), GPU)
    assert y.tolist() == [3, 1]
    assert x.device == GPU
