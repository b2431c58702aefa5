"""Replies on disk: named when whole, reused only for the very same question, gone when no replay needs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fedrpc.server.spool import Spool, read_reply
from fedrpc.wire.codec import decode, encode
from fedrpc.wire.frames import serialise_file, write_file
from tests.unit.wire.messages import One, envelope_of


def small(question: bytes = b"question") -> bytes:
    payload = encode(One(torch.arange(20)))
    return serialise_file(envelope_of(payload, question=question), payload)


def spooled(spool: Spool, epoch: int = 0, task: str = "task", question: bytes = b"question") -> Path:
    payload = encode(One(torch.arange(20)))
    incoming = spool.make_incoming_path(epoch, task)
    write_file(incoming, envelope_of(payload, question=question), payload, sync=False)
    return spool.keep(incoming, epoch, task)


@pytest.fixture
def spool(tmp_path) -> Spool:
    return Spool(tmp_path / "spool")


def test_a_reply_is_reused_for_the_very_same_question_only(spool):
    path = spooled(spool)
    assert spool.exists(0, "task")
    assert spool.find_reusable(0, "task", b"question") == path
    assert spool.find_reusable(0, "task", b"another") is None
    assert not spool.exists(0, "task"), "an answer to another question is of no use"


def test_replies_to_other_tasks_or_epochs_are_not_reused(spool):
    spooled(spool)
    assert spool.find_reusable(0, "other", b"question") is None
    assert spool.find_reusable(1, "task", b"question") is None
    assert not spool.exists(1, "task")


@pytest.mark.parametrize("epoch", [0, 1, 17])
def test_a_restart_finds_whole_replies_and_drops_transfers_that_broke(tmp_path, epoch):
    first = Spool(tmp_path)
    path = spooled(first, epoch)
    broken = first.make_incoming_path(epoch, "broken")
    broken.write_bytes(b"half")
    again = Spool(tmp_path)
    assert again.find_reusable(epoch, "task", b"question") == path
    assert not broken.exists()


def test_two_transfers_of_one_task_do_not_write_to_one_file(spool):
    assert spool.make_incoming_path(0, "task") != spool.make_incoming_path(0, "task")


def test_a_damaged_reply_is_not_reused(spool):
    data = spooled(spool).read_bytes()
    for length in range(0, len(data), 5):
        spooled(spool).write_bytes(data[:length])
        assert spool.find_reusable(0, "task", b"question") is None
    for start in range(0, 160, 8):
        spooled(spool).write_bytes(data[:start] + b"\xee" * 8 + data[start + 8 :])
        assert spool.find_reusable(0, "task", b"question") is None, "the bytes are not those that came"


def test_replies_from_before_the_last_durable_point_go(spool):
    for epoch in range(4):
        spooled(spool, epoch)
    spool.clear(2)
    assert [spool.exists(epoch, "task") for epoch in range(4)] == [False, False, True, True]


# Small replies, which share a file


def test_small_replies_are_kept_side_by_side_and_found_again_after_a_restart(tmp_path):
    first = Spool(tmp_path)
    for task in ("a", "b", "c"):
        first.keep_small(small(task.encode()), 3, task)
    for spool in (first, Spool(tmp_path)):
        for task in ("a", "b", "c"):
            reply = spool.find_reusable(3, task, task.encode())
            assert reply is not None
            envelope, views = read_reply(reply)
            assert torch.equal(decode(One, envelope.parts, views).value, torch.arange(20))
        assert not spool.exists(3, "d")
        assert not spool.exists(2, "a")


def test_a_small_reply_to_another_question_gives_way_to_a_new_one(tmp_path):
    spool = Spool(tmp_path)
    spool.keep_small(small(b"old"), 0, "task")
    assert spool.find_reusable(0, "task", b"new") is None
    assert not spool.exists(0, "task")
    spool.keep_small(small(b"new"), 0, "task")
    assert Spool(tmp_path).find_reusable(0, "task", b"new") is not None


def test_a_small_reply_that_a_crash_tore_is_gone_and_the_others_are_there(tmp_path):
    whole = len(small()) + len(f"b {len(small())}\n")
    for lost in (1, 8, len(small()) - 1, len(small()), whole - 1):
        folder = tmp_path / str(lost)
        spool = Spool(folder)
        for task in ("a", "b"):
            spool.keep_small(small(), 0, task)
        [log] = folder.glob("0/*")
        os.truncate(log, log.stat().st_size - lost)
        again = Spool(folder)
        assert [again.exists(0, task) for task in ("a", "b")] == [True, False]
        again.keep_small(small(), 0, "c")
        third = Spool(folder)
        assert [third.find_reusable(0, task, b"question") is not None for task in ("a", "b", "c")] == [
            True,
            False,
            True,
        ]


@pytest.mark.parametrize(
    "line", [b"\xff\xfe 3\n", b"b\n", b"b x\n", b"b -5\n", b"b 99999999999999999999999\n", b"\n", b"b" * 400]
)
def test_a_small_reply_whose_first_line_is_damaged_is_gone_with_those_after_it(tmp_path, line):
    spool = Spool(tmp_path)
    spool.keep_small(small(), 0, "a")
    [log] = tmp_path.glob("0/*")
    log.write_bytes(log.read_bytes() + line + small())
    again = Spool(tmp_path)
    assert again.find_reusable(0, "a", b"question") is not None
    again.keep_small(small(), 0, "c")
    assert Spool(tmp_path).find_reusable(0, "c", b"question") is not None


def test_small_replies_from_before_the_last_durable_point_go(tmp_path):
    spool = Spool(tmp_path)
    for epoch in range(3):
        spool.keep_small(small(), epoch, "task")
    spool.clear(2)
    assert [spool.exists(epoch, "task") for epoch in range(3)] == [False, False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
